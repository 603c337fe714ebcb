"""What an engine does: collectives over some axes of a mesh, on the local tensors held here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch

from ..layout.geometry import Box, box_shape, relative, stride_like
from ..layout.mesh import Coord, Topology

__all__ = ["Boxes", "Engine", "Finish", "Job", "Locals", "Parcel", "Task", "narrow"]

Locals = Sequence[torch.Tensor]


class Boxes(Protocol):
    """Where every element is: a box per rank, and where the local tensor of a rank is stored."""

    @property
    def topology(self) -> Topology: ...
    @property
    def slots(self) -> tuple[Coord, ...]: ...
    def slot(self, coord: Coord) -> int: ...
    def box(self, coord: Coord) -> Box: ...


class Parcel(NamedTuple):
    """A piece that goes from one rank to another: the box, and where it is in what each holds."""

    box: Box
    shape: tuple[int, ...]
    numel: int
    inside: Box
    place: Box

    @staticmethod
    def of(box: Box, held: Box, wanted: Box) -> Parcel:
        shape = box_shape(box)
        return Parcel(box, shape, prod(shape), relative(box, held), relative(box, wanted))


class Task(Protocol):
    """A collective: `kind`, the axes whose members talk, the boxes before and after."""

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[int, ...]: ...
    @property
    def op(self) -> str: ...
    @property
    def over(self) -> int: ...
    @property
    def src(self) -> Boxes: ...
    @property
    def dst(self) -> Boxes: ...
    def sends(self, src: Coord, dst: Coord) -> bool: ...
    def sources(self, dst: Coord) -> tuple[Coord, ...]: ...
    def piece(self, src: Coord, dst: Coord) -> Box: ...
    def parcel(self, src: Coord, dst: Coord) -> Parcel | None: ...


@dataclass(frozen=True)
class Job:
    """One tensor in a collective. `order` is the order in memory of its dims, outermost first.

    With `async_op` the program may write into `local` before the result is waited for: what is
    sent is copied first.
    """

    task: Task
    local: Locals
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    async_op: bool = False

    def held(self, src: Coord, box: Box) -> torch.Tensor:
        """The part `box` of what `src` holds, as a view."""
        layout = self.task.src
        return narrow(self.local[layout.slot(src)], relative(box, layout.box(src)))

    def empty(self, box: Box) -> torch.Tensor:
        """Memory for a box."""
        shape = box_shape(box)
        stride = stride_like(shape, self.order)
        return torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)


Finish = Callable[[], list[list[torch.Tensor]]]
"""Waits for a collective; gives for each job one tensor for each slot of its task's `dst`."""


class Engine(Protocol):
    """Who runs collectives."""

    def start(self, jobs: Sequence[Job]) -> Finish:
        """Start one collective for all jobs: on one mesh, of one op and then one dtype. Gathers and
        exchanges may be mixed, over any axes."""

    def check_equal(
        self, topology: Topology, digest: int, axes: tuple[int, ...] | None = None
    ) -> bool:
        """Whether all ranks of the mesh gave the same number, or those that differ in `axes`."""


def narrow(value: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a tensor in a box."""
    for dim, (start, stop) in enumerate(box):
        if stop - start != value.shape[dim]:
            value = value.narrow(dim, start, stop - start)
    return value
