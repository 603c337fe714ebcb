"""Dims that are sharded block by block, moved some of the dim at a time.

Where source and target are boxes of no common finer shape, a tensor goes through a third layout,
which would be held beside both. A stretch of a dim at a time that stays within the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import torch

from ..layout.geometry import Cuts, Interval, memory_order, stride_like
from ..layout.mesh import Coord
from ..layout.placement import Placement, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..layout.split_dims import common_refinement, trivial
from .jointly import jointly
from .legs import held_by_legs, legs, once
from .portions import sizes

__all__ = ["Part", "Stretch", "need", "stretches"]


@dataclass(frozen=True)
class Stretch:
    """The places of one dim from `start` to `stop`: some blocks that follow each other, of some
    size, all of one block of the next larger size."""

    dim: int
    start: int
    stop: int

    def of_spec(self, spec: DTensorSpec) -> DTensorSpec:
        """The layout of this part of a tensor: every rank has what it has of it now."""
        base, first, group = _apart(spec, self.dim)
        level, digits, here = self._within(group)
        cuts: list[Cuts | None] = [
            own if axes else None for axes, own in zip(base.dim_axes, base.dim_cuts, strict=True)
        ]
        last = first + level
        cuts[first : last + 1] = [_held_of(base, first, digits, here)]
        places: list[Placement] = list(spec.placements)
        seen = [place.dim if isinstance(place, Shard) else -1 for place in base.placements]
        for axis, dim in enumerate(seen):
            if first <= dim < first + len(group):
                inside = prod(group[level + 1 : dim - first]) if dim > last else 0
                places[axis] = Shard(self.dim, (here[1] - here[0]) * inside or 1)
        shape = list(spec.meta.shape)
        shape[self.dim] = self.stop - self.start
        meta = TensorMeta(tuple(shape), stride_like(shape, memory_order(spec.stride)), spec.dtype)
        return DTensorSpec(spec.topology, places, meta, cuts=cuts)

    def of_local(self, spec: DTensorSpec, coord: Coord, local: torch.Tensor) -> torch.Tensor:
        """This part of what a rank holds, as a view."""
        base, first, group = _apart(spec, self.dim)
        level, digits, (start, stop) = self._within(group)
        held = base.box(coord)[first : first + len(group)]
        inner = [prod([b - a for a, b in held[index + 1 :]]) for index in range(level + 1)]
        before = 0
        for digit, (a, b), size in zip(digits, held, inner, strict=False):
            if not a <= digit < b:
                return local.narrow(self.dim, 0, 0)
            before += (digit - a) * size
        a, b = held[level]
        start, stop = (min(max(place, a), b) - a for place in (start, stop))
        size = inner[level]
        return local.narrow(self.dim, before + start * size, (stop - start) * size)

    def _within(self, group: tuple[int, ...]) -> tuple[int, list[int], Interval]:
        """Of a dim that is the product of some sizes: at which of them there is more than one
        place, the one place of each before, and the places there."""
        digits: list[int] = []
        start, stop, inner = self.start, self.stop, prod(group)
        for level, size in enumerate(group):
            inner //= size
            here = start // inner, -(-stop // inner)
            if here[1] - here[0] > 1 or level + 1 == len(group):
                break
            digits.append(here[0])
            start, stop = start - here[0] * inner, stop - here[0] * inner
        return level, digits, here


Part = tuple[Stretch, ...]
"""A box of a tensor: each stretch is one of what those before it leave."""


def _apart(spec: DTensorSpec, dim: int) -> tuple[DTensorSpec, int, tuple[int, ...]]:
    """The finer layout, which of its dims is the first that belongs to `dim`, and their sizes."""
    groups = spec.groups or trivial(spec.meta.shape)
    return spec.fine or spec, sum([len(group) for group in groups[:dim]]), groups[dim]


def _held_of(base: DTensorSpec, first: int, digits: list[int], here: Interval) -> Cuts | None:
    """How much each shard has of the places `here` of a dim, where one place is given of each dim
    before it."""
    dims = range(first, first + len(digits) + 1)
    axes = sorted({axis for dim in dims for axis in base.dim_axes[dim]})
    if not axes:
        return None
    wanted = [*[(digit, digit + 1) for digit in digits], here]
    found = []
    for places in product(*[range(base.topology.shape[axis]) for axis in axes]):
        coord = [0] * base.topology.ndim
        for axis, place in zip(axes, places, strict=True):
            coord[axis] = place
        held = base.box(tuple(coord))
        found.append(
            prod([_shared(held[dim], each) for dim, each in zip(dims, wanted, strict=True)])
        )
    return tuple(found)


def _shared(a: Interval, b: Interval) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def stretches(src: DTensorSpec, dst: DTensorSpec, room: int) -> Iterator[Part]:
    """The parts in which a tensor moves, so that all that is held beside source and target, copies
    of a collective too, is at most `room` bytes; none if it goes in one piece.

    The last resort are parts of one element.
    """
    if not _is_apart(src, dst) or not _exceeds(src, dst, room):
        return iter(())
    return _parts(src, dst, room)


def _is_apart(src: DTensorSpec, dst: DTensorSpec) -> bool:
    """Whether a tensor goes through a third layout."""
    if src.fine is None and dst.fine is None:
        return False
    return (
        once(src, dst) is None
        and isinstance(common_refinement(src, dst), DTensorSpec)
        and jointly(src, dst) is None
    )


@lru_cache(maxsize=4096)
def _exceeds(src: DTensorSpec, dst: DTensorSpec, room: int) -> bool:
    dtype, plans = src.dtype, legs(src, dst)
    target = sizes(plans[-1][-1].dst, dtype) if plans[-1] else {}
    beside = held_by_legs(plans, dtype, room)
    return any(n - target.get(rank, 0) > room for each in beside for rank, n in each.items())


@lru_cache(maxsize=16384)
def need(src: DTensorSpec, dst: DTensorSpec) -> int:
    """The most bytes that a rank holds beside the source, for each collective with all that goes in
    and out."""
    beside = held_by_legs(legs(src, dst), src.dtype, None)
    return max([n for each in beside for n in each.values()], default=0)


def _parts(src: DTensorSpec, dst: DTensorSpec, room: int) -> Iterator[Part]:
    most = need(src, dst)
    sizes = src.meta.shape
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if most <= room or not dims:
        yield ()
        return
    # Of a dim that nobody shares all ranks have as much in each part.
    dim = max(
        dims, key=lambda dim: (not _is_shared(src, dim) and not _is_shared(dst, dim), sizes[dim])
    )
    for stretch in _cut(src, dst, dim, max(1, sizes[dim] // -(-most // room))):
        for rest in _parts(stretch.of_spec(src), stretch.of_spec(dst), room):
            yield stretch, *rest


def _is_shared(spec: DTensorSpec, dim: int) -> bool:
    return any(isinstance(place, Shard) and place.dim == dim for place in spec.placements)


def _cut(src: DTensorSpec, dst: DTensorSpec, dim: int, width: int) -> Iterator[Stretch]:
    """Stretches of at most `width` places, for both layouts."""
    size, start = src.meta.shape[dim], 0
    groups = [_apart(spec, dim)[2] for spec in (src, dst)]
    while start < size:
        stop, last = min(start + width, size), 0
        while stop != last:  # what ends with a block of one may not with the other
            last = stop
            for group in groups:
                stop = _end(group, start, stop)
        yield Stretch(dim, start, stop)
        start = stop


def _end(group: tuple[int, ...], start: int, stop: int) -> int:
    """Where a stretch from `start` ends that goes to `stop` at most."""
    outer = prod(group)
    for size in group:
        block = outer // size
        end = min(stop // block * block, (start // outer + 1) * outer)
        if start % block == 0 and end > start:
            break
        outer = block
    return end
