"""The interface of engines: collectives over axes of a mesh, on the local tensors held here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from ..layout.geometry import Box, box_shape, stride_like
from ..layout.mesh import Topology
from .step import Step

Locals = Sequence[torch.Tensor]
Wait = Callable[[], None]
"""Waits for a collective that was started, and puts what came where it belongs."""
Launch = Callable[[], Wait]
"""Starts a collective."""
Finish = Callable[[], list[list[torch.Tensor]]]
"""Waits for a collective; gives for each job one tensor for each slot of its step's `dst`."""


class Job(NamedTuple):
    """One tensor in a collective. `order` is the order of its dims in memory, outermost first.

    With `async_op` the program may write into `local` before the result is waited for: what is
    sent is copied first.
    """

    step: Step
    local: Locals
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    async_op: bool = False

    def in_order(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor with its dims in the order of memory."""
        return value if _is_ascending(self.order) else value.permute(self.order)

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor in the order of memory; a view if they lie so."""
        return self.in_order(value).reshape(-1)

    def shaped(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Elements in the order of memory as a tensor."""
        order = self.order
        if _is_ascending(order):
            return flat.view(shape)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return flat.view([shape[dim] for dim in order]).permute(inverse)

    def empty(self, box: Box) -> torch.Tensor:
        """Memory for a box."""
        shape, stride = _shape_and_stride(box, self.order)
        return torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)

    def fills(self, boxes: Sequence[Box], outer: Box) -> bool:
        """True if boxes follow each other in the memory of `outer` and make it up."""
        longer = [dim for dim in self.order if outer[dim][1] - outer[dim][0] != 1]
        if not longer:
            return len(boxes) == 1
        first = longer[0]
        at = outer[first][0]
        for box in boxes:
            if box[first][0] != at or any(box[dim] != outer[dim] for dim in longer[1:]):
                return False
            at = box[first][1]
        return at == outer[first][1]


class Out:
    """This rank's result of a job. It gets its memory when the first piece of it has arrived."""

    __slots__ = ("_box", "_job", "_made")

    def __init__(self, job: Job, box: Box) -> None:
        self._job, self._box = job, box
        self._made: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """The memory of the result."""
        if self._made is None:
            self._made = self._job.empty(self._box)
        return self._made


@lru_cache(maxsize=4096)
def _is_ascending(order: tuple[int, ...]) -> bool:
    return order == tuple(range(len(order)))


@lru_cache(maxsize=16384)
def _shape_and_stride(box: Box, order: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = box_shape(box)
    return shape, stride_like(shape, order)


class Engine(Protocol):
    """Runs collectives."""

    def start(self, jobs: Sequence[Job]) -> Finish:
        """Start one collective for all jobs: on one mesh, of one op and then one dtype. Gathers and
        exchanges may be mixed, over any axes."""

    def check_equal(self, topology: Topology, digest: int) -> bool:
        """True on all ranks of the mesh if all gave the same number, else False on all."""


def narrow(value: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a tensor in a box."""
    shape = value.shape
    for dim, (start, stop) in enumerate(box):
        if stop - start != shape[dim]:
            value = value.narrow(dim, start, stop - start)
    return value
