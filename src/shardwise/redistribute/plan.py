"""`plan(src, dst)`: the steps from one layout to another. Pure and cached; no tensor, no rank.

The plain order is: shrink (local slices), reduce (partials), move (one gather or exchange over just
the axes that must talk), and last make partial. Adjacent axes that do the same go together. Ways
are worked out only if they may be cheapest by what placements say, and the cheapest is kept.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import heapreplace
from itertools import groupby

from ..engine import check_reducible, has_room
from ..geometry import chunk_cuts, intervals
from ..mesh import Topology
from ..placement import Partial
from ..spec import DTensorSpec
from .between import between_meshes
from .bound import Bound
from .layout import DimMap, Layout, grid_of
from .moves import move
from .step import Step
from .ways import Order, Way, other_ways

__all__ = ["plan"]

_LINEAR = ("sum", "avg")


@lru_cache(maxsize=16384)
def plan(src: DTensorSpec, dst: DTensorSpec) -> tuple[Step, ...]:
    """The steps that take a tensor laid out as `src` to `dst`."""
    for place in (*src.placements, *dst.placements):
        if isinstance(place, Partial):
            check_reducible(place.reduce_op, src.dtype)
    if src.topology is not dst.topology:
        return tuple(between_meshes(src, dst, plan))
    now, goal = Layout.of(src), Layout.of(dst)
    plain: Way = ((src.placements, dst.placements, Order.PLAIN),)
    ways = dict.fromkeys([plain, *other_ways(src, dst, _axes_to_reduce(now, goal))])
    if len(ways) == 1:
        steps = tuple(_steps(now, goal))
    else:
        itemsize = src.dtype.itemsize
        sizes = (0,) * src.ndim if src.cuts or dst.cuts else tuple(src.meta.shape)
        bound = Bound(src.topology, sizes, itemsize)
        steps = _cheapest([_tried(way, now, goal, bound, itemsize) for way in ways])
    return _divided_last(steps) if has_room(src.dtype) else steps


def _divided_last(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps with averages added up like sums, and divided once by the last of them: whatever
    the order of reductions, it is rounded once."""
    found, last = list(steps), -1
    for index in reversed(range(len(steps))):
        step = found[index]
        if any(op not in _LINEAR for _, op in (*step.src.partial, *step.dst.partial)):
            last = -1  # it would not be the same for these
        elif last < 0:
            last = index if step.op else last
        elif step.op == "avg":
            later = found[last]
            found[last] = replace(later, op="avg", divisor=later.over * step.over)
            found[index] = replace(step, op="sum", divisor=None)
    return tuple(found)


Trial = Generator[int, None, tuple[Step, ...]]
"""What a way costs at least, ever more exactly, and then its steps."""


def _cheapest(trials: list[Trial]) -> tuple[Step, ...]:
    """The steps of the cheapest way, and of those that cost the same of the first.

    Always the one that may be cheapest goes on, so few are worked out to the end.
    """
    waiting = [(0, index) for index in range(len(trials))]
    while True:
        try:
            price = next(trials[waiting[0][1]])
        except StopIteration as end:
            steps: tuple[Step, ...] = end.value
            return steps
        heapreplace(waiting, (price, waiting[0][1]))


def _tried(way: Way, now: Layout, goal: Layout, bound: Bound, itemsize: int) -> Trial:
    """First the hops' bounds, then their steps: those of the hop that costs most, or else the last,
    first, so that the price rises early."""
    bounds = []
    for hop in way:
        bounds.append(bound.of(hop))
        yield sum(bounds)
    price = known = sum(bounds)
    found: list[list[Step]] = [[] for _ in way]
    layouts = [now, *[now.laid(places) for _, places, _ in way[:-1]], goal]
    for index in sorted(range(len(way)), key=lambda index: (-bounds[index], -index)):
        price -= bounds[index]
        for step in _steps(layouts[index], layouts[index + 1], way[index][2]):
            found[index].append(step)
            price += step.price(itemsize)
            if price > known:
                known = price
                yield known
    return tuple([step for steps in found for step in steps])


def _steps(now: Layout, goal: Layout, order: Order = Order.PLAIN) -> Iterator[Step]:
    reduced = _axes_to_reduce(now, goal)
    if order is Order.SPREAD_FIRST:
        for step in _spread(now, goal):
            yield step
            now = step.dst
    for step in _shrink(now, goal):
        yield step
        now = step.dst
    for step in _reduce(now, goal, reduced, order is Order.AT_ONCE):
        yield step
        now = step.dst
    for step in _spread(now, goal):
        yield step
        now = step.dst
    if now.dims != goal.dims:
        step = move(now, now.with_dims(goal.dims))
        yield step
        now = step.dst
    if now != goal:
        yield Step("make_partial", now, goal)


def _commute(a: str, b: str) -> bool:
    return a == b or (a in _LINEAR and b in _LINEAR)


def _axes_to_reduce(now: Layout, goal: Layout) -> set[int]:
    """The pending axes that `goal` does not keep, with those that must be reduced before them."""
    if now.partial == goal.partial or not now.partial:
        return set()
    have, want = dict(now.partial), dict(goal.partial)
    reduced = {axis for axis, op in have.items() if want.get(axis) != op}
    made = {axis: op for axis, op in want.items() if have.get(axis) != op}
    grown = True
    while grown:
        grown = False
        for axis, op in have.items():
            if axis in reduced:
                continue
            blocked = any(b < axis and not _commute(op, have[b]) for b in reduced)
            if blocked or any(not _commute(op, other) for other in made.values()):
                reduced.add(axis)
                grown = True
    return reduced


