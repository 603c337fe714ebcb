"""A plan of several collectives, run for one portion of the tensor after another.

What lies between two collectives would be held beside source and target. Portion by portion it
stays within the buffer. All ranks know all boxes, so they agree on the portions without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import torch

from ..geometry import Interval, all_coords, box_numel, relative
from .layout import DimMap, Layout
from .step import Step

__all__ = ["Portion", "held_beside", "portions", "sizes"]

Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Portion:
    """A part of one dim: the places from `start` to `stop`, or if the dim is seen as blocks of
    `block` places, these places of each of the first `count` blocks."""

    dim: int
    start: int
    stop: int
    block: int = 0
    count: int = 0

    def of_step(self, step: Step) -> Step:
        """The step for this portion alone."""
        src, dst = self._of_layout(step.src), self._of_layout(step.dst)
        return Step(step.kind, src, dst, step.axes, step.op, step.reduced)

    def _of_layout(self, layout: Layout) -> Layout:
        held = layout.dims[self.dim]
        mine = [DimMap(held.axes, tuple([self._of_interval(each) for each in held.table]))]
        if self.block:
            mine.append(DimMap((), ((0, self.stop - self.start),)))
        return layout.with_dims((*layout.dims[: self.dim], *mine, *layout.dims[self.dim + 1 :]))

    def _of_interval(self, interval: Interval) -> Interval:
        start, stop = interval
        if self.block:
            last = self.count * self.block
            return min(start, last) // self.block, min(stop, last) // self.block
        return min(max(start, self.start), self.stop), min(max(stop, self.start), self.stop)

    def of_local(self, local: torch.Tensor, held: Interval) -> torch.Tensor:
        """The portion of what a rank holds, as a view: `held` is the rank's interval of the dim."""
        start, stop = self._of_interval(held)
        if not self.block:
            ((first, last),) = relative(((start, stop),), (held,))
            return local.narrow(self.dim, first, last - first)
        blocks = local.narrow(self.dim, 0, (stop - start) * self.block)
        apart: torch.Tensor = blocks.unflatten(self.dim, (stop - start, self.block))
        return apart.narrow(self.dim + 1, self.start, self.stop - self.start)

    def order(self, order: Sequence[int]) -> tuple[int, ...]:
        """The order in memory of the dims as they are seen."""
        if not self.block:
            return tuple(order)
        found = []
        for dim in order:
            found.append(dim + (dim > self.dim))
            if dim == self.dim:
                found.append(dim + 1)
        return tuple(found)


def portions(steps: Sequence[Step], itemsize: int, room: int) -> tuple[Portion, ...]:
    """The portions in which steps must be run so that nobody holds more than the source, the target
    and `room` bytes; none if they can be run as they are."""
    if len(steps) < 2:
        return ()
    if len({len(step.src.dims) for step in steps}) > 1:
        return ()  # two plans, for a tensor that is seen in two ways
    whole = max([prod([dim.table[-1][1] for dim in step.src.dims]) for step in steps])
    if whole * itemsize * 4 * len(steps) <= room:
        return ()
    return _portions(tuple(steps), itemsize, room)


@lru_cache(maxsize=4096)
def _portions(steps: Steps, itemsize: int, room: int) -> tuple[Portion, ...]:
    target = sizes(steps[-1].dst, itemsize)
    beside = held_beside(steps, itemsize, room)
    if all(n - target.get(rank, 0) <= room for each in beside for rank, n in each.items()):
        return ()
    most = max([n for each in held_beside(steps, itemsize, None) for n in each.values()])
    return tuple(_cut(steps, -(-most // room)))


def held_beside(steps: Sequence[Step], itemsize: int, room: int | None) -> list[dict[int, int]]:
    """What each rank holds at each step beside the source: what the step starts from, if that is
    not the source, what it makes, and what a collective packs, in `room` bytes if that is given."""
    found = []
    before: dict[int, int] = {}  # a slice is a view: what it was cut from stays
    for index, step in enumerate(steps):
        cuts = step.kind == "slice" and index + 1 < len(steps)
        had, has = sizes(step.src, itemsize), sizes(step.dst, itemsize)
        packed = {rank: _packed(step, had.get(rank, 0), has.get(rank, 0)) for rank in {*had, *has}}
        found.append(
            {
                rank: before.get(rank, 0)
                + (0 if cuts else has.get(rank, 0))
                + (n if room is None else min(n, room))
                for rank, n in packed.items()
            }
        )
        if step.kind != "slice":
            before = has
    return found


def sizes(layout: Layout, itemsize: int) -> dict[int, int]:
    """The bytes that each rank holds."""
    where = layout.topology
    return {where.rank_of(c): box_numel(layout.box(c)) * itemsize for c in all_coords(where.shape)}


def _packed(step: Step, had: int, has: int) -> int:
    """What a collective packs and unpacks, at most, of tensors of these sizes."""
    if step.is_local or step.kind == "all_reduce":
        return 0
    targets = step.dst.topology.shape
    asked = range(len(targets)) if step.kind == "transfer" else step.axes
    copies = prod([targets[axis] for axis in asked if axis not in step.dst.axes])
    if step.kind == "reduce_scatter":
        return had + step.count * has
    parts = prod([targets[axis] for axis in step.reduced])
    return copies * had + parts * has


def _cut(steps: Steps, count: int) -> Iterator[Portion]:
    """Portions of about one part in `count` of what each rank holds.

    A dim is seen as equal blocks, such that every interval is a number of blocks, and a portion is
    a part of each block: then all ranks have as much to do in each.
    """
    best: tuple[int, int, int] = (0, 0, 0)
    least: tuple[int, int, int] = (0, 0, 0)
    for dim in range(len(steps[0].src.dims)):
        tables = [layout.dims[dim].table for step in steps for layout in (step.src, step.dst)]
        size = max([stop for table in tables for _, stop in table])
        block = gcd(*[n for table in tables for each in table for n in each if 0 < n < size])
        shard = min([b - a for table in tables for a, b in table if a < b], default=0)
        best = max(best, (block or size, -dim, size))
        least = max(least, (shard, -dim, size))
    block, at, size = best
    if block >= count:
        width = block // count
        for start in range(0, block, width):
            yield Portion(-at, start, min(start + width, block), block, size // block)
        first = size // block * block
    else:
        shard, at, size = least
        width, first = max(1, shard // count), 0
    for start in range(first, size, width):
        yield Portion(-at, start, min(start + width, size))
