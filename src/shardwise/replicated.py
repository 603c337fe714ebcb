"""The last resort: an operator run whole on replicated inputs, and its result laid out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ._torch import OpOverload
from .errors import MeshError
from .infer import meta_of
from .mesh import Topology
from .plain import full_local
from .plans import filled, wrote
from .redistribute import plan as steps_of
from .redistribute import run_steps
from .spec import DTensorSpec, default_placements
from .wrapper import Wrapper, wrap

__all__ = ["as_form", "fallback_form", "laid_out", "mesh_of", "tensors_in", "written_in"]


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Every tensor among the arguments, in order."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, torch.Tensor))


def mesh_of(op: object, tensors: Sequence[torch.Tensor]) -> Topology:
    """The mesh of the DTensors among `tensors`."""
    mesh = next(t._spec.topology for t in tensors if isinstance(t, Wrapper))
    if not mesh.virtual and mesh.coordinate is None:
        raise MeshError(f"{op}: this rank is not in mesh {mesh}, so it cannot take part.")
    return mesh


def written_in(op: OpOverload, args: Sequence[Any]) -> list[Any]:
    """The tensors among the positional arguments that the operator writes into."""
    found: list[Any] = []
    for value, argument in zip(args, op._schema.arguments, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.extend(value if isinstance(value, (list, tuple)) else [value])
    return found


def laid_out(value: torch.Tensor, mesh: Topology, like: DTensorSpec | None = None) -> Any:
    """A whole tensor as a DTensor: in the shards of `like` if it has the same shape, else
    replicated."""
    meta = meta_of(value)
    whole = DTensorSpec._intern(mesh, default_placements(mesh), meta, None)
    if like is None or tuple(like.meta.shape) != meta.shape or not like.is_sharded():
        return wrap(whole, (value,))
    places = [p if p.is_shard() else whole.placements[0] for p in like.placements]
    spec = DTensorSpec(mesh, places, meta, cuts=like.cuts)
    return wrap(spec, run_steps(steps_of(whole, spec), (value,), meta.stride, fresh=True))


def store(target: Any, whole: torch.Tensor) -> None:
    """Write a whole value into a DTensor, which keeps its layout."""
    spec = target._spec
    src = DTensorSpec._intern(spec.topology, default_placements(spec.topology), spec.meta, None)
    parts = run_steps(steps_of(src, spec), (whole,), spec.meta.stride)
    for mine, new in zip(target._locals, parts, strict=True):
        mine.copy_(new)
    wrote(target)


def fallback_form(op: OpOverload) -> Callable[..., Any]:
    """`op` on replicated inputs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_in(args, kwargs))
        mesh = mesh_of(op, tensors)
        written = written_in(op, args)
        whole = []
        for tensor in tensors:
            full = full_local(tensor)
            mine = isinstance(tensor, Wrapper) and any(tensor is w for w in written)
            whole.append(full.clone() if mine else full)
        given, named = filled(args, kwargs, iter(whole))
        made = op(*given, **named)
        for tensor, full in zip(tensors, whole, strict=True):
            if isinstance(tensor, Wrapper) and any(tensor is w for w in written):
                store(tensor, full)
        if written:
            return written[0] if op._schema.returns else None
        return _wrapped(made, mesh)

    return run


def as_form(decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition whose results are DTensors even where it made a plain tensor on the way."""

    def run(*args: Any, **kwargs: Any) -> Any:
        mesh = mesh_of(decomposed, list(tensors_in(args, kwargs)))
        return _wrapped(decomposed(*args, **kwargs), mesh)

    return run


def _wrapped(made: Any, mesh: Topology) -> Any:
    if isinstance(made, Wrapper):
        return made
    if isinstance(made, torch.Tensor):
        return laid_out(made, mesh)
    if isinstance(made, (list, tuple)):
        return type(made)(_wrapped(value, mesh) for value in made)
    return made
