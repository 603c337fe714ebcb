"""The steps from one layout to another on one mesh. Pure: no tensor and no rank enters.

Three candidates are priced: reduce then move, move then reduce, and both in a single exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ..comm.step import Step
from ..layout.layout import DimMap, Layout
from .routes import move

_LINEAR = ("sum", "avg")
Steps = tuple[Step, ...]


def candidates(now: Layout, goal: Layout) -> tuple[list[Steps], Steps]:
    """The ways to go from one layout to another on one mesh that may be the cheapest, and the way
    that holds least: a single exchange goes in rounds."""
    found = [tuple(chain(now, goal))]
    if not any(step.op for step in found[0]) or sum(not step.is_local for step in found[0]) < 2:
        return found, found[0]
    between = _moved_first(now, goal)
    if between is not None and between not in (now, goal):
        found.append((*chain(now, between), *chain(between, goal)))
    single = tuple(_single_exchange(now, goal))
    shards = {axis for dim in goal.dims for axis in dim.axes}
    if single and _axes_to_reduce(now, goal) <= shards:
        found.append(single)
    return found, single or found[0]


def chain(now: Layout, goal: Layout) -> Iterator[Step]:
    """The chain of native collectives: slice, reduce, move, and last make axes Partial."""
    for step in _shrink(now, goal):
        yield step
        now = step.dst
    for step in reduce(now, goal, _axes_to_reduce(now, goal)):
        yield step
        now = step.dst
    if now.dims != goal.dims:
        step = move(now, now.with_dims(goal.dims))
        yield step
        now = step.dst
    if now != goal:
        yield Step("make_partial", now, goal)


def _single_exchange(now: Layout, goal: Layout) -> Iterator[Step]:
    """One exchange into the boxes of the goal, in which each piece comes from every member and is
    reduced. Nothing if reductions of several kinds are pending."""
    reduced = _axes_to_reduce(now, goal)
    ops = {op for axis, op in now.partial if axis in reduced}
    if len(ops) > 1:
        return
    for step in _shrink(now, goal):
        yield step
        now = step.dst
    moved = move(now.without(reduced), now.without(reduced).with_dims(goal.dims))
    axes = tuple(sorted({*moved.axes, *reduced}))
    yield Step("reduce_exchange", now, moved.dst, axes, ops.pop(), tuple(sorted(reduced)))
    if moved.dst != goal:
        yield Step("make_partial", moved.dst, goal)


def _moved_first(now: Layout, goal: Layout) -> Layout | None:
    """The layout after a move that leaves pending what is to be reduced."""
    kept = {axis: op for axis, op in now.partial if axis not in dict(goal.partial)}
    dims = []
    for want in goal.dims:
        part: DimMap | None = want
        for axis in [axis for axis in want.axes if axis in kept]:
            part = None if part is None else part.joined(axis, now.topology.shape)
        if part is None:
            return None
        dims.append(part)
    return Layout(now.topology, tuple(dims), tuple(sorted({**kept, **dict(goal.partial)}.items())))


def _commute(a: str, b: str) -> bool:
    return a == b or (a in _LINEAR and b in _LINEAR)


def _axes_to_reduce(now: Layout, goal: Layout) -> set[int]:
    """The pending axes that `goal` does not keep, with those that must be reduced before them."""
    if now.partial == goal.partial or not now.partial:
        return set()
    have, want = dict(now.partial), dict(goal.partial)
    reduced = {axis for axis, op in have.items() if want.get(axis) != op}
    made = {axis: op for axis, op in want.items() if have.get(axis) != op}
    for axis, op in sorted(have.items()):
        before = [have[other] for other in reduced if other < axis]
        if not all(_commute(op, other) for other in (*before, *made.values())):
            reduced.add(axis)
    return reduced


def _shrink(now: Layout, goal: Layout) -> Iterator[Step]:
    """A local slice of every dim of which each rank already holds what it will need."""
    dims = list(now.dims)
    busy = set(now.axes)
    for dim, (have, want) in enumerate(zip(now.dims, goal.dims, strict=True)):
        part = None if have == want else _part(now, have, want, busy)
        if part is not None:
            dims[dim] = part
            busy |= set(part.axes)
    if tuple(dims) != now.dims:
        yield Step("slice", now, now.with_dims(dims))


def _part(now: Layout, have: DimMap, want: DimMap, busy: set[int]) -> DimMap | None:
    """The wanted shards of a dim as far as axes that are not busy can make them, if the dim only
    shrinks. Parts that busy axes will share later stay together."""
    if not set(have.axes) <= set(want.axes):
        return None  # the dim also grows along an axis: slicing now would lose what that needs
    where = now.topology
    part: DimMap | None = want
    for axis in sorted((set(want.axes) - set(have.axes)) & busy):
        part = None if part is None else part.joined(axis, where.shape)
    if part is None or part == have:
        return None
    for coord in where.coords({*have.axes, *part.axes}):
        (a, b), (start, stop) = have.at(coord, where.shape), part.at(coord, where.shape)
        if start < stop and not (a <= start and stop <= b):
            return None
    return part


def reduce(now: Layout, goal: Layout, reduced: set[int]) -> Iterator[Step]:
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
            step = _reduce_scatter(now, goal, scattered, op)
            yield step
            now = step.dst
        rest = tuple([axis for axis in axes if axis not in scattered])
        if rest:
            step = Step("all_reduce", now, now.without(set(rest)), rest, op, rest)
            yield step
            now = step.dst


def _reduce_scatter(now: Layout, goal: Layout, axes: list[int], op: str) -> Step:
    """Scatter into the shards of the goal where these are a part of what is held, else into any.

    The parts need not make up the whole: axes that hold the same take a part each, too.
    """
    dims, busy = list(now.dims), set(now.axes) - set(axes)
    for dim, (have, want) in enumerate(zip(now.dims, goal.dims, strict=True)):
        own = [axis for axis in axes if axis in want.axes]
        part = _part(now, have, want, busy) if own else None
        if part is not None and set(own) <= set(part.axes):
            dims[dim] = part
            busy |= set(part.axes)
        elif own:
            dims[dim] = have.split(own, now.topology.shape)
    done = now.without(set(axes)).with_dims(dims)
    return Step("reduce_scatter", now, done, tuple(axes), op, tuple(axes))
