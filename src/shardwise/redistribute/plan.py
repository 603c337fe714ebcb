"""`plan(src, dst)`: the steps from one layout to another. Pure and cached; no tensor, no rank.

A plan slices, reduces pending axes, moves boxes in one gather or exchange over just the axes that
must talk, and last makes axes partial. Where axes are reduced and boxes move, three orders are
priced and the cheapest is kept: reduce then move, move then reduce, and both in one exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from ..comm import check_reducible
from ..layout.geometry import chunk_cuts, intervals
from ..layout.mesh import Topology
from ..layout.placement import Partial, Placement
from ..layout.spec import DTensorSpec
from .between import between_meshes
from .layout import DimMap, Layout, grid_of
from .moves import move
from .step import Step

_LINEAR = ("sum", "avg")
Steps = tuple[Step, ...]


@lru_cache(maxsize=16384)
def plan(src: DTensorSpec, dst: DTensorSpec) -> Steps:
    """The steps that take a tensor laid out as `src` to `dst`."""
    for place in (*src.placements, *dst.placements):
        if isinstance(place, Partial):
            check_reducible(place.reduce_op, src.dtype)
    if src.topology is not dst.topology:
        return tuple(between_meshes(src, dst, plan))
    now, goal = Layout.of(src), Layout.of(dst)
    found = [tuple(_steps(now, goal))]
    if any(step.op for step in found[0]) and sum(not step.is_local for step in found[0]) > 1:
        found.append(tuple(_steps(now, goal, at_once=True)))
        moved = _moved_first(src, dst)
        if moved not in (src.placements, dst.placements):
            between = now.laid(moved)
            found.append((*_steps(now, between), *_steps(between, goal)))
    return min(found, key=lambda steps: sum([step.price(src.dtype.itemsize) for step in steps]))


def _moved_first(src: DTensorSpec, dst: DTensorSpec) -> tuple[Placement, ...]:
    """The placements after a move that leaves pending what is to be reduced."""
    pairs = zip(src.placements, dst.placements, strict=True)
    return tuple([a if a.is_partial() and not b.is_partial() else b for a, b in pairs])


def _steps(now: Layout, goal: Layout, *, at_once: bool = False) -> Iterator[Step]:
    reduced = _axes_to_reduce(now, goal)
    for step in _shrink(now, goal):
        yield step
        now = step.dst
    for step in _reduce(now, goal, reduced, at_once):
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
