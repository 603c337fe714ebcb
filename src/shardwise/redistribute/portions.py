"""A plan of several collectives, run for one portion of the tensor after another.

What lies between two collectives would be held beside source and target. Portion by portion it
stays within the buffer. All ranks know all boxes, so they agree on the portions without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import torch

from ..comm import backends_reduce, buffer_width, is_plain
from ..layout.geometry import Interval, all_coords, box_numel, relative
from .layout import DimMap, Layout
from .step import Step

__all__ = ["Portion", "held_beside", "packed_with_others", "portions", "sizes"]

Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Cut:
    """A part of one dim: the places from `start` to `stop`, or if the dim is seen as blocks of
    `block` places, these places of each of the first `count` blocks."""

    dim: int
    start: int
    stop: int
    block: int = 0
    count: int = 0

    def of_step(self, step: Step) -> Step:
        """The step for this part alone."""
        src, dst = self.of_layout(step.src), self.of_layout(step.dst)
        return Step(step.kind, src, dst, step.axes, step.op, step.reduced)

    def of_layout(self, layout: Layout) -> Layout:
        """The layout of this part alone; if there are blocks, of one dim more."""
        held, first = layout.dims[self.dim], 0 if self.block else self.start
        found = [self._of_interval(each) for each in held.table]
        mine = [DimMap(held.axes, tuple([(start - first, stop - first) for start, stop in found]))]
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
        """This part of what a rank holds, as a view: `held` is the rank's interval of the dim."""
        start, stop = self._of_interval(held)
        if not self.block:
            ((first, last),) = relative(((start, stop),), (held,))
            return local.narrow(self.dim, first, last - first)
        blocks = local.narrow(self.dim, 0, (stop - start) * self.block)
        apart: torch.Tensor = blocks.unflatten(self.dim, (stop - start, self.block))
        return apart.narrow(self.dim + 1, self.start, self.stop - self.start)

    def order(self, order: Sequence[int]) -> Sequence[int]:
        """The order in memory of the dims as they are seen."""
        if not self.block:
            return order
        found = []
        for dim in order:
            found.append(dim + (dim > self.dim))
            if dim == self.dim:
                found.append(dim + 1)
        return found