def _shrink(now: Layout, goal: Layout) -> Iterator[Step]:
    """A local slice of every dim of which each rank already holds what it will need."""
    dims = list(now.dims)
    busy = set(now.axes)
    for dim, (have, want) in enumerate(zip(now.dims, goal.dims, strict=True)):
        part = None if have == want else _part(now.topology, have, want, busy)
        if part is not None:
            dims[dim] = part
            busy |= set(part.axes)
    if tuple(dims) != now.dims:
        yield Step("slice", now, now.with_dims(tuple(dims)))


def _part(topology: Topology, have: DimMap, want: DimMap, busy: set[int]) -> DimMap | None:
    """The wanted cut of a dim as far as axes that are not busy can cut it, if it only shrinks.

    What busy axes will share later stays together.
    """
    if not set(have.axes) <= set(want.axes):
        return None  # the dim also grows along an axis: slicing now would lose what that needs
    part: DimMap | None = want
    for axis in sorted((set(want.axes) - set(have.axes)) & busy):
        part = None if part is None else part.joined(axis, topology.shape)
    if part is None or part == have:
        return None
    grid = grid_of(topology.shape, have.axes, part.axes)
    for (a, b), (start, stop) in zip(have.over(grid), part.over(grid), strict=True):
        if start < stop and not (a <= start and stop <= b):
            return None
    return part


# --- reducing ------------------------------------------------------------------------------------


def _reduce(now: Layout, goal: Layout, reduced: set[int], at_once: bool) -> Iterator[Step]:
    """Reductions: kinds that do not commute last axis first, axes of one kind together.

    Axes that end in a shard scatter, and first, because that leaves less for the others. Else sums
    come before averages, which are rounded.
    """
    pending = dict(now.partial)
    order = sorted(reduced, reverse=True)
    shards = {axis for dim in goal.dims for axis in dim.axes}
    if all(_commute(pending[a], pending[b]) for a in order for b in order):
        first = {pending[axis] for axis in order if axis in shards}
        order.sort(key=lambda axis: (pending[axis] not in first, pending[axis] == "avg", -axis))
    for op, run in groupby(order, key=pending.__getitem__):
        axes = sorted(run)
        scattered = [axis for axis in axes if axis in shards]
        if scattered:
            found = _reduce_exchange(now, goal, scattered, op, shards) if at_once else None
            step = found or _reduce_scatter(now, goal, scattered, op)
            yield step
            now = step.dst
        rest = tuple([axis for axis in axes if axis not in scattered])
        if rest:
            step = Step("all_reduce", now, now.without(set(rest)), rest, op)
            yield step
            now = step.dst


def _reduce_scatter(now: Layout, goal: Layout, axes: list[int], op: str) -> Step:
    """Into what the goal has where that is a part of what is held, else into some shards.

    The parts need not make up the whole: axes that hold the same take a part each, too.
    """
    dims, busy = list(now.dims), set(now.axes) - set(axes)
    for dim, (have, want) in enumerate(zip(now.dims, goal.dims, strict=True)):
        own = [axis for axis in axes if axis in want.axes]
        part = _part(now.topology, have, want, busy) if own else None
        if part is not None and set(own) <= set(part.axes):
            dims[dim] = part
            busy |= set(part.axes)
        elif own:
            dims[dim] = _split(now, have, own)
    done = now.without(set(axes)).with_dims(tuple(dims))
    return Step("reduce_scatter", now, done, tuple(axes), op)


def _split(now: Layout, have: DimMap, axes: list[int]) -> DimMap:
    counts = tuple([now.topology.shape[axis] for axis in axes])
    table = []
    for start, stop in have.table:
        for a, b in intervals(chunk_cuts(stop - start, counts)):
            table.append((start + a, start + b))
    return DimMap((*have.axes, *axes), tuple(table))


def _reduce_exchange(
    now: Layout, goal: Layout, axes: list[int], op: str, shards: set[int]
) -> Step | None:
    """Straight into the shards of the goal: each piece comes from every member and is reduced."""
    settled = now.without(set(axes))
    if shards & {axis for axis, _ in settled.partial}:
        return None
    step = move(settled, settled.with_dims(goal.dims))
    if step.kind != "exchange":
        return None
    every = tuple(sorted({*step.axes, *axes}))
    return Step("reduce_exchange", now, step.dst, every, op, reduced=tuple(axes))


# --- making partial ------------------------------------------------------------------------------


def _spread(now: Layout, goal: Layout) -> Iterator[Step]:
    """From a shard to a pending reduction nothing moves: ranks pad with the identity.

    Inner axes go first: what the members of outer ones hold is in one piece only after them.
    Where all is of one kind, one step makes all axes partial.
    """
    have, shape = dict(now.partial), now.topology.shape
    made = [(axis, op) for axis, op in reversed(goal.partial) if have.get(axis) != op != "avg"]
    if not made:
        return
    together = len({op for _, op in (*now.partial, *goal.partial)}) == 1
    dims, partial = list(now.dims), now.partial
    for axis, op in made:
        for dim, held in enumerate(dims):
            whole = held.joined(axis, shape) if axis in held.axes else None
            if whole is not None:
                dims[dim] = whole
                partial = tuple(sorted((*partial, (axis, op))))
        if partial != now.partial and (not together or axis == made[-1][0]):
            done = Layout(now.topology, tuple(dims), partial)
            if together and done.dims == goal.dims and set(now.partial) <= set(goal.partial):
                done = goal  # what is whole already is made partial as well
            yield Step("make_partial", now, done)
            now = done
