"""`plan(src, dst)`: the steps from one layout to another. Pure and cached; no tensor, no rank.

The order is: shrink (local slices), reduce (partials), move (one gather or exchange over just the
axes that must talk), and last make partial. Each step goes from a `Layout` to a `Layout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod

from ..engine import check_reducible
from ..errors import MeshError
from ..geometry import Box, box_numel, chunk_cuts, contains, intersect, intervals
from ..mesh import Coord, Topology
from ..placement import Partial, Shard
from ..spec import DTensorSpec
from .layout import DimMap, Layout

__all__ = ["Step", "move", "plan"]

Routes = dict[Coord, tuple[Coord, ...]]


@dataclass(frozen=True)
class Step:
    """One collective or local move.

    `kind` is slice, all_reduce, reduce_scatter, all_gather, exchange or make_partial. `routes` says
    from whom each member of an exchange receives, for every coordinate on the axes of `span`, the
    other axes at 0.
    """

    kind: str
    src: Layout
    dst: Layout
    axes: tuple[int, ...] = ()
    op: str = ""
    span: tuple[int, ...] = ()
    routes: Routes = field(default_factory=dict)

    def sends(self, src: Coord, dst: Coord) -> bool:
        """Whether `src` sends a piece to `dst` in this exchange."""
        return self._on_span(src) in self.routes[self._on_span(dst)]

    def _on_span(self, coord: Coord) -> Coord:
        return tuple(c if axis in self.span else 0 for axis, c in enumerate(coord))

    @property
    def is_local(self) -> bool:
        return self.kind in ("slice", "make_partial")

    @cached_property
    def elements_received(self) -> int:
        """How many elements a rank receives, for the rank that receives most."""
        coords = _coords_of(self.src.topology, {*self.src.axes, *self.dst.axes, *self.axes})
        return max(map(self.received, coords))

    def received(self, coord: Coord) -> int:
        """How many elements the rank at `coord` receives."""
        if self.is_local:
            return 0
        held, got = self.src.box(coord), self.dst.box(coord)
        count = prod(self.src.topology.shape[axis] for axis in self.axes)
        if self.kind == "all_reduce":
            return 2 * (count - 1) * box_numel(held) // count
        if self.kind == "reduce_scatter":
            return (count - 1) * box_numel(got)
        return box_numel(got) - box_numel(intersect(held, got))


@lru_cache(maxsize=16384)
def plan(src: DTensorSpec, dst: DTensorSpec) -> tuple[Step, ...]:
    """The steps that take a tensor laid out as `src` to `dst`."""
    if src.topology is not dst.topology:
        raise MeshError(
            f"redistribute: from {src} to {dst}: the meshes differ. "
            "Both layouts must be on one mesh."
        )
    for place in (*src.placements, *dst.placements):
        if isinstance(place, Partial):
            check_reducible(place.reduce_op, src.dtype)
    return tuple(_steps(src, dst))


def _steps(src: DTensorSpec, dst: DTensorSpec) -> Iterator[Step]:
    now, goal = Layout.of(src), Layout.of(dst)
    reduced = _axes_to_reduce(now, goal)
    for step in _shrink(now, goal):
        yield step
        now = step.dst
    for step in _reduce(now, goal, dst, reduced):
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


def _coords_of(topology: Topology, axes: set[int]) -> tuple[Coord, ...]:
    """Every coordinate of `axes`, the other axes at 0."""
    return tuple(topology.group_coords((0,) * topology.ndim, sorted(axes)))


def _shrink(now: Layout, goal: Layout) -> Iterator[Step]:
    """A local slice of every dim of which each rank already holds what it will need."""
    dims = list(now.dims)
    busy = set(now.axes)
    for dim, (have, want) in enumerate(zip(now.dims, goal.dims, strict=True)):
        if have == want or (set(want.axes) - set(have.axes)) & busy:
            continue
        if not set(have.axes) <= set(want.axes):
            continue  # the dim also grows along an axis: slicing now would lose what that needs
        shape = now.topology.shape
        coords = _coords_of(now.topology, set(have.axes) | set(want.axes))
        if all(contains((have.at(c, shape),), (want.at(c, shape),)) for c in coords):
            dims[dim] = want
            busy |= set(want.axes)
    if tuple(dims) != now.dims:
        yield Step("slice", now, now.with_dims(tuple(dims)))


def _reduce(now: Layout, goal: Layout, dst: DTensorSpec, reduced: set[int]) -> Iterator[Step]:
    """Reductions, last axis first; those that end in a shard scatter, the others go together."""
    pending = dict(now.partial)
    waiting: list[int] = []
    for axis in sorted(reduced, reverse=True):
        op = pending[axis]
        if waiting and pending[waiting[0]] != op:
            step = _all_reduce(now, waiting, pending[waiting[0]])
            yield step
            now, waiting = step.dst, []
        place = dst.placements[axis]
        if not isinstance(place, Shard):
            waiting.append(axis)
            continue
        step = _reduce_scatter(now, goal, axis, place.dim, op)
        yield step
        now = step.dst
    if waiting:
        yield _all_reduce(now, waiting, pending[waiting[0]])


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


def _all_reduce(now: Layout, axes: list[int], op: str) -> Step:
    return Step("all_reduce", now, now.without(set(axes)), tuple(sorted(axes)), op)


def _reduce_scatter(now: Layout, goal: Layout, axis: int, dim: int, op: str) -> Step:
    have, want = now.dims[dim], goal.dims[dim]
    shape = now.topology.shape
    if not (set(want.axes) == set(have.axes) | {axis} and _splits(now.topology, have, want, axis)):
        table = []
        for start, stop in have.table:
            for a, b in intervals(chunk_cuts(stop - start, (shape[axis],))):
                table.append((start + a, start + b))
        want = DimMap((*have.axes, axis), tuple(table))
    dims = (*now.dims[:dim], want, *now.dims[dim + 1 :])
    return Step("reduce_scatter", now, now.without({axis}).with_dims(dims), (axis,), op)


def _splits(topology: Topology, have: DimMap, want: DimMap, axis: int) -> bool:
    """Whether along `axis` the wanted intervals cut each held interval into pieces."""
    for coord in _coords_of(topology, set(have.axes)):
        held = have.at(coord, topology.shape)
        parts = [want.at(c, topology.shape) for c in topology.group_coords(coord, (axis,))]
        if not all(contains((held,), (part,)) for part in parts):
            return False
        if sum(b - a for a, b in parts) != held[1] - held[0]:
            return False
    return True


def move(now: Layout, goal: Layout) -> Step:
    """One gather or exchange over the fewest axes whose members hold all that is needed."""
    changed = [d for d, (a, b) in enumerate(zip(now.dims, goal.dims, strict=True)) if a != b]
    have = now.with_dims(tuple(now.dims[d] for d in changed))
    need = goal.with_dims(tuple(goal.dims[d] for d in changed))
    span = sorted({axis for dim in (*have.dims, *need.dims) for axis in dim.axes})
    coords = _coords_of(now.topology, set(span))
    axes = span
    for axis in span:
        fewer = [a for a in axes if a != axis]
        if all(_sources(have, need, coord, fewer) is not None for coord in coords):
            axes = fewer
    if not axes:
        return Step("slice", now, goal)
    if _is_gather(have, need, axes, coords):
        return Step("all_gather", now, goal, tuple(axes))
    routes = {coord: _sources(have, need, coord, axes) or () for coord in coords}
    return Step("exchange", now, goal, tuple(axes), span=tuple(span), routes=routes)


def _sources(now: Layout, goal: Layout, coord: Coord, axes: list[int]) -> tuple[Coord, ...] | None:
    """The nearest members that together hold what `coord` needs; None if there are none."""
    need = goal.box(coord)
    missing = box_numel(need)
    taken: set[Box] = set()
    sources = []
    for member in _by_distance(now.topology, coord, axes):
        piece = intersect(now.box(member), need)
        if box_numel(piece) and piece not in taken:
            taken.add(piece)
            sources.append(member)
            missing -= box_numel(piece)
    return None if missing else tuple(sources)


def _by_distance(topology: Topology, coord: Coord, axes: list[int]) -> list[Coord]:
    def distance(member: Coord) -> tuple[object, ...]:
        steps = [(member[a] - coord[a]) % topology.shape[a] for a in axes]
        return (sum(step != 0 for step in steps), steps)

    return sorted(topology.group_coords(coord, axes), key=distance)


def _is_gather(now: Layout, goal: Layout, axes: list[int], coords: tuple[Coord, ...]) -> bool:
    """Whether every member of a group needs exactly all that the members hold."""
    for coord in coords:
        need = goal.box(coord)
        held = [now.box(member) for member in now.topology.group_coords(coord, axes)]
        if not all(contains(need, box) for box in held):
            return False
        if sum(map(box_numel, held)) != box_numel(need):
            return False
    return True