@dataclass(frozen=True)
class Portion:
    """A box of the tensor: each cut is one of what the cuts before it leave."""

    cuts: tuple[Cut, ...]

    def of_step(self, step: Step) -> Step:
        """The step for this portion alone."""
        for cut in self.cuts:
            step = cut.of_step(step)
        return step

    def of_locals(self, layout: Layout, local: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The portion of what each rank of this process holds, as views."""
        found = list(local)
        for cut in self.cuts:
            held, shape = layout.dims[cut.dim], layout.topology.shape
            pairs = zip(layout.slots, found, strict=True)
            found = [cut.of_local(value, held.at(coord, shape)) for coord, value in pairs]
            layout = cut.of_layout(layout)
        return found

    def order(self, order: Sequence[int]) -> tuple[int, ...]:
        """The order in memory of the dims as they are seen."""
        for cut in self.cuts:
            order = cut.order(order)
        return tuple(order)


def portions(steps: Sequence[Step], dtype: torch.dtype, room: int) -> Iterator[Portion]:
    """The portions in which steps must be run so that nobody holds more than the source, the target
    and `room` bytes; none if they can be run as they are.

    The last resort are portions of which each rank has one element.
    """
    if not _is_too_large(tuple(steps), dtype, room):
        return iter(())
    return (Portion(cuts) for cuts in _boxes(tuple(steps), dtype, room))


def _is_too_large(steps: Steps, dtype: torch.dtype, room: int) -> bool:
    """Whether steps hold more than `room` bytes beside source and target."""
    if len(steps) < 2:
        return False  # a collective goes in rounds
    first, last = steps[0].src, steps[-1].dst
    whole = prod([dim.table[-1][1] for dim in first.dims])
    ranks = max([prod(layout.topology.shape) for layout in (first, last)])
    most = whole * (2 + 2 * ranks) * max([buffer_width(step, dtype) for step in steps])
    return most > room and _exceed(steps, dtype, room)


@lru_cache(maxsize=4096)
def _exceed(steps: Steps, dtype: torch.dtype, room: int) -> bool:
    target = sizes(steps[-1].dst, dtype)
    beside = held_beside(steps, dtype, room)
    return any(n - target.get(rank, 0) > room for each in beside for rank, n in each.items())


def _boxes(steps: Steps, dtype: torch.dtype, room: int) -> Iterator[tuple[Cut, ...]]:
    """Cuts until all that is held beside source and target, copies of a collective too, fits."""
    need = max([n for each in held_beside(steps, dtype, None) for n in each.values()])
    fits: dict[tuple[int, int], bool] = {}  # parts of blocks are alike
    for cut in _cuts(steps, -(-need // room)) if need > room else ():
        alike = cut.block, cut.stop - cut.start
        if fits.get(alike):
            yield (cut,)
            continue
        for rest in _boxes(tuple([cut.of_step(step) for step in steps]), dtype, room):
            yield cut, *rest
            fits[alike] = bool(cut.block) and not rest
    if not fits:
        yield ()


def held_beside(
    steps: Sequence[Step], dtype: torch.dtype, room: int | None
) -> list[dict[int, int]]:
    """What each rank holds at each step beside the source: what the step starts from, if that is
    not the source, what it makes, and what a collective packs, in `room` bytes if that is given."""
    found = []
    before: dict[int, int] = {}  # a slice is a view: what it was cut from stays
    for index, step in enumerate(steps):
        cuts = step.kind == "slice" and index + 1 < len(steps)
        had, has = sizes(step.src, dtype), sizes(step.dst, dtype)
        packed = {
            rank: _packed(step, dtype, had.get(rank, 0), has.get(rank, 0)) for rank in {*had, *has}
        }
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


def sizes(layout: Layout, dtype: torch.dtype) -> dict[int, int]:
    """The bytes that each rank holds."""
    where = layout.topology
    return {
        where.rank_of(c): box_numel(layout.box(c)) * dtype.itemsize for c in all_coords(where.shape)
    }


def _packed(step: Step, dtype: torch.dtype, had: int, has: int) -> int:
    """What a collective packs and unpacks, at most, of tensors of these sizes."""
    if step.is_local:
        return 0
    width = buffer_width(step, dtype)
    if step.kind == "all_reduce" and backends_reduce(dtype, step.op):
        return 0 if is_plain(dtype, step.op) else has // dtype.itemsize * width
    targets = step.dst.topology.shape
    asked = range(len(targets)) if step.kind == "transfer" else step.axes
    copies = prod([targets[axis] for axis in asked if axis not in step.dst.axes])
    parts = prod([targets[axis] for axis in step.reduced])
    if step.kind in ("reduce_scatter", "all_reduce"):
        parts = step.count
    return (copies * had + parts * has) // dtype.itemsize * width


def packed_with_others(step: Step, dtype: torch.dtype) -> int:
    """What a collective packs and unpacks of a tensor that goes with others, for the rank for which
    that is most."""
    had, has = (layout.most * dtype.itemsize for layout in (step.src, step.dst))
    if step.kind == "all_reduce" and is_plain(dtype, step.op):
        return 2 * has  # alone it is reduced in place
    return _packed(step, dtype, had, has)


def _cuts(steps: Steps, count: int) -> Iterator[Cut]:
    """Parts of one dim, of about one part in `count` of what each rank holds; none if nobody has
    two places of a dim.

    A dim is seen as equal blocks, such that every interval is a number of blocks, and a part is one
    of each block: then all ranks have as much to do in each. Where there are no such blocks the dim
    is cut of which everybody has most.
    """
    best: tuple[int, int, int] = (0, 0, 0)
    widest: tuple[int, int, int, int] = (0, 0, 0, 0)
    for dim in range(len(steps[0].src.dims)):
        tables = [layout.dims[dim].table for step in steps for layout in (step.src, step.dst)]
        size = max([stop for table in tables for _, stop in table])
        block = gcd(*[n for table in tables for each in table for n in each if 0 < n < size])
        lengths = [b - a for table in tables for a, b in table if a < b]
        best = max(best, (block or size, -dim, size))
        if lengths and max(lengths) > 1:
            widest = max(widest, (min(lengths), max(lengths), -dim, size))
    block, at, size = best
    first = 0
    if block > 1:
        width, first = max(1, block // count), size // block * block
        for start in range(0, block, width):
            yield Cut(-at, start, min(start + width, block), block, size // block)
    elif widest[1]:
        _, longest, at, size = widest
        width = max(1, longest // count)
    else:
        return
    for start in range(first, size, width):
        yield Cut(-at, start, min(start + width, size))
