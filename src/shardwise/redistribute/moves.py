"""Moving boxes on one mesh: one gather or exchange over just the axes that must talk.

A box is a product of intervals, and the intervals of a dim vary over that dim's axes alone. So what
a rank lacks, and who is nearest to have it, is found dim by dim.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from ..geometry import Interval, all_coords
from ..mesh import Coord
from .layout import DimMap, Layout
from .step import Routes, Step, coords_of

__all__ = ["move"]


def move(now: Layout, goal: Layout) -> Step:
    """The step between two layouts with the same pending reductions; targets may overlap."""
    pairs = list(zip(now.dims, goal.dims, strict=True))
    changed = [(have, want) for have, want in pairs if have != want]
    shape = now.topology.shape
    if any(all(a == b for a, b in want.table) for _, want in pairs):
        return Step("slice", now, goal)  # nobody needs anything
    ways = [_dim_move(have, want, shape) for have, want in changed]
    groups = [group for group, *_ in ways]
    axes = tuple(sorted({axis for group in groups for axis in group}))
    if not axes:
        return Step("slice", now, goal)
    if all(gathers for _, gathers, _ in ways):
        return Step("all_gather", now, goal, axes)
    span = {axis for have, want in changed for axis in (*have.axes, *want.axes)}
    holders = [(table, have, want) for (*_, table), (have, want) in zip(ways, changed, strict=True)]
    routes: Routes = {}
    for coord in coords_of(now.topology, span):
        found = []
        for choice in product(*(table[_on(have, want, coord)] for table, have, want in holders)):
            member = list(coord)
            for place in choice:
                for axis, index in place:
                    member[axis] = index
            found.append(tuple(member))
        routes[coord] = tuple(found)
    return Step("exchange", now, goal, axes, span=tuple(sorted(span)), routes=routes)


Place = tuple[tuple[int, int], ...]
"""Where a holder stands: its index on each axis on which it may differ from the receiver."""
Holders = dict[Coord, list[Place]]


@lru_cache(maxsize=4096)
def _dim_move(
    have: DimMap, want: DimMap, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], bool, Holders]:
    """For one dim: the axes that must talk, whether that gathers, and who has what is needed."""
    group = _fewest_axes(have, want, shape)
    return group, _gathers(have, want, group, shape), _holders(have, want, group, shape)


def _on(have: DimMap, want: DimMap, coord: Coord) -> Coord:
    return tuple([coord[axis] for axis in _axes(have, want)])


def _axes(have: DimMap, want: DimMap) -> tuple[int, ...]:
    return tuple(sorted({*have.axes, *want.axes}))


def _spots(
    have: DimMap, want: DimMap, shape: tuple[int, ...]
) -> list[tuple[Coord, dict[int, int], Interval]]:
    """Every place on the dim's axes, with the interval that is needed there."""
    axes = _axes(have, want)
    spots = []
    for coord in all_coords(tuple([shape[axis] for axis in axes])):
        at = dict(zip(axes, coord, strict=True))
        spots.append((coord, at, _at(want, at, shape)))
    return spots


def _at(dim: DimMap, at: dict[int, int], shape: tuple[int, ...]) -> Interval:
    index = 0
    for axis in dim.axes:
        index = index * shape[axis] + at[axis]
    return dim.table[index]


def _held(
    have: DimMap, at: dict[int, int], group: tuple[int, ...], shape: tuple[int, ...]
) -> list[tuple[Place, Interval]]:
    """What the members of a group hold, the nearest first: the rank itself, then around."""
    found = []
    for steps in all_coords(tuple([shape[axis] for axis in group])):
        place = tuple(
            [
                (axis, (at[axis] + step) % shape[axis])
                for axis, step in zip(group, steps, strict=True)
            ]
        )
        found.append((place, _at(have, {**at, **dict(place)}, shape)))
    return found


def _fewest_axes(have: DimMap, want: DimMap, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which ranks must be asked so that all needed of this dim is found."""
    spots = _spots(have, want, shape)
    group = have.axes
    for axis in have.axes:
        fewer = tuple([a for a in group if a != axis])
        if all(_covered(need, _held(have, at, fewer, shape)) for _, at, need in spots):
            group = fewer
    return group


def _covered(need: Interval, held: list[tuple[Place, Interval]]) -> bool:
    start, stop = need
    for a, b in sorted([interval for _, interval in held]):
        if a <= start < b:
            start = b
    return start >= stop


def _gathers(have: DimMap, want: DimMap, group: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether every member of a group needs exactly all that the members hold."""
    for _, at, (start, stop) in _spots(have, want, shape):
        held = [interval for _, interval in _held(have, at, group, shape)]
        if sum([b - a for a, b in held]) != stop - start:
            return False
        if not all(a == b or (start <= a and b <= stop) for a, b in held):
            return False
    return True


def _holders(have: DimMap, want: DimMap, group: tuple[int, ...], shape: tuple[int, ...]) -> Holders:
    """For every place the nearest members that hold a part of what is needed there."""
    table: Holders = {}
    for coord, at, (start, stop) in _spots(have, want, shape):
        taken: set[Interval] = set()
        places = []
        for place, (a, b) in _held(have, at, group, shape):
            part = max(a, start), min(b, stop)
            if part[0] < part[1] and part not in taken:
                taken.add(part)
                places.append(place)
        table[coord] = places
    return table
