"""Reading and writing by masks: each rank finds the places in its box, and all learn the counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from ..entry import register_form
from ..geometry import Cuts, contiguous_stride
from ..mesh import Topology
from ..moving import wrote
from ..placement import Placement, Replicate, Shard
from ..ragged import as_dtensor, counted, joined, laid, requested, settled, whole
from ..replicated import fallback_form, mesh_of
from ..rules.indexing import has_mask
from ..spec import DTensorSpec
from ..wrapper import Wrapper, wrap
from .elements import pick, write
from .places import picks, writes

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
    x = settled(op, x)
    spec = x._spec
    if spec.is_replicated():
        return op(x)
    mesh = spec.topology
    found = []
    for coord, part in zip(spec.slots, x._locals, strict=True):
        starts = [start for start, _ in spec.box(coord)]
        found.append(op(part) + torch.tensor(starts, device=part.device))
    if all(place.is_shard(0) or place.is_replicate() for place in spec.placements):
        return requested(
            op, joined(op, mesh, spec.placements, found, [x.ndim], stride=lambda count: (1, count))
        )
    # Pieces of other dims interleave: the places counted through all dims tell their order.
    steps = torch.tensor(contiguous_stride(x.shape), device=x.device)
    places = [Shard(0) if place.is_shard() else place for place in spec.placements]
    flat = joined(op, mesh, places, [(part * steps).sum(1) for part in found])
    ordered = whole(op, flat).sort().values
    columns = torch.stack([ordered // s % n for s, n in zip(steps, x.shape, strict=True)])
    return as_dtensor(columns.t(), mesh)  # as on one device, one column after another


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


def _as_integers(indices: Sequence[Any]) -> list[Any]:
    """Masks among indices as the places where they are true."""
    made: list[Any] = []
    for index in indices:
        if _is_mask(index):
            made.extend(aten.nonzero.default(index).unbind(1))
        else:
            made.append(index)
    return made


class _Aligned(NamedTuple):
    """A tensor and a mask of its first dims, cut alike on dim 0 over `axes`."""

    x: Any
    mask: Any
    axes: tuple[int, ...]

    def pieces(self, ndim: int) -> list[Placement]:
        """How what the mask picks is laid out: dim 0 over `axes`, then the dims that are left."""
        places: list[Placement] = []
        for axis, place in enumerate(self.x._spec.placements):
            if axis in self.axes:
                places.append(Shard(0))
            else:
                places.append(Shard(place.dim - ndim + 1) if isinstance(place, Shard) else place)
        return places

    def rest_cuts(self, ndim: int) -> list[Cuts | None]:
        cuts = self.x._spec.cuts
        return [None] * (self.x.ndim - ndim) if cuts is None else list(cuts[ndim:])

    def masks(self) -> list[torch.Tensor]:
        """The piece of the mask for each local tensor of `x`."""
        return [self.mask._locals[self.mask._spec.slot(c)] for c in self.x._spec.slots]


def _one_mask(indices: Sequence[Any]) -> Any:
    """The mask, if it is the only index and covers the first dims."""
    given = [index for index in indices if index is not None]
    alone = len(given) == 1 and indices[0] is not None and _is_mask(given[0]) and given[0].ndim > 0
    return given[0] if alone else None


def _aligned(op: object, mesh: Topology, x: Any, mask: Any) -> _Aligned | None:
    """`x` and `mask` cut alike, if dim 0 is the only sharded dim among those of the mask."""
    x, mask = as_dtensor(x, mesh), settled(op, as_dtensor(mask, mesh))
    if tuple(x.shape[: mask.ndim]) != tuple(mask.shape):
        return None
    spec, own = x._spec.reduced, mask._spec
    axes = spec.dim_axes[0] or own.dim_axes[0]
    if not axes or any(spec.dim_axes[1 : mask.ndim]):
        return None
    rest = [None] * (mask.ndim - 1)
    if not spec.dim_axes[0]:
        if any(own.dim_axes[1:]) or any(not spec.placements[axis].is_replicate() for axis in axes):
            return None
        places = [Shard(0) if a in axes else place for a, place in enumerate(spec.placements)]
        cuts = [own.dim_cuts[0], *(spec.cuts or (None,) * x.ndim)[1:]]
        x = laid(op, settled(op, x), spec.with_placements(places, cuts))
    else:
        x = settled(op, x)
    places = [Shard(0) if a in axes else Replicate() for a in range(mesh.ndim)]
    mask = laid(op, mask, own.with_placements(places, [x._spec.dim_cuts[0], *rest]))
    return _Aligned(x, mask, axes)


@register_form("index", "_unsafe_index", when=picks)
def index(x: Any, indices: Sequence[Any]) -> Any:
    """What a mask picks is found where it is; masks elsewhere become integers. Elements by integers
    come from their owners."""
    op = aten.index.Tensor
    if not any(_is_mask(index) for index in indices if index is not None):
        return pick(op, x, indices)
    mask = _one_mask(indices)
    both = None if mask is None else _aligned(op, mesh_of(op, [x, *indices]), x, mask)
    if both is None:
        made = op(x, _as_integers(indices))
        return _as_pending(op, made, x) if isinstance(made, Wrapper) else made
    ndim = mask.ndim
    parts = [op(x, [m]) for x, m in zip(both.x._locals, both.masks(), strict=True)]
    like = both.x._spec.meta
    meta = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")

    def stride(count: int) -> Sequence[int]:
        one = torch.empty(count, dtype=torch.int64, device="meta")
        return op(meta, [one] * ndim).stride()  # type: ignore[no-any-return]

    mesh, places, rest = both.x._spec.topology, both.pieces(ndim), like.shape[ndim:]
    cuts = both.rest_cuts(ndim)
    return requested(op, joined(op, mesh, places, parts, rest, cuts, stride=stride))


def _as_pending(op: object, made: Any, x: Any) -> Any:
    """What was picked of `x`, pending where `x` is and nowhere else."""
    had = x._spec.sums if isinstance(x, Wrapper) else ()
    spec = made._spec
    places = [
        Replicate() if place.is_partial() and axis not in had else place
        for axis, place in enumerate(spec.placements)
    ]
    return laid(op, made, spec.with_placements(places, spec.cuts))


def _counts(op: object, both: _Aligned) -> Cuts:
    """How many places of each shard a mask picks."""
    spec = both.mask._spec
    counts = [int(part.count_nonzero()) for part in both.mask._locals]
    return counted(op, spec.topology, both.axes, counts)


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
        pending = in_place and x._spec.sums  # written where it is
        both = None if pending else _aligned(op, mesh, x, mask)
        if both is not None and (not in_place or both.x is x):
            return _put_pieces(op, both, values, accumulate)
    return op(x, _as_integers(indices), values, accumulate, *rest)


def _everywhere(x: Any, mask: Any, values: Any, accumulate: bool) -> Any:
    """One value, or one row of them, for all places of a mask."""
    behind = x.ndim - mask.ndim
    if values.ndim > behind:
        values = values.squeeze(0)
    wide = mask.to(torch.bool).view(*mask.shape, *[1] * behind)
    return torch.where(wide, x + values if accumulate else values, x)


def _put_pieces(write: Any, both: _Aligned, values: Any, accumulate: bool) -> Any:
    """Each rank writes the values of the places in its box."""
    x, ndim = both.x, both.mask.ndim
    spec = x._spec
    cuts = _counts(write, both)
    values = as_dtensor(values, spec.topology).expand(sum(cuts), *x.shape[ndim:])
    goal = DTensorSpec(
        spec.topology, both.pieces(ndim), values._spec.meta, cuts=[cuts, *both.rest_cuts(ndim)]
    )
    values = laid(write, settled(write, values), goal)
    made = [
        write(part, [mask], values._locals[goal.slot(coord)], accumulate)
        for coord, part, mask in zip(spec.slots, x._locals, both.masks(), strict=True)
    ]
    if write._schema.is_mutable:
        wrote(x)
        return x
    return wrap(spec, tuple(made))


for _name in ("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"):
    register_form(_name, when=lambda call: has_mask(call) or writes(call))(
        partial(index_put, getattr(aten, _name).default)
    )


@register_form("masked_scatter")
def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """The first elements of `source` in the places of the mask."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    mesh = mesh_of(aten.masked_scatter.default, [x, mask, source])
    made = aten.clone.default(as_dtensor(x, mesh).expand(shape))
    return masked_scatter_(made, mask, source)


