"""`Layout`: the box of every rank and the axes that are still Partial, between two steps of a move.

Placements and cuts cannot name every layout that a redistribution passes through. Its steps
therefore go from `Layout` to `Layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from .geometry import Box, Interval, chunk_cuts, flat_index, intervals
from .mesh import Coord, Topology


class DimMap(NamedTuple):
    """The interval of one dim that a rank holds, by its coordinate on `axes`."""

    axes: tuple[int, ...]
    table: tuple[Interval, ...]

    def at(self, coord: Coord, shape: tuple[int, ...]) -> Interval:
        """The interval of the rank at `coord` on a mesh of this shape."""
        return self.table[flat_index(coord, shape, self.axes)]

    def split(self, axes: Sequence[int], shape: tuple[int, ...]) -> DimMap:
        """The map in which the members along more axes share what each rank holds."""
        counts = tuple([shape[axis] for axis in axes])
        table = [
            (start + a, start + b)
            for start, stop in self.table
            for a, b in intervals(chunk_cuts(stop - start, counts))
        ]
        return DimMap((*self.axes, *axes), tuple(table))

    def joined(self, axis: int, shape: tuple[int, ...]) -> DimMap | None:
        """The map in which each member along `axis` holds what all of them hold; None if that is
        not one interval."""
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


@dataclass(frozen=True)
class Layout:
    """A box per rank, and the axes on which a reduction is pending."""

    topology: Topology
    dims: tuple[DimMap, ...]
    partial: tuple[tuple[int, str], ...]
    _boxes: dict[Coord, Box] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes over which the local tensor varies. They index its slots."""
        varying = {axis for dim in self.dims for axis in dim.axes}
        return tuple(sorted(varying | {axis for axis, _ in self.partial}))

    @property
    def shares_axes(self) -> bool:
        """True if one axis shards several dims, as 8 ranks do that shard a dim of 2 blocks."""
        axes = [axis for dim in self.dims for axis in dim.axes]
        return len(axes) > len(set(axes))

    @cached_property
    def most(self) -> int:
        """The number of elements of the largest box."""
        return prod([max([stop - start for start, stop in dim.table]) for dim in self.dims])

    @cached_property
    def hull(self) -> Box:
        """The box around all boxes."""
        return tuple([(0, max([stop for _, stop in dim.table])) for dim in self.dims])

    @cached_property
    def slots(self) -> tuple[Coord, ...]:
        """The coordinates of the local tensors held here, in the order in which they are stored."""
        return self.topology.coords_here(self.axes)

    def text(self, dtype: torch.dtype) -> str:
        """The layout as `float32[8@dp, 4]`, or `float32[8, 4] (sum over tp)`."""
        names = self.topology.names
        dims = []
        for (_, size), dim in zip(self.hull, self.dims, strict=True):
            by = ",".join(names[axis] for axis in dim.axes)
            dims.append(f"{size}@{by}" if by else str(size))
        values, waits = notation(dtype, dims, [(op, names[axis]) for axis, op in self.partial])
        return f"{values} ({waits})" if waits else values

    def slot(self, coord: Coord) -> int:
        """The index of the local tensor of `coord`."""
        if not self.topology.virtual:
            return 0
        return flat_index(coord, self.topology.shape, self.axes)

    def box(self, coord: Coord) -> Box:
        """The region of the tensor that the rank at `coord` holds."""
        found = self._boxes.get(coord)
        if found is None:
            shape = self.topology.shape
            found = self._boxes[coord] = tuple([dim.at(coord, shape) for dim in self.dims])
        return found

    def with_dims(self, dims: Sequence[DimMap]) -> Layout:
        """The layout with other boxes and the same pending reductions."""
        return Layout(self.topology, tuple(dims), self.partial)

    def without(self, axes: set[int]) -> Layout:
        """The layout after the reductions over `axes`."""
        left = tuple([each for each in self.partial if each[0] not in axes])
        return Layout(self.topology, self.dims, left)


def notation(
    dtype: torch.dtype, dims: Sequence[str], partial: Sequence[tuple[str, str]]
) -> tuple[str, str]:
    """The texts of a layout, as `float32[8@dp, 4]`, and of its pending reductions, given with the
    names of their axes, as `sum over tp`."""
    axes: dict[str, list[str]] = {}
    for op, name in partial:
        axes.setdefault(op, []).append(name)
    waits = " and ".join(f"{op} over {', '.join(names)}" for op, names in axes.items())
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(dims)}]", waits
