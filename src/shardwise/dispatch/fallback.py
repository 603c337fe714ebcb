"""The last resort: an operator run whole on replicated inputs, and its result laid out again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import OpOverload
from ..errors import MeshError
from ..layout.mesh import Topology
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute import once, redistribute_locals
from ..storage.operands import mark_written, own_copy
from ..storage.plain import full_local
from ..storage.ragged import gather_plain
from ..storage.wrapper import Wrapper, wrap
from .plans import filled, tensors_in


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
    whole = DTensorSpec.replicated(mesh, TensorMeta.of(value))
    if like is None or like.meta.shape != whole.meta.shape or not like.is_sharded():
        return wrap(whole, (value,))
    spec = like.reduced.with_meta(whole.meta)
    return wrap(spec, redistribute_locals(whole, spec, (value,), fresh=True))


def store(target: Any, whole: torch.Tensor) -> None:
    """Write a whole value into a DTensor, which keeps its layout."""
    spec = target._spec
    parts = redistribute_locals(spec.whole, spec, (whole,))
    for mine, new in zip(target._locals, parts, strict=True):
        once(mine, spec.meta).copy_(once(new, spec.meta))
    mark_written(target)


def run_whole(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    whole: Callable[[Any, bool], torch.Tensor],
    like: DTensorSpec | None = None,
) -> Any:
    """Run `op` on whole tensors and lay out what it returns and what it wrote.

    `whole(tensor, written)` gives the plain tensor that stands for an operand.
    """
    tensors: list[Any] = list(tensors_in(args, kwargs))
    mesh = mesh_of(op, tensors)
    written = written_in(op, args)
    ours = [isinstance(t, Wrapper) and any(t is w for w in written) for t in tensors]
    # A tensor that is written and read is one tensor for the operator as well.
    own = {id(t): whole(t, mine) for t, mine in zip(tensors, ours, strict=True)}
    plain = [own[id(tensor)] for tensor in tensors]
    given, named = filled(args, kwargs, iter(plain))
    made = op(*given, **named)
    for tensor, value, mine in zip(tensors, plain, ours, strict=True):
        if mine:
            store(tensor, value)
    same = {id(value): tensor for tensor, value in zip(tensors, plain, strict=True)}
    return wrapped(made, mesh, like, same)


def fallback_form(op: OpOverload) -> Callable[..., Any]:
    """`op` on replicated inputs."""

    def whole(tensor: Any, written: bool) -> torch.Tensor:
        full = full_local(tensor)
        return own_copy(full, tensor._spec.meta) if written else full

    def run(*args: Any, **kwargs: Any) -> Any:
        return run_whole(op, args, kwargs, whole)

    return run


def into_plain_form(op: OpOverload) -> Callable[..., Any]:
    """`op` that writes into a plain tensor: ranks may hold different values there, so each computes
    all of it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return run_whole(op, args, kwargs, lambda tensor, written: gather_plain(op, tensor))

    return run


def as_form(op: OpOverload, decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition whose results are DTensors even where it made a plain tensor on the way."""

    def run(*args: Any, **kwargs: Any) -> Any:
        mesh = mesh_of(op, list(tensors_in(args, kwargs)))
        made = decomposed(*args, **kwargs)
        if made is NotImplemented:
            return fallback_form(op)(*args, **kwargs)
        return wrapped(made, mesh, None, {})

    return run


def wrapped(
    made: Any, mesh: Topology, like: DTensorSpec | None, same: dict[int, torch.Tensor]
) -> Any:
    """Results as DTensors; `same` are the operands that were returned, by the id of their value."""
    if isinstance(made, torch.Tensor):
        if isinstance(made, Wrapper) or made.layout is not torch.strided:
            return made  # a sparse tensor is never on a mesh
        found = same.get(id(made))
        return laid_out(made, mesh, like) if found is None else found
    if isinstance(made, (list, tuple)):
        values = [wrapped(value, mesh, like, same) for value in made]
        return values if isinstance(made, list) else tuple(values)
    return made
