"""Who gives whom what: the axes along which ranks must be asked, and the nearest holders.

A box is a product of intervals, and the intervals of a dim vary over that dim's axes alone. So what
a rank lacks, and who is nearest to have it, is found dim by dim.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod

from ..layout.geometry import Box, Interval, all_coords, flat_indices
from ..layout.mesh import Coord
from .layout import DimMap, Layout, grid_of

__all__ = ["DimMove", "Routes", "between_routes", "dim_move", "dim_moves", "routes"]

Routes = dict[Coord, tuple[Coord, ...]]
"""From whom a coordinate receives."""
Axes = tuple[int, ...]


def dim_moves(now: Layout, goal: Layout) -> list[DimMove]:
    """The dims whose intervals change."""
    shape = now.topology.shape
    pairs = zip(now.dims, goal.dims, strict=True)
    return [dim_move(have, want, shape) for have, want in pairs if have != want]


@lru_cache(maxsize=4096)
def dim_move(have: DimMap, want: DimMap, shape: tuple[int, ...]) -> DimMove:
    """What must be asked so that each rank has what it will need of one dim."""
    return DimMove(have, want, shape)


class DimMove:
    """One dim that changes: `group` are the fewest axes along which ranks must be asked, and if it
    `gathers` every member needs exactly all that the members hold.

    At every place on the grid of the axes that matter, `needs` is what will be needed there,
    `sizes` how much that is, and `kept` how much of it is there already.
    """

    __slots__ = ("_order", "_shape", "gathers", "grid", "group", "have", "kept", "needs", "sizes")

    def __init__(self, have: DimMap, want: DimMap, shape: tuple[int, ...]) -> None:
        self.have, self._shape = have, shape
        self.grid = grid_of(shape, have.axes, want.axes)
        self.needs = want.over(self.grid)
        self.sizes = [stop - start for start, stop in self.needs]
        held = have.over(self.grid)
        self.kept = [_shared(*both) for both in zip(self.needs, held, strict=True)]
        table = have.table
        filled = [place for place, (start, stop) in enumerate(table) if start < stop]
        self._order = sorted(filled, key=table.__getitem__)
        self.group = self._asked()
        self.gathers = self._is_gather()

    def _asked(self) -> Axes:
        """The axes on which a rank and one that has a part of what it needs are apart."""
        axes, table = self.have.axes, self.have.table
        coords = all_coords(tuple([self._shape[axis] for axis in axes]))
        starts = [table[place][0] for place in self._order]
        stops = [table[place][1] for place in self._order]
        asked: set[int] = set()
        for (start, stop), kept, own in zip(
            self.needs, self.kept, self.grid.indices(axes), strict=True
        ):
            if kept == stop - start:
                continue
            first, last = bisect_right(stops, start), bisect_left(starts, stop)
            for place in self._order[first:last]:
                for axis, here, there in zip(axes, coords[own], coords[place], strict=True):
                    if here != there:
                        asked.add(axis)
            if len(asked) == len(axes):
                break
        return tuple([axis for axis in axes if axis in asked])

    def _held(self, group: Axes) -> list[list[Interval]]:
        """What the members of a group hold, in order, for every place on the grid."""
        axes, table = self.have.axes, self.have.table
        rest = tuple([axis for axis in axes if axis not in group])
        if not rest:
            return [[table[place] for place in self._order]] * len(self.needs)
        sizes = tuple([self._shape[axis] for axis in axes])
        among = flat_indices(sizes, tuple([axes.index(axis) for axis in rest]))
        pools: dict[int, list[Interval]] = {}
        for place in self._order:
            pools.setdefault(among[place], []).append(table[place])
        return [pools.get(index, []) for index in self.grid.indices(rest)]

    def _is_gather(self) -> bool:
        for (start, stop), pool in zip(self.needs, self._held(self.group), strict=True):
            if not pool:
                if start < stop:
                    return False
            elif (pool[0][0], pool[-1][1]) != (start, stop) or sum(
                [b - a for a, b in pool]
            ) != stop - start:
                return False
        return True

    def staying(self, slow: set[int]) -> Sequence[int]:
        """At every place how much comes from ranks that stand at the same place on some axes."""
        group = tuple([axis for axis in self.group if axis not in slow])
        if not group:
            return self.kept
        if group == self.group:
            return self.sizes
        found = []
        for (start, stop), pool in zip(self.needs, self._held(group), strict=True):
            total = 0
            for a, b in pool:
                if a < stop and start < b:
                    a, b = max(a, start), min(b, stop)
                    total += b - a
                    start = b
            found.append(total)
        return found

    def holders(self) -> dict[Coord, list[Coord]]:
        """For every place the nearest that hold a part of what is needed there, the rank itself and
        then around: their places on the axes that are asked."""
        axes, sizes, have = self.grid.axes, self.grid.sizes, self.have
        coords = all_coords(tuple([self._shape[axis] for axis in have.axes]))
        pairs = [(index, axes.index(axis)) for index, axis in enumerate(have.axes)]
        asked = [pair for pair in pairs if have.axes[pair[0]] in self.group]
        fixed = [pair for pair in pairs if pair not in asked]
        starts = [have.table[place][0] for place in self._order]
        stops = [have.table[place][1] for place in self._order]
        apart = all(stop <= start for stop, start in zip(stops, starts[1:], strict=False))
        table: dict[Coord, list[Coord]] = {}
        for at, (start, stop) in zip(all_coords(sizes), self.needs, strict=True):
            some = self._order
            if apart:
                some = some[bisect_right(stops, start) : bisect_left(starts, stop)]
            around = {}
            for place in some:
                coord = coords[place]
                if all(coord[index] == at[here] for index, here in fixed):
                    turn = tuple([(coord[index] - at[here]) % sizes[here] for index, here in asked])
                    around[turn] = place
            taken: set[Interval] = set()
            found = table[at] = []
            for _, place in sorted(around.items()):
                a, b = have.table[place]
                part = max(a, start), min(b, stop)
                if part[0] < part[1] and part not in taken:
                    taken.add(part)
                    found.append(tuple([coords[place][index] for index, _ in asked]))
        return table


def routes(now: Layout, goal: Layout) -> Routes:
    """From whom each member receives, for every coordinate on the axes of the dims that change."""
    shape = now.topology.shape
    tables = [(move.grid.axes, move.group, move.holders()) for move in dim_moves(now, goal)]
    span = sorted({axis for axes, *_ in tables for axis in axes})
    found: Routes = {}
    for coord in now.topology.group_coords((0,) * len(shape), span):
        near = [table[tuple([coord[axis] for axis in axes])] for axes, _, table in tables]
        givers = []
        for choice in product(*near):
            member = list(coord)
            for (_, group, _), place in zip(tables, choice, strict=True):
                for axis, index in zip(group, place, strict=True):
                    member[axis] = index
            givers.append(tuple(member))
        found[coord] = tuple(givers)
    return found


def between_routes(have: Layout, want: Layout) -> Routes:
    """For each rank of another mesh the ranks that give it a piece: itself if it can, else one of
    those that hold the same, by turns. On one mesh it is the one that differs only on axes that
    matter."""
    a, b = have.topology, want.topology
    replicas = [axis for axis in range(a.ndim) if axis not in have.axes]
    found: Routes = {}
    for turn, coord in enumerate(all_coords(b.shape)):
        box = want.box(coord)
        if not prod(stop - start for start, stop in box):
            found[coord] = ()
            continue
        rank, givers = b.rank_of(coord), []
        for holder in a.group_coords((0,) * a.ndim, have.axes):
            if not _meet(have.box(holder), box):
                continue
            if a is b:
                near = [coord[axis] if axis in replicas else at for axis, at in enumerate(holder)]
                givers.append(tuple(near))
                continue
            same = a.group_coords(holder, replicas)
            here = [member for member in same if a.rank_of(member) == rank]
            givers.append(here[0] if here else same[turn % len(same)])
        found[coord] = tuple(givers)
    return found


def _total(pool: list[Interval]) -> int:
    return sum([stop - start for start, stop in pool])


def _shared(a: Interval, b: Interval) -> int:
    start = a[0] if a[0] > b[0] else b[0]
    stop = a[1] if a[1] < b[1] else b[1]
    return stop - start if start < stop else 0


def _meet(a: Box, b: Box) -> bool:
    return all(max(x[0], y[0]) < min(x[1], y[1]) for x, y in zip(a, b, strict=True))
