"""Where every element is, in the middle of a redistribution: boxes per rank and pending reductions.

A spec says only what placements and cuts can say. Between two specs the pieces may lie in ways that
no placement names, so the steps of a redistribution go from `Layout` to `Layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ..layout.geometry import Box, Interval, chunk_cuts, flat_index, flat_indices, intervals
from ..layout.lazy import lazy
from ..layout.mesh import Coord, Topology
from ..layout.placement import Partial, Placement, Shard
from ..layout.spec import DTensorSpec

__all__ = ["DimMap", "Grid", "Layout", "grid_of", "largest"]


class DimMap(NamedTuple):
    """Which interval of one dim a rank holds, by its coordinate on `axes`."""

    axes: tuple[int, ...]
    table: tuple[Interval, ...]

    def at(self, coord: Coord, shape: tuple[int, ...]) -> Interval:
        index = 0
        for axis in self.axes:
            index = index * shape[axis] + coord[axis]
        return self.table[index]

    def over(self, grid: Grid) -> Sequence[Interval]:
        """The interval at every coordinate of a grid that has at least its axes."""
        if self.axes == grid.axes:
            return self.table
        table = self.table
        return [table[index] for index in grid.indices(self.axes)]

    def joined(self, axis: int, shape: tuple[int, ...]) -> DimMap | None:
        """The map in which each member along `axis` holds what all hold, if one interval."""
        at = self.axes.index(axis)
        rest = self.axes[:at] + self.axes[at + 1 :]
        step = prod([shape[inner] for inner in self.axes[at + 1 :]])
        block = step * shape[axis]
        table = []
        for first in range(0, len(self.table), block):
            for place in range(first, first + step):
                parts = self.table[place : first + block : step]
                filled = [part for part in parts if part[0] < part[1]] or parts[:1]
                start, stop = min(filled)[0], max([stop for _, stop in filled])
                if sum([b - a for a, b in filled]) != stop - start:
                    return None
                table.append((start, stop))
        return DimMap(rest, tuple(table))


class Grid:
    """Some axes of a mesh, and all coordinates on them, the last axis fastest."""

    __slots__ = ("_indices", "axes", "sizes")

    def __init__(self, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
        self.axes = axes
        self.sizes = tuple([shape[axis] for axis in axes])
        self._indices: dict[tuple[int, ...], tuple[int, ...]] = {}

    def indices(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """For every coordinate its index among those of `axes` alone."""
        found = self._indices.get(axes)
        if found is None:
            order = tuple([self.axes.index(axis) for axis in axes])
            found = self._indices[axes] = flat_indices(self.sizes, order)
        return found


@lru_cache(maxsize=4096)
def _grid(shape: tuple[int, ...], axes: tuple[int, ...]) -> Grid:
    return Grid(shape, axes)


def grid_of(shape: tuple[int, ...], *axes: Iterable[int]) -> Grid:
    """The grid of all of these axes."""
    return _grid(shape, tuple(sorted({axis for some in axes for axis in some})))


def largest(
    shape: tuple[int, ...], axes: tuple[int, ...], values: Sequence[int], dims: Sequence[DimMap]
) -> int:
    """The largest product of a value, by the place on `axes`, and the lengths of intervals there.

    Where every dim has axes of its own some rank has the longest of each.
    """
    others = [axis for dim in dims for axis in dim.axes]
    if len({*axes, *others}) == len(axes) + len(others):
        return max(values) * prod([max([b - a for a, b in dim.table]) for dim in dims])
    grid = grid_of(shape, axes, others)
    found = [values[index] for index in grid.indices(axes)]
    for dim in dims:
        found = [n * (b - a) for n, (a, b) in zip(found, dim.over(grid), strict=True)]
    return max(found)


@lru_cache(maxsize=16384)
def _chunked(size: int, axes: tuple[int, ...], counts: tuple[int, ...]) -> DimMap:
    """A dim cut as `torch.chunk` would."""
    return DimMap(axes, intervals(chunk_cuts(size, counts)))


def _pending(placements: tuple[Placement, ...]) -> tuple[tuple[int, str], ...]:
    found = [
        (i, place.reduce_op) for i, place in enumerate(placements) if isinstance(place, Partial)
    ]
    return tuple(found)


@dataclass(frozen=True)
class Layout:
    """A box per rank, and the axes on which a reduction is pending."""

    topology: Topology
    dims: tuple[DimMap, ...]
    partial: tuple[tuple[int, str], ...]

    @staticmethod
    @lru_cache(maxsize=16384)
    def of(spec: DTensorSpec) -> Layout:
        """The layout that a spec says."""
        if not spec.cuts and not spec.groups:
            return _laid(spec.topology, spec.meta.shape, spec.placements)
        maps = [
            DimMap(axes, intervals(cuts))
            for axes, cuts in zip(spec.dim_axes, spec.dim_cuts, strict=True)
        ]
        return Layout(spec.topology, tuple(maps), _pending(spec.placements))

    def laid(self, placements: tuple[Placement, ...]) -> Layout:
        """The same tensor with other placements, cut as `torch.chunk` would."""
        return _laid(self.topology, [dim.table[-1][1] for dim in self.dims], placements)

    @lazy
    def axes(self) -> tuple[int, ...]:
        """The axes over which the local tensor varies: those that index its slots."""
        varying = {axis for dim in self.dims for axis in dim.axes}
        return tuple(sorted(varying | {axis for axis, _ in self.partial}))

    @lazy
    def most(self) -> int:
        """How many elements the largest box has."""
        return largest(self.topology.shape, (), (1,), self.dims)

    @lazy
    def slots(self) -> tuple[Coord, ...]:
        return self.topology.coords_here(self.axes)

    def slot(self, coord: Coord) -> int:
        if not self.topology.virtual:
            return 0
        return flat_index(coord, self.topology.shape, self.axes)

    @lazy
    def _boxes(self) -> dict[Coord, Box]:
        return {}

    def box(self, coord: Coord) -> Box:
        found = self._boxes.get(coord)
        if found is None:
            shape = self.topology.shape
            found = self._boxes[coord] = tuple([dim.at(coord, shape) for dim in self.dims])
        return found

    def with_dims(self, dims: tuple[DimMap, ...]) -> Layout:
        return Layout(self.topology, dims, self.partial)

    def without(self, axes: set[int]) -> Layout:
        """With the reductions over `axes` done."""
        return Layout(
            self.topology, self.dims, tuple([p for p in self.partial if p[0] not in axes])
        )


def _laid(where: Topology, sizes: Sequence[int], placements: tuple[Placement, ...]) -> Layout:
    axes: list[list[int]] = [[] for _ in sizes]
    for axis, place in enumerate(placements):
        if isinstance(place, Shard):
            axes[place.dim].append(axis)
    maps = [
        _chunked(size, tuple(own), tuple([where.shape[axis] for axis in own]))
        for size, own in zip(sizes, axes, strict=True)
    ]
    return Layout(where, tuple(maps), _pending(placements))
