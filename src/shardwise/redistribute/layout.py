"""Where every element is, in the middle of a redistribution: boxes per rank and pending reductions.

A spec says only what placements and cuts can say. Between two specs the pieces may lie in ways that
no placement names, so the steps of a redistribution go from `Layout` to `Layout`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ..geometry import Box, Interval, chunk_cuts, flat_index, flat_indices, intervals
from ..lazy import lazy
from ..mesh import Coord, Topology
from ..placement import Partial, Placement, Shard
from ..spec import DTensorSpec

__all__ = ["DimMap", "Grid", "Layout"]


@dataclass(frozen=True)
class DimMap:
    """Which interval of one dim a rank holds, by its coordinate on `axes`."""

    axes: tuple[int, ...]
    table: tuple[Interval, ...]

    def at(self, coord: Coord, shape: tuple[int, ...]) -> Interval:
        index = 0
        for axis in self.axes:
            index = index * shape[axis] + coord[axis]
        return self.table[index]

    def over(self, grid: Grid) -> list[Interval]:
        """The interval at every coordinate of a grid that has at least its axes."""
        return [self.table[index] for index in grid.indices(self.axes)]


class Grid:
    """Some axes of a mesh, and all coordinates on them, the last axis fastest."""

    __slots__ = ("axes", "sizes")

    def __init__(self, shape: tuple[int, ...], axes: Iterable[int]) -> None:
        self.axes = tuple(sorted(axes))
        self.sizes = tuple([shape[axis] for axis in self.axes])

    def indices(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """For every coordinate its index among those of `axes` alone."""
        return flat_indices(self.sizes, tuple([self.axes.index(axis) for axis in axes]))


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
        maps = [
            DimMap(axes, intervals(cuts))
            for axes, cuts in zip(spec.dim_axes, spec.dim_cuts, strict=True)
        ]
        return Layout(spec.topology, tuple(maps), _pending(spec.placements))

    def laid(self, placements: tuple[Placement, ...]) -> Layout:
        """The same tensor with other placements, cut as `torch.chunk` would."""
        axes: list[list[int]] = [[] for _ in self.dims]
        for axis, place in enumerate(placements):
            if isinstance(place, Shard):
                axes[place.dim].append(axis)
        maps, shape = [], self.topology.shape
        for dim, own in zip(self.dims, axes, strict=True):
            cuts = chunk_cuts(dim.table[-1][1], tuple([shape[axis] for axis in own]))
            maps.append(DimMap(tuple(own), intervals(cuts)))
        return Layout(self.topology, tuple(maps), _pending(placements))

    @lazy
    def axes(self) -> tuple[int, ...]:
        """The axes over which the local tensor varies: those that index its slots."""
        varying = {axis for dim in self.dims for axis in dim.axes}
        return tuple(sorted(varying | {axis for axis, _ in self.partial}))

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
