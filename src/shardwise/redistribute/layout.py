"""Where every element is, in the middle of a redistribution: boxes per rank and pending reductions.

A spec says only what placements and cuts can say. Between two specs the pieces may lie in ways that
no placement names, so the steps of a redistribution go from `Layout` to `Layout`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ..geometry import Box, Interval, flat_index, intervals
from ..mesh import Coord, Topology
from ..placement import Partial
from ..spec import DTensorSpec

__all__ = ["DimMap", "Layout"]


@dataclass(frozen=True)
class DimMap:
    """Which interval of one dim a rank holds, by its coordinate on `axes`."""

    axes: tuple[int, ...]
    table: tuple[Interval, ...]

    def at(self, coord: Coord, shape: tuple[int, ...]) -> Interval:
        return self.table[flat_index(coord, shape, self.axes)]


@dataclass(frozen=True)
class Layout:
    """A box per rank, and the axes on which a reduction is pending."""

    topology: Topology
    dims: tuple[DimMap, ...]
    partial: tuple[tuple[int, str], ...]

    @staticmethod
    def of(spec: DTensorSpec) -> Layout:
        """The layout that a spec says."""
        dims = zip(spec.dim_axes, spec.dim_cuts, strict=True)
        partial = tuple(
            (axis, place.reduce_op)
            for axis, place in enumerate(spec.placements)
            if isinstance(place, Partial)
        )
        return Layout(
            spec.topology, tuple(DimMap(axes, intervals(cuts)) for axes, cuts in dims), partial
        )

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes over which the local tensor varies: those that index its slots."""
        varying = {axis for dim in self.dims for axis in dim.axes}
        return tuple(sorted(varying | {axis for axis, _ in self.partial}))

    @cached_property
    def slots(self) -> tuple[Coord, ...]:
        return self.topology.coords_here(self.axes)

    def slot(self, coord: Coord) -> int:
        if not self.topology.virtual:
            return 0
        return flat_index(coord, self.topology.shape, self.axes)

    @cached_property
    def _boxes(self) -> dict[Coord, Box]:
        return {}

    def box(self, coord: Coord) -> Box:
        found = self._boxes.get(coord)
        if found is None:
            shape = self.topology.shape
            found = self._boxes[coord] = tuple([dim.at(coord, shape) for dim in self.dims])
        return found

    def with_dims(self, dims: tuple[DimMap, ...]) -> Layout:
        return replace(self, dims=dims)

    def without(self, axes: set[int]) -> Layout:
        """With the reductions over `axes` done."""
        return replace(self, partial=tuple(p for p in self.partial if p[0] not in axes))
