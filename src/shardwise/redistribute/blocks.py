"""Dims that are sharded block by block, moved some of the dim at a time.

Where source and target are boxes of no common finer shape, a tensor goes through a third layout,
which would be held beside both. A stretch of a dim at a time that stays within the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..finer import seen_alike, trivial
from ..geometry import Interval, box_numel, memory_order, stride_like
from ..mesh import Coord
from ..placement import Placement, Shard
from ..spec import DTensorSpec, TensorMeta

__all__ = ["Stretch", "stretches"]

MOST = 1024
"""No tensor is cut into more stretches than this."""


@dataclass(frozen=True)
class Stretch:
    """The places of one dim from `start` to `stop`: some whole blocks, or a part of one."""

    dim: int
    start: int
    stop: int

    def of_spec(self, spec: DTensorSpec) -> DTensorSpec:
        """The layout of this part of a tensor: every rank has what it has of it now."""
        base, at, block = _inner(spec, self.dim)
        length, whole = self.stop - self.start, self.stop - self.start > block
        cuts = [
            own if axes else None for axes, own in zip(base.dim_axes, base.dim_cuts, strict=True)
        ]
        places: list[Placement] = list(spec.placements)
        if not whole:
            if base.dim_axes[at]:
                first = self.start // block * block
                here = self.start - first, self.stop - first
                cuts[at] = tuple([_shared(piece, here) for piece in base.pieces(at)])
            del cuts[_first(spec, self.dim) : at]
        for axis, place in enumerate(places):
            if isinstance(place, Shard) and place.dim == self.dim:
                places[axis] = Shard(self.dim, length // block if whole else 1)
        shape = list(spec.meta.shape)
        shape[self.dim] = length
        order = memory_order(spec.stride)
        meta = TensorMeta(tuple(shape), stride_like(shape, order), spec.dtype)
        return DTensorSpec(spec.topology, places, meta, cuts=cuts)

    def of_local(self, spec: DTensorSpec, coord: Coord, local: torch.Tensor) -> torch.Tensor:
        """This part of what a rank holds, as a view."""
        base, at, block = _inner(spec, self.dim)
        first, last = base.box(coord)[at]
        start, stop = (
            place // block * (last - first) + min(max(place % block, first), last) - first
            for place in (self.start, self.stop)
        )
        return local.narrow(self.dim, start, stop - start)


def _shared(a: Interval, b: Interval) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _first(spec: DTensorSpec, dim: int) -> int:
    """Where a dim begins among those of the finer shape."""
    return sum([len(group) for group in (spec.groups or trivial(spec.meta.shape))[:dim]])


def _inner(spec: DTensorSpec, dim: int) -> tuple[DTensorSpec, int, int]:
    """The finer layout, its last dim that belongs to `dim`, and the size of that: of a block."""
    base, group = spec.fine or spec, (spec.groups or trivial(spec.meta.shape))[dim]
    return base, _first(spec, dim) + len(group) - 1, group[-1]


@lru_cache(maxsize=4096)
def stretches(src: DTensorSpec, dst: DTensorSpec, room: int) -> tuple[Stretch, ...]:
    """The parts in which a tensor moves, so that all that is held beside source and target, copies
    of a collective too, is at most `room` bytes; none if it goes in one piece.

    If no parts are small enough it goes in the smallest.
    """
    if not isinstance(seen_alike(src, dst), DTensorSpec) or src.meta.repeated:
        return ()
    if _need(src, dst) <= room:
        return ()
    found: list[Stretch] = []
    dims = [dim for dim in range(src.ndim) if _can_be_cut(src, dim) and _can_be_cut(dst, dim)]
    for dim in sorted(dims, key=lambda dim: _is_shared(src, dim) or _is_shared(dst, dim)):
        width = src.meta.shape[dim]
        while width > 1:
            width = -(-width // 2)
            parts = _cut(src, dst, dim, width)
            if len(parts) > MOST:
                break
            found = max(found, parts, key=len)
            if all(_need(part.of_spec(src), part.of_spec(dst)) <= room for part in parts):
                return tuple(parts)
    return tuple(found)


def _can_be_cut(spec: DTensorSpec, dim: int) -> bool:
    """Whether no blocks of a dim are themselves shared out."""
    base, at, _ = _inner(spec, dim)
    return all(not axes for axes in base.dim_axes[_first(spec, dim) : at])


def _is_shared(spec: DTensorSpec, dim: int) -> bool:
    """Whether a dim is sharded; of one that is not all ranks have as much in each part."""
    return any(isinstance(place, Shard) and place.dim == dim for place in spec.placements)


def _cut(src: DTensorSpec, dst: DTensorSpec, dim: int, width: int) -> list[Stretch]:
    """Stretches of at most `width` places: for both layouts whole blocks, or a part of one."""
    size, start = src.meta.shape[dim], 0
    blocks = [_inner(spec, dim)[2] for spec in (src, dst)]
    found: list[Stretch] = []
    while start < size and len(found) <= MOST:
        stop, last = min(start + width, size), 0
        while stop != last:  # what ends with a block of one may not with the other
            last = stop
            for block in blocks:
                end = (start // block + 1) * block
                if stop > end:
                    stop = end if start % block else stop // block * block
        found.append(Stretch(dim, start, stop))
        start = stop
    return found


def _need(src: DTensorSpec, dst: DTensorSpec) -> int:
    """What is held beside source and target, for each collective with all that goes in and out."""
    way = seen_alike(src, dst)
    if isinstance(way, DTensorSpec):
        return max(_need(src, way), _most(way) + _need(way, dst))
    return _most(dst) + 2 * max(_most(src), _most(dst))


def _most(spec: DTensorSpec) -> int:
    """The bytes that the rank holds that holds most."""
    base = spec.fine or spec
    coords = spec.topology.group_coords((0,) * spec.topology.ndim, base.slot_axes)
    return max([box_numel(base.box(coord)) for coord in coords]) * spec.dtype.itemsize
