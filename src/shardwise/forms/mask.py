"""Masks, and results whose size depends on values.

Such results are replicated. With `ragged_results()` what masks find is sharded: what each rank
finds in its own shard of dim 0 stays there, and only the counts are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..config import current
from ..dispatch.fallback import fallback_form, laid_out, mesh_of
from ..dispatch.operator import register_form
from ..errors import OutOfRangeError
from ..layout.placement import Placement, Replicate, Shard
from ..rules import Call
from ..rules.indexing import has_mask
from ..storage.ragged import as_dtensor, gather_plain, joined, move_to, reduce_partial

aten = torch.ops.aten


# --- nonzero, unique, bincount -------------------------------------------------------------------


@register_form("nonzero")
def nonzero(x: Any) -> Any:
    """The indices of true elements, from the gathered truth values."""
    op = aten.nonzero.default
    true = reduce_partial(op, x) != 0
    spec = true._spec
    if not current().ragged or not spec.slot_axes or spec.dim_axes[0] != spec.slot_axes:
        return laid_out(op(gather_plain(op, true)), spec.topology)
    parts = []
    for coord, part in zip(spec.slots, true._locals, strict=True):
        found = op(part)
        found[:, 0] += spec.box(coord)[0][0]
        parts.append(found)
    return joined(
        op, spec.topology, spec.placements, parts, [x.ndim], stride=lambda count: (1, count)
    )


for _name in (
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
):
    register_form(_name)(fallback_form(getattr(aten, _name).default))
# Its strides are not those that PyTorch tells before it runs.
register_form("nonzero_static", always=True)(fallback_form(aten.nonzero_static.default))


# --- reading by masks ----------------------------------------------------------------------------


def _is_mask(index: Any) -> bool:
    """True for a tensor of bools or bytes among indices."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _as_integers(x: Any, indices: Sequence[Any]) -> list[Any]:
    """Indices, with each mask replaced by the indices of its true elements."""
    made: list[Any] = []
    for index in indices:
        if _is_mask(index):
            at = len(made)
            _check_shape(index.shape, x.shape[at : at + index.ndim], at)
            made.extend(aten.nonzero.default(index).unbind(1))
        else:
            made.append(index)
    return made


def _check_shape(mask: Sequence[int], indexed: Sequence[int], at: int) -> None:
    """Raise for a mask of another shape: the indices of a smaller one would be in range."""
    if tuple(mask) != tuple(indexed):
        raise OutOfRangeError(
            f"The shape of the mask {list(mask)} at index {at} does not match that of the dims that"
            f" it indexes, {list(indexed)}. Give a mask that says yes or no of each of them."
        )


def _only_mask(x: Any, indices: Sequence[Any]) -> Any:
    """The mask, if it is the only index and covers the first dims; else None."""
    given = [index for index in indices if index is not None]
    mask = indices[0]
    if len(given) > 1 or mask is None or not _is_mask(mask) or not mask.ndim:
        return None
    return mask if tuple(x.shape[: mask.ndim]) == tuple(mask.shape) else None


def _if_masked(call: Call) -> tuple[()] | None:
    return () if has_mask(call) else None


@register_form("index", "_unsafe_index", cost=_if_masked)
def masked_index(x: Any, indices: Sequence[Any]) -> Any:
    """The elements that masks pick, by the indices of true elements. With `ragged_results()` each
    rank picks from its shard of dim 0."""
    op = aten.index.Tensor
    mask = _only_mask(x, indices)
    if mask is not None and current().ragged:
        mesh = mesh_of(op, [x, mask])
        x = reduce_partial(op, as_dtensor(x, mesh))
        own, inner = x._spec.dim_axes[0], x._spec.dim_axes[1 : mask.ndim]
        if own and not any(inner):
            return _picked(op, x, as_dtensor(mask, mesh))
    return reduce_partial(op, op(x, _as_integers(x, indices)))


def _picked(op: Any, x: Any, mask: Any) -> Any:
    """x[mask] with `x` sharded on dim 0 and not on the other dims of the mask."""
    spec, own = x._spec, x._spec.dim_axes[0]
    places = [Shard(0) if axis in own else Replicate() for axis in range(spec.topology.ndim)]
    cuts = [spec.dim_cuts[0], *[None] * (mask.ndim - 1)]
    mask = reduce_partial(op, mask)
    mask = move_to(op, mask, mask._spec.with_placements(places, cuts))
    parts = [
        op(part, [mask._locals[mask._spec.slot(coord)].to(torch.bool)])
        for coord, part in zip(spec.slots, x._locals, strict=True)
    ]
    found: list[Placement] = [
        Shard(place.dim - mask.ndim + 1) if isinstance(place, Shard) and place.dim else place
        for place in spec.placements
    ]
    rest_cuts = None if spec.cuts is None else spec.cuts[mask.ndim :]
    return joined(op, spec.topology, found, parts, spec.shape[mask.ndim :], rest_cuts)


@register_form("masked_select")
def masked_select(x: Any, mask: Any) -> Any:
    """x[mask], after both are expanded to one shape."""
    shape = torch.broadcast_shapes(x.shape, mask.shape) or (1,)
    return aten.index.Tensor(x.expand(shape), [mask.expand(shape)])


# --- writing by masks ----------------------------------------------------------------------------


def index_put(
    op: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *rest: Any
) -> Any:
    """A value for all true elements is written pointwise, other values by the indices of those."""
    mask = _only_mask(x, indices)
    if mask is not None:
        behind = x.ndim - mask.ndim
        if values.ndim == behind + 1 and values.shape[0] == 1:
            values = values.squeeze(0)
        castable = values.dtype is x.dtype or values.numel() == 1
        if castable and values.ndim <= behind and _fits(values, x.shape[mask.ndim :]):
            wide = mask.to(torch.bool).view(*mask.shape, *[1] * behind)
            return torch.where(wide, x + values if accumulate else values, x)
    return op(x, _as_integers(x, indices), values, accumulate, *rest)


def _fits(values: Any, shape: Sequence[int]) -> bool:
    """True if `values` broadcast to `shape`."""
    pairs = zip(reversed(values.shape), reversed(shape), strict=False)
    return all(size in (1, whole) for size, whole in pairs)


for _name in ("index_put", "_unsafe_index_put", "_index_put_impl"):
    register_form(_name, cost=_if_masked)(partial(index_put, getattr(aten, _name).default))
