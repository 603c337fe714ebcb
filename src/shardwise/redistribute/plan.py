"""`plan(src, dst)`: the steps from one layout to another. Pure and cached; no tensor, no rank.

The order is: shrink (local slices), reduce (partials), move (one gather or exchange over just the
axes that must talk), and last make partial. Adjacent axes that do the same go together. Where the
links of the axes differ, ways that go axis by axis are priced too, and the cheapest is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, pairwise

from ..cost import Link
from ..engine import check_reducible
from ..geometry import chunk_cuts, contains, intervals
from ..mesh import Topology
from ..placement import Partial, Placement, Shard
from ..spec import DTensorSpec
from .between import between_meshes
from .layout import DimMap, Layout
from .moves import move
from .step import Step, coords_of

__all__ = ["plan"]


@lru_cache(maxsize=16384)
def plan(src: DTensorSpec, dst: DTensorSpec) -> tuple[Step, ...]:
    """The steps that take a tensor laid out as `src` to `dst`."""
    for place in (*src.placements, *dst.placements):
        if isinstance(place, Partial):
            check_reducible(place.reduce_op, src.dtype)
    if src.topology is not dst.topology:
        return tuple(between_meshes(src, dst, plan))
    now, goal = Layout.of(src), Layout.of(dst)
    best = tuple(_steps(now, goal))
    ways = dict.fromkeys(_other_ways(src, dst, best))
    if ways:
        itemsize = src.dtype.itemsize
        least = sum([step.price(itemsize) for step in best])
        for way in ways:
            best, least = _cheaper(way, now, goal, best, least, itemsize)
    return best


Places = tuple[Placement, ...]
Hop = tuple[Places, Places, bool]
"""A part of a way, and whether it reduces and moves at once."""
Way = tuple[Hop, ...]


def _cheaper(
    way: Way,
    now: Layout,
    goal: Layout,
    best: tuple[Step, ...],
    least: int,
    itemsize: int,
) -> tuple[tuple[Step, ...], int]:
    """The cheaper of a way and the best so far, with its price.

    The hop with the slowest links, or else the last, is looked at first: it costs most, so few ways
    need to be looked at to the end.
    """
    topology = now.topology
    starts = [_least_start(topology, a, b) for a, b, _ in way]
    price = sum(starts)  # of hops that are not looked at yet
    if price >= least:
        return best, least
    found: list[list[Step]] = [[] for _ in way]
    slowest = [_slowest(topology.links, a, b) for a, b, _ in way]
    middle = [now.laid(places) for _, places, _ in way[:-1]]
    layouts = [now, *middle, goal]
    for index in sorted(range(len(way)), key=lambda index: (-slowest[index], -index)):
        price -= starts[index]
        for step in _steps(layouts[index], layouts[index + 1], way[index][2]):
            found[index].append(step)
            price += step.price(itemsize, least - price)
            if price >= least:
                return best, least
    return tuple([step for steps in found for step in steps]), price


def _least_start(topology: Topology, src: Places, dst: Places) -> int:
    """What a hop costs at least: some axis must talk, unless shards just become partial or what is
    whole is sliced."""
    axes = zip(topology.shape, topology.links, src, dst, strict=True)
    talking = [
        link.start
        for size, link, have, want in axes
        if size > 1
        and have is not want
        and not have.is_replicate()
        and not (have.is_shard() and want.is_partial())
    ]
    return min(talking, default=0)


def _slowest(links: tuple[Link, ...], src: Places, dst: Places) -> int:
    """The price of a byte on the slowest axis on which two layouts differ."""
    pairs = zip(links, src, dst, strict=True)
    return max([link.per_byte for link, have, want in pairs if have is not want], default=0)


def _other_ways(src: DTensorSpec, dst: DTensorSpec, steps: tuple[Step, ...]) -> Iterator[Way]:
    """Ways that may be cheaper than the plain order: make partial first or last, reduce and move at
    once, move before reducing, or go axis by axis."""
    kinds = {step.kind for step in steps}
    moving = [step for step in steps if not step.is_local]
    if not moving:
        return
    yield from map(_through, _made_partial(src.placements, dst.placements))
    if len(moving) == 1 and len(moving[0].axes) == 1:
        return  # no other way has less to do
    if {"exchange", "all_gather"} & kinds:
        if "reduce_scatter" in kinds:
            yield ((src.placements, dst.placements, True),)
        if "all_reduce" in kinds:
            yield from map(_through, _moved_first(src.placements, dst.placements))
    yield from map(_through, _axis_by_axis(src, dst))


def _through(way: list[Places]) -> Way:
    return tuple([(a, b, False) for a, b in pairwise(way)])


def _moved_first(src: Places, dst: Places) -> Iterator[list[Places]]:
    """The way that moves what is pending, and reduces it where it will be."""
    places = tuple(
        [
            have if have.is_partial() and not want.is_partial() else want
            for have, want in zip(src, dst, strict=True)
        ]
    )
    if places not in (src, dst):
        yield [src, places, dst]


def _made_partial(src: Places, dst: Places) -> Iterator[list[Places]]:
    """The ways that make shards partial before all else moves, and after it.

    Inner axes go first: what the members of outer ones hold is in one piece only after them. What
    is replicated may be sliced last: that costs nothing wherever it comes.
    """
    pairs = list(zip(src, dst, strict=True))
    made = [axis for axis, (a, b) in enumerate(pairs) if a.is_shard() and b.is_partial()]
    others = [axis for axis, (a, b) in enumerate(pairs) if not a.is_replicate() and a is not b]
    if not made:
        return
    inner_first = [[axis] for axis in reversed(made)]
    rest = [axis for axis in others if axis not in made]
    for turns in ([*inner_first, rest], [rest, *inner_first])[: 2 if rest else 1]:
        way, places = [src], list(src)
        for axes in turns:
            for axis in axes:
                places[axis] = dst[axis]
            way.append(tuple(places))
        yield [each for each, after in pairwise([*way, dst]) if each != after] + [dst]


def _axis_by_axis(src: DTensorSpec, dst: DTensorSpec) -> Iterator[list[Places]]:
    """Ways over layouts in between, for a mesh whose axes differ: fast axes first, and last."""
    links = src.topology.links
    pairs = list(zip(src.placements, dst.placements, strict=True))
    axes = [axis for axis, (a, b) in enumerate(pairs) if a is not b and not a.is_replicate()]
    if len({links[axis].per_byte for axis in axes}) < 2:
        return
    by_speed = sorted(axes, key=lambda axis: links[axis].per_byte)
    for order in (by_speed, by_speed[::-1]):
        way, places = [src.placements], list(src.placements)
        for axis in order[:-1]:
            places[axis] = dst.placements[axis]
            way.append(tuple(places))
        yield [*way, dst.placements]
    reduced = [axis for axis in by_speed if _stays_whole(*pairs[axis])]
    if len(reduced) > 1 and dst.ndim:
        # Scatter over the fast axis, reduce what is left over the slow one, gather over the fast.
        widest = max(range(dst.ndim), key=lambda dim: dst.meta.shape[dim])
        places = list(dst.placements)
        places[reduced[0]] = Shard(widest)
        yield [src.placements, tuple(places), dst.placements]


def _stays_whole(have: Placement, want: Placement) -> bool:
    """Whether an axis is reduced and every rank keeps the whole."""
    return have.is_partial() and want.is_replicate()


def _steps(now: Layout, goal: Layout, at_once: bool = False) -> Iterator[Step]:
    reduced = _axes_to_reduce(now, goal)
    for step in _shrink(now, goal):
        yield step
        now = step.dst
    for step in _reduce(now, goal, reduced, at_once):
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
    linear = ("sum", "avg")
    return a == b or (a in linear and b in linear)


def _axes_to_reduce(now: Layout, goal: Layout) -> set[int]:
    """The pending axes that `goal` does not keep, with those that must be reduced before them."""
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
        part = None if part is None else _joined(topology, part, axis)
    if part is None or part == have:
        return None
    shape = topology.shape
    coords = coords_of(topology, {*have.axes, *part.axes})
    inside = all(contains((have.at(c, shape),), (part.at(c, shape),)) for c in coords)
    return part if inside else None


# --- reducing ------------------------------------------------------------------------------------


def _reduce(now: Layout, goal: Layout, reduced: set[int], at_once: bool) -> Iterator[Step]:
    """Reductions: kinds that do not commute last axis first, axes of one kind together.

    Axes that end in a shard scatter, and first, because that leaves less for the others.
    """
    pending = dict(now.partial)
    order = sorted(reduced, reverse=True)
    if all(_commute(pending[a], pending[b]) for a in order for b in order):
        order.sort(key=lambda axis: (pending[axis], -axis))
    shards = {axis for dim in goal.dims for axis in dim.axes}
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
    """From a shard to a pending reduction nothing moves: ranks pad with the identity."""
    have = dict(now.partial)
    for axis, op in goal.partial:
        if have.get(axis) == op or op == "avg":
            continue
        for dim, held in enumerate(now.dims):
            whole = _joined(now.topology, held, axis) if axis in held.axes else None
            if whole is not None:
                dims = (*now.dims[:dim], whole, *now.dims[dim + 1 :])
                partial = tuple(sorted((*now.partial, (axis, op))))
                step = Step("make_partial", now, Layout(now.topology, dims, partial))
                yield step
                now = step.dst


def _joined(topology: Topology, held: DimMap, axis: int) -> DimMap | None:
    """The map in which each member along `axis` holds what all hold, if one interval."""
    rest = tuple(a for a in held.axes if a != axis)
    table = []
    for coord in topology.group_coords((0,) * topology.ndim, rest):
        parts = [held.at(c, topology.shape) for c in topology.group_coords(coord, (axis,))]
        filled = [part for part in parts if part[0] < part[1]] or parts[:1]
        start, stop = min(a for a, _ in filled), max(b for _, b in filled)
        if sum(b - a for a, b in filled) != stop - start:
            return None
        table.append((start, stop))
    return DimMap(rest, tuple(table))
