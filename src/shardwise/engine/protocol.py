"""What an engine does: collectives over some axes of a mesh, on the local tensors held here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from ..geometry import flat_index
from ..mesh import Coord, Topology

__all__ = ["Cut", "Engine", "Hop", "Locals", "Shape"]

Locals = Sequence[torch.Tensor]
Shape = Callable[[Coord, Coord], tuple[int, ...] | None]
"""The shape of what `src` sends to `dst`; None if it sends nothing."""
Cut = Callable[[torch.Tensor, Coord, Coord], torch.Tensor]
"""What `src` sends to `dst`, as a view of the local tensor of `src`."""


@dataclass(frozen=True)
class Hop:
    """Who talks to whom in a collective, and where the local tensors are stored before and after.

    The groups are the coordinates that differ only in `axes`. `src_axes` and `dst_axes` are the
    axes over which the local tensors vary before and after.
    """

    topology: Topology
    axes: tuple[int, ...]
    src_axes: tuple[int, ...]
    dst_axes: tuple[int, ...]

    @cached_property
    def targets(self) -> tuple[Coord, ...]:
        """The coordinates whose local tensors are wanted here."""
        return self.topology.coords_here(self.dst_axes)

    def members(self, coord: Coord) -> list[Coord]:
        """The group of `coord`, in group order."""
        return list(self.topology.group_coords(coord, self.axes))

    def stored(self, coord: Coord) -> int:
        """Where the local tensor of `coord` is stored before the collective (virtual engine)."""
        return flat_index(coord, self.topology.shape, self.src_axes)


class Engine(Protocol):
    """The collectives. Each returns one entry per coordinate of `hop.targets`, in order."""

    def all_reduce(self, hop: Hop, local: Locals, op: str) -> list[torch.Tensor]:
        """Reduce over the group; every member gets the result."""

    def all_gather(self, hop: Hop, local: Locals, shape: Shape) -> list[list[torch.Tensor]]:
        """For each target the local tensors of its group, in group order."""

    def reduce_scatter(
        self, hop: Hop, local: Locals, shape: Shape, cut: Cut, op: str
    ) -> list[torch.Tensor]:
        """For each target the reduction over the group of what each member cuts for it."""

    def exchange(
        self, hop: Hop, local: Locals, shape: Shape, cut: Cut
    ) -> list[list[torch.Tensor | None]]:
        """For each target what each member of its group cuts for it, in group order."""

    def check_equal(self, topology: Topology, digest: int) -> bool:
        """Whether all ranks of the mesh gave the same number."""
