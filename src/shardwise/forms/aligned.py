"""A tensor and a mask of its first dims, cut alike, in pieces that follow each other as the places
do that the mask picks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..layout.geometry import Cuts, chunk_cuts
from ..layout.mesh import Topology
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec
from ..storage.ragged import as_dtensor, counted, move_to, reduce_partial

__all__ = ["Aligned", "align", "axes_within", "has_few", "in_boxes"]


class Aligned(NamedTuple):
    """`x` and `mask` cut alike on dim 0 over `axes`; `flat` is what `x` was before, if the dims of
    the mask were made one."""

    x: Any
    mask: Any
    axes: tuple[int, ...]
    flat: Any

    @property
    def pieces(self) -> list[Placement]:
        """How what the mask picks is laid out: dim 0 over `axes`, then the dims that are left."""
        places: list[Placement] = []
        for axis, place in enumerate(self.x._spec.placements):
            if axis in self.axes:
                places.append(Shard(0))
            else:
                left = isinstance(place, Shard)
                places.append(Shard(place.dim - self.mask.ndim + 1) if left else place)
        return places

    @property
    def rest_cuts(self) -> list[Cuts | None]:
        cuts, ndim = self.x._spec.cuts, self.mask.ndim
        return [None] * (self.x.ndim - ndim) if cuts is None else list(cuts[ndim:])

    def masks(self) -> list[torch.Tensor]:
        """The piece of the mask for each local tensor of `x`: of bytes PyTorch makes none for a
        rank that has a single value to write."""
        mine = (self.mask._locals[self.mask._spec.slot(c)] for c in self.x._spec.slots)
        return [part.to(torch.bool) for part in mine]

    def counts(self, op: object) -> Cuts:
        """How many places of each shard the mask picks."""
        counts = [int(part.count_nonzero()) for part in self.mask._locals]
        return counted(op, self.mask._spec.topology, self.axes, counts)


def axes_within(spec: DTensorSpec, ndim: int) -> tuple[int, ...]:
    """The axes that shard one of the first `ndim` dims."""
    return tuple(
        axis
        for axis, place in enumerate(spec.placements)
        if isinstance(place, Shard) and place.dim < ndim
    )


def _leads(x: Any, mask: Any) -> tuple[Any, tuple[int, ...]]:
    """The one of both whose cuts the other follows, and the axes of them."""
    spec = x._spec.reduced
    axes = axes_within(spec, mask.ndim)
    if axes:
        return x, axes
    free = spec.placements
    own = axes_within(mask._spec, mask.ndim)
    return mask, tuple(axis for axis in own if free[axis].is_replicate())


def has_few(mesh: Topology, x: Any, mask: Any) -> bool:
    """Whether pieces would change owner for a mask of few places: to name them is less."""
    x, mask = as_dtensor(x, mesh), as_dtensor(mask, mesh)
    held, axes = _leads(x, mask)
    if not axes or held._spec.dim_axes[0] == axes:
        return False
    shards = prod(mesh.shape[axis] for axis in axes)
    behind = prod(x.shape[mask.ndim :])
    named = int(mask.count_nonzero()) * (4 + 2 * behind * x.dtype.itemsize)
    moved = mask.numel() * (1 + behind * x.dtype.itemsize)
    return bool(named * shards < moved)


def align(op: object, mesh: Topology, x: Any, mask: Any) -> Aligned | None:
    """`x` and `mask` cut alike; None if no dim of the mask is cut.

    If another dim than the first is cut, the dims of the mask become one, and pieces of it change
    owner: those of one row are on many ranks, and the next row goes on after them.
    """
    x, mask = as_dtensor(x, mesh), reduce_partial(op, as_dtensor(mask, mesh))
    shape, ndim = tuple(mask.shape), mask.ndim
    if tuple(x.shape[:ndim]) != shape:
        return None
    held, axes = _leads(x, mask)
    if not axes:
        return None
    x = reduce_partial(op, x)
    held = mask if held is mask else x
    flat, last = None, x._spec
    if held._spec.dim_axes[0] == axes:
        cuts = held._spec.dim_cuts[0]
    else:
        flat = x = x.flatten(0, ndim - 1)
        mask = mask.flatten()
        cuts = in_boxes(shape, prod(mesh.shape[axis] for axis in axes))
    gone = ndim - mask.ndim
    places: list[Placement] = []
    for axis, place in enumerate(last.placements):
        behind = isinstance(place, Shard) and axis not in axes
        places.append(Shard(place.dim - gone) if behind else Replicate())
    rest = (last.cuts or (None,) * last.ndim)[gone + 1 :]
    own = [None] * (mask.ndim - 1)
    return Aligned(
        move_to(op, x, _first(x._spec, places, axes, [cuts, *rest])),
        move_to(op, mask, _first(mask._spec, [Replicate()] * mesh.ndim, axes, [cuts, *own])),
        axes,
        flat,
    )


def _first(
    spec: DTensorSpec,
    places: Sequence[Placement],
    axes: tuple[int, ...],
    cuts: Sequence[Cuts | None],
) -> DTensorSpec:
    """A layout with dim 0 in shards over `axes`."""
    laid = [Shard(0) if axis in axes else place for axis, place in enumerate(places)]
    return spec.with_placements(laid, cuts)


def in_boxes(shape: Sequence[int], count: int) -> Cuts:
    """Cuts of all elements of a tensor, such that every piece is a box of it: rows, or pieces of
    rows if there are fewer rows than pieces.

    >>> in_boxes((4, 6), 2), in_boxes((2, 6), 4), in_boxes((3, 2), 8)
    ((12, 12), (3, 3, 3, 3), (1, 1, 1, 1, 1, 1, 0, 0))
    """
    outer = 1
    for dim, size in enumerate(shape):
        if outer * size >= count or dim + 1 == len(shape) or not size:
            break
        outer *= size
    each = count // outer
    pieces = [n * prod(shape[dim + 1 :]) for n in chunk_cuts(size, (each,))] * outer
    return (*pieces, *[0] * (count - len(pieces)))
