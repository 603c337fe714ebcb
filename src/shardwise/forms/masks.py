"""Reading and writing by masks: each rank finds the places in its box, and all learn the counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from ..config import ragged_results
from ..dispatch.fallback import fallback_form, mesh_of
from ..dispatch.operator import register_form
from ..errors import OutOfRangeError
from ..layout.geometry import contiguous_stride
from ..layout.mesh import Topology
from ..layout.placement import Replicate, Shard
from ..layout.spec import DTensorSpec, default_placements
from ..rules.indexing import has_mask
from ..storage.operands import mark_written
from ..storage.ragged import (
    as_dtensor,
    counted,
    gather_plain,
    is_requested,
    joined,
    move_to,
    reduce_partial,
    requested,
)
from ..storage.wrapper import Wrapper, wrap
from .aligned import Aligned, align, axes_within, has_few, in_boxes
from .elements import pick, write
from .places import picks, writes
from .posting import short

__all__ = [
    "index",
    "index_put",
    "masked_scatter",
    "masked_scatter_backward",
    "masked_select",
    "nonzero",
    "nonzero_static",
]

aten = torch.ops.aten


@register_form("nonzero")
def nonzero(x: Any) -> Any:
    """The places that each rank finds in its box, in the order of one device."""
    op = aten.nonzero.default
    mesh = mesh_of(op, [x])
    true = reduce_partial(op, x) != 0
    spec, shape = true._spec, x.shape
    axes = axes_within(spec, x.ndim)
    if not axes:
        return op(true)
    places = [Shard(0) if axis in axes else Replicate() for axis in range(mesh.ndim)]
    in_order = spec.dim_axes[0] == axes
    if is_requested() and not in_order:
        flat = true.flatten()
        true = move_to(op, flat, flat._spec.with_placements(places))
    parts = _places(op, true)
    cuts = counted(op, mesh, axes, [part.numel() for part in parts])
    if is_requested():
        rows = [_unravelled(part, shape) for part in parts]
        return joined(op, mesh, places, rows, [x.ndim], cuts=cuts, stride=lambda count: (1, count))
    if true.numel() < sum(cuts) * parts[0].dtype.itemsize:
        return op(_uncut(op, true))  # what is true of each place is less than to name so many
    found = gather_plain(op, joined(op, mesh, places, parts, cuts=cuts))
    return as_dtensor(_unravelled(found if in_order else found.sort().values, shape), mesh)


def _places(op: Any, x: Any) -> list[torch.Tensor]:
    """The places that each rank finds, counted through all dims."""
    spec, found = x._spec, []
    steps = torch.tensor(contiguous_stride(x.shape), device=x.device)
    for coord, part in zip(spec.slots, x._locals, strict=True):
        starts = torch.tensor([start for start, _ in spec.box(coord)], device=part.device)
        found.append(((op(part) + starts) * steps).sum(1).to(short(x.numel())))
    return found


def _unravelled(places: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The places in each dim; as on one device, one column lies after another."""
    steps = contiguous_stride(shape)
    columns = [places.to(torch.int64) // s % n for s, n in zip(steps, shape, strict=True)]
    count = places.numel()
    return torch.stack(columns).as_strided((count, len(columns)), (1, count))


@register_form("nonzero_static", always=True)
def nonzero_static(x: Any, *, size: int, fill_value: int = -1) -> Any:
    """As `nonzero`, cut or filled up to a size that is given."""
    found = aten.nonzero.default(x)[:size]
    made = x.new_full((size, x.ndim), fill_value, dtype=torch.int64)
    made[: found.shape[0]].copy_(found)
    return made


# --- masks among indices -----------------------------------------------------------------------


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _as_integers(x: Any, indices: Sequence[Any]) -> list[Any]:
    """Masks among indices as the places where they are true."""
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
    """Places of a smaller mask would be in range."""
    if tuple(mask) != tuple(indexed):
        raise OutOfRangeError(
            f"The shape of the mask {list(mask)} at index {at} does not match that of the dims that"
            f" it indexes, {list(indexed)}. Give a mask that says yes or no of each of them."
        )


def _one_mask(indices: Sequence[Any]) -> Any:
    """The mask, if it is the only index and covers the first dims."""
    given = [index for index in indices if index is not None]
    alone = len(given) == 1 and indices[0] is not None and _is_mask(given[0]) and given[0].ndim > 0
    return given[0] if alone else None


@register_form("index", "_unsafe_index", when=picks)
def index(x: Any, indices: Sequence[Any]) -> Any:
    """What a mask picks is found where it is; masks elsewhere become integers. Elements by integers
    come from their owners."""
    op = aten.index.Tensor
    if not any(_is_mask(index) for index in indices if index is not None):
        return pick(op, x, indices)
    mask = _one_mask(indices)
    mesh = mesh_of(op, [x, *indices])
    both = None
    if mask is not None and not has_few(mesh, x, mask):
        both = align(op, mesh, x, mask)
    if both is None:
        made = op(x, _as_integers(x, indices))
        return _as_pending(op, made, x) if isinstance(made, Wrapper) else made
    counts = both.counts(op)
    like = both.x._spec
    rest = like.shape[both.mask.ndim :]
    size = sum(counts) * prod(rest) * like.dtype.itemsize
    if mask.numel() < size and not (is_requested() or _is_cut(x, mask.ndim)):
        return op(x, [_uncut(op, both.mask).view(mask.shape)])  # less than to bring the result
    parts = [op(x, [m]) for x, m in zip(both.x._locals, both.masks(), strict=True)]
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    def stride(count: int) -> Sequence[int]:
        one = torch.empty(count, dtype=torch.int64, device="meta")
        return op(meta, [one] * mask.ndim).stride()  # type: ignore[no-any-return]

    return requested(
        op,
        joined(op, like.topology, both.pieces, parts, rest, both.rest_cuts, counts, stride=stride),
    )


def _as_pending(op: object, made: Any, x: Any) -> Any:
    """What was picked of `x`, pending where `x` is and nowhere else."""
    had = x._spec.sums if isinstance(x, Wrapper) else ()
    spec = made._spec
    places = [
        Replicate() if place.is_partial() and axis not in had else place
        for axis, place in enumerate(spec.placements)
    ]
    return move_to(op, made, spec.with_placements(places, spec.cuts))


def _is_cut(x: Any, ndim: int) -> bool:
    """Whether one of the first `ndim` dims is in shards."""
    return isinstance(x, Wrapper) and bool(axes_within(x._spec, ndim))


def _uncut(op: object, x: Any) -> Any:
    """A DTensor with nothing in shards."""
    return move_to(op, x, x._spec.with_placements(default_placements(x._spec.topology)))


@register_form("masked_select")
def masked_select(x: Any, mask: Any) -> Any:
    """As `x[mask]`, after both are brought to one shape."""
    shape = torch.broadcast_shapes(x.shape, mask.shape) or (1,)
    return aten.index.Tensor(x.expand(shape), [mask.expand(shape)])


# --- writing -----------------------------------------------------------------------------------


def index_put(
    op: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *rest: Any
) -> Any:
    """Values for all places of a mask are written pointwise; others go to the rank of their
    place, and so do values by integers."""
    in_place = op._schema.is_mutable
    if not any(_is_mask(index) for index in indices if index is not None):
        made = write(op, x, indices, values, accumulate)
        return x.copy_(made) if in_place else made
    mesh = mesh_of(op, [x, *indices, values])
    if not in_place:
        x = as_dtensor(x, mesh)
    mask = _one_mask(indices)
    if mask is not None and tuple(x.shape[: mask.ndim]) == tuple(mask.shape):
        behind = x.ndim - mask.ndim
        if values.ndim <= behind or (values.ndim == behind + 1 and values.shape[0] == 1):
            made = _everywhere(x, mask, values, accumulate)
            return x.copy_(made) if in_place else made
        both = _to_write(op, mesh, x, mask, values)
        if both is not None:
            return _put_pieces(op, x, both, values, accumulate)
    return op(x, _as_integers(x, indices), values, accumulate, *rest)


def _to_write(op: Any, mesh: Topology, x: Any, mask: Any, values: Any) -> Aligned | None:
    """`x` and `mask` cut alike; None if each rank had better write what a whole mask says."""
    ndim, in_place = mask.ndim, op._schema.is_mutable
    if in_place and x._spec.sums:  # written where it is
        return None
    if _is_cut(x, ndim):
        known = not _is_cut(mask, ndim) and not _is_cut(values, values.ndim)
        if (known and any(x._spec.dim_axes[1:ndim])) or has_few(mesh, x, mask):
            return None
        return align(op, mesh, x, mask)
    by_rows = isinstance(mask, Wrapper) and mask._spec.dim_axes[0] == axes_within(mask._spec, ndim)
    return align(op, mesh, x, mask) if by_rows and not in_place else None


def _everywhere(x: Any, mask: Any, values: Any, accumulate: bool) -> Any:
    """One value, or one row of them, for all places of a mask."""
    behind = x.ndim - mask.ndim
    if values.ndim > behind:
        values = values.squeeze(0)
    wide = mask.to(torch.bool).view(*mask.shape, *[1] * behind)
    return torch.where(wide, x + values if accumulate else values, x)


def _put_pieces(op: Any, x: Any, both: Aligned, values: Any, accumulate: bool) -> Any:
    """Each rank writes the values of the places in its box."""
    spec = both.x._spec
    cuts, rest = both.counts(op), spec.shape[both.mask.ndim :]
    values = as_dtensor(values, spec.topology).expand(sum(cuts), *rest)
    goal = DTensorSpec(spec.topology, both.pieces, values._spec.meta, cuts=[cuts, *both.rest_cuts])
    values = move_to(op, reduce_partial(op, values), goal)
    in_place = op._schema.is_mutable
    local = op if both.x is x else aten.index_put.default
    made = [
        local(part, [mask], values._locals[goal.slot(coord)], accumulate)
        for coord, part, mask in zip(spec.slots, both.x._locals, both.masks(), strict=True)
    ]
    if both.x is x and in_place:
        mark_written(x)
        return x
    new = wrap(spec, tuple(made))
    if both.flat is not None:  # back to where `x` is
        new = move_to(op, new, both.flat._spec).view(x.shape)
    return x.copy_(new) if in_place else new


for _name in ("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"):
    register_form(_name, when=lambda call: has_mask(call) or writes(call))(
        partial(index_put, getattr(aten, _name).default)
    )


def masked_scatter(put: Any, x: Any, mask: Any, source: Any) -> Any:
    """The first elements of `source` in the places of the mask, by one of the `index_put`."""
    if mask.dtype is not torch.bool or x.dtype is not source.dtype:
        raise RuntimeError(
            f"masked_scatter: a mask of {mask.dtype} and a source of {source.dtype} were given for "
            f"a tensor of {x.dtype}. Give a mask of torch.bool and a source of the tensor's dtype."
        )
    if not put._schema.is_mutable:
        x = x.expand(torch.broadcast_shapes(x.shape, mask.shape)).contiguous()
    mask = mask.expand(x.shape)
    if x.ndim == 0:
        return fallback_form(_WHOLE[put])(x, mask, source)
    count = int(mask.sum())
    if source.numel() < count:
        raise RuntimeError(
            f"masked_scatter: the mask has {count} places, but the source has only "
            f"{source.numel()} elements."
        )
    flat = source.reshape(-1)
    return put(x, (mask,), flat[:count] if flat.numel() > count else flat)


_WHOLE = {
    aten.index_put.default: aten.masked_scatter.default,
    aten.index_put_.default: aten.masked_scatter_.default,
}
for _put, _own in _WHOLE.items():
    register_form(_own._schema.name.removeprefix("aten::"))(partial(masked_scatter, _put))


@register_form("masked_scatter_backward")
def masked_scatter_backward(grad: Any, mask: Any, sizes: Sequence[int]) -> Any:
    """What the mask picks of the gradient, then zeros for elements that were not used."""
    with ragged_results():
        picked = aten.masked_select.default(grad, mask)
    axes = axes_within(picked._spec, 1)
    if not sizes or sizes[0] < prod(picked._spec.topology.shape[axis] for axis in axes):
        picked = requested(aten.masked_scatter_backward.default, picked)
    left = prod(sizes) - picked.numel()
    made: Any = torch.cat([picked, picked.new_zeros(left)])
    if axes_within(picked._spec, 1):  # in whole rows
        spec = made._spec
        count = prod(spec.topology.shape[axis] for axis in axes)
        places = [Shard(0) if axis in axes else Replicate() for axis in range(spec.topology.ndim)]
        goal = spec.with_placements(places, [in_boxes(sizes, count)])
        made = move_to(aten.masked_scatter_backward.default, made, goal)
    return made.view(sizes)
