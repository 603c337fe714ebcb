"""The last resort: an operator run whole on replicated inputs, and its result laid out again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import OpOverload
from ..errors import MeshError
from ..layout.mesh import Topology
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute.execute import redistribute_locals
from ..redistribute.prepare import once
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
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes or argument.name in _RUNNING:
            found.extend(value if isinstance(value, (list, tuple)) else [value])
    return found


_RUNNING = ("running_mean", "running_var")
"""The arguments that batch normalisation writes into, whatever its schema says."""


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


def run_on(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    change: Callable[[Any, bool], Any],
    store: Callable[[Any, Any], object],
    like: DTensorSpec | None = None,
) -> Any:
    """Run `op` on other tensors in place of its own, and lay out what it returns.

    `change(tensor, written)` gives the tensor that stands for an operand. `store(tensor, value)`
    writes the value of such a tensor into a written operand.
    """
    tensors: list[Any] = list(tensors_in(args, kwargs))
    written = written_in(op, args)
    ours = [isinstance(t, Wrapper) and any(t is w for w in written) for t in tensors]
    # A tensor that is written and read is one tensor for the operator as well.
    own = {id(t): change(t, mine) for t, mine in zip(tensors, ours, strict=True)}
    values = [own[id(tensor)] for tensor in tensors]
    given, named = filled(args, kwargs, iter(values))
    made = op(*given, **named)
    for tensor, value, mine in zip(tensors, values, ours, strict=True):
        if mine and value is not tensor:
            store(tensor, value)
    same = {id(value): tensor for tensor, value in zip(tensors, values, strict=True)}
    mesh = next(t._spec.topology for t in tensors if isinstance(t, Wrapper))
    return wrapped(made, mesh, like, same)


def fallback_form(
    op: OpOverload, change: Callable[[Any, bool], Any] | None = None
) -> Callable[..., Any]:
    """`op` on replicated inputs, or on those that `change` gives as it does in `run_on`."""

    def whole(tensor: Any, written: bool) -> torch.Tensor:
        full = full_local(tensor)
        return own_copy(full, tensor._spec.meta) if written else full

    def run(*args: Any, **kwargs: Any) -> Any:
        mesh_of(op, list(tensors_in(args, kwargs)))
        return run_on(op, args, kwargs, change or whole, store)

    return run


def into_plain_form(op: OpOverload) -> Callable[..., Any]:
    """`op` that writes into a plain tensor: ranks may hold different values there, so each computes
    all of it."""
    return fallback_form(op, lambda tensor, _: gather_plain(op, tensor))


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
        if (found := same.get(id(made))) is not None:
            return found
        dense = made.layout is torch.strided  # a sparse tensor is never on a mesh
        return laid_out(made, mesh, like) if dense and not isinstance(made, Wrapper) else made
    if isinstance(made, (list, tuple)):
        values = [wrapped(value, mesh, like, same) for value in made]
        return values if isinstance(made, list) else tuple(values)
    return made