@register_form("masked_scatter_")
def masked_scatter_(x: Any, mask: Any, source: Any) -> Any:
    """As `masked_scatter`, in place."""
    if mask.dtype is not torch.bool or x.dtype is not source.dtype:
        raise RuntimeError(
            f"masked_scatter: a mask of {mask.dtype} and a source of {source.dtype} were given for "
            f"a tensor of {x.dtype}. Give a mask of torch.bool and a source of the tensor's dtype."
        )
    if x.ndim == 0:
        return fallback_form(aten.masked_scatter_.default)(x, mask, source)
    mask = mask.expand(x.shape)
    count = int(mask.sum())
    if source.numel() < count:
        raise RuntimeError(
            f"masked_scatter: the mask has {count} places, but the source has only "
            f"{source.numel()} elements."
        )
    flat = source.reshape(-1)
    return x.index_put_((mask,), flat[:count] if flat.numel() > count else flat)


@register_form("masked_scatter_backward")
def masked_scatter_backward(grad: Any, mask: Any, sizes: Sequence[int]) -> Any:
    """What the mask picks of the gradient, then zeros for elements that were not used."""
    picked = aten.masked_select.default(grad, mask)
    left = prod(sizes) - picked.numel()
    return torch.cat([picked, picked.new_zeros(left)]).view(sizes)
