"""The move of boxes on one mesh: one gather or exchange over the fewest axes that must talk."""

from __future__ import annotations

from ..comm.step import Step
from ..layout.geometry import Interval
from ..layout.layout import DimMap, Layout
from ..layout.mesh import Coord, Topology


def move(now: Layout, goal: Layout) -> Step:
    """The step between two layouts with the same pending reductions. Boxes of `goal` may overlap,
    those of `now` do not."""
    where = now.topology
    if any(all(a == b for a, b in want.table) for want in goal.dims):
        return Step("slice", now, goal)  # nobody needs anything
    pairs = zip(now.dims, goal.dims, strict=True)
    changed = [(have, want) for have, want in pairs if have != want]
    asked = [_asked_axes(have, want, where) for have, want in changed]
    axes = tuple(sorted({axis for each in asked for axis in each}))
    if not axes:
        return Step("slice", now, goal)
    dims = zip(changed, asked, strict=True)
    gathers = all(_is_gather(have, want, group, where) for (have, want), group in dims)
    return Step("all_gather" if gathers else "exchange", now, goal, axes)


def _asked_axes(have: DimMap, want: DimMap, where: Topology) -> set[int]:
    """The axes on which a rank differs from one that holds a part of what it needs of a dim."""
    held = [(have.at(at, where.shape), at) for at in where.coords(have.axes)]
    asked: set[int] = set()
    for coord in where.coords({*have.axes, *want.axes}):
        start, stop = want.at(coord, where.shape)
        own = have.at(coord, where.shape)
        if start >= stop or (own[0] <= start and stop <= own[1]):
            continue
        for (a, b), at in held:
            if a < stop and start < b and a < b:
                asked |= {axis for axis in have.axes if at[axis] != coord[axis]}
        if len(asked) == len(have.axes):
            break
    return asked


def _is_gather(have: DimMap, want: DimMap, group: set[int], where: Topology) -> bool:
    """True if every rank needs all that the members of its group hold, and nothing else."""
    pools: dict[Coord, list[Interval]] = {}
    for coord in where.coords({*have.axes, *want.axes}):
        first = tuple([0 if axis in group else at for axis, at in enumerate(coord)])
        if first not in pools:
            held = [have.at(at, where.shape) for at in where.group_coords(first, sorted(group))]
            pools[first] = sorted([part for part in held if part[0] < part[1]])
        pool, (start, stop) = pools[first], want.at(coord, where.shape)
        ends = (pool[0][0], pool[-1][1]) if pool else (start, start)
        if ends != (start, stop) or sum([b - a for a, b in pool]) != stop - start:
            return False
    return True
