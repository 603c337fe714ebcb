"""`Job`: one tensor in a collective, and the layout of its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..layout.geometry import Box, box_shape, stride_like
from .step import Step

Locals = Sequence[torch.Tensor]
Wait = Callable[[], None]
"""Waits for a collective that was started, and puts what came where it belongs."""
Launch = Callable[[], Wait]
"""Starts a collective."""
Finish = Callable[[], list[list[torch.Tensor]]]
"""Waits for a collective; gives for each job one tensor for each slot of its step's `dst`."""


@dataclass(eq=False)
class Job:
    """One tensor in a collective.

    With `async_op` the program may write into `local` before the result is waited for: what is
    sent is copied first.
    """

    step: Step
    local: Locals
    dtype: torch.dtype
    device: torch.device
    async_op: bool = False
    _made: torch.Tensor | None = None

    def in_order(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor with its dims in the order of memory."""
        order = self.step.order
        return value if _is_ascending(order) else value.permute(order)

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor in the order of memory; a view if they lie so."""
        return self.in_order(value).reshape(-1)

    def shaped(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Elements in the order of memory as a tensor."""
        order = self.step.order
        if _is_ascending(order):
            return flat.view(shape)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return flat.view([shape[dim] for dim in order]).permute(inverse)

    def empty(self, box: Box) -> torch.Tensor:
        """Memory for a box."""
        shape, stride = _shape_and_stride(box, self.step.order)
        return torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)

    @property
    def out(self) -> torch.Tensor:
        """This process's result. It gets its memory when the first piece of it has arrived."""
        if self._made is None:
            dst = self.step.dst
            assert dst.topology.coordinate is not None
            self._made = self.empty(dst.box(dst.topology.coordinate))
        return self._made

    def fills(self, boxes: Sequence[Box], outer: Box) -> bool:
        """True if boxes follow each other in the memory of `outer` and make it up."""
        longer = [dim for dim in self.step.order if outer[dim][1] - outer[dim][0] != 1]
        if not longer:
            return len(boxes) == 1
        first = longer[0]
        at = outer[first][0]
        for box in boxes:
            if box[first][0] != at or any(box[dim] != outer[dim] for dim in longer[1:]):
                return False
            at = box[first][1]
        return at == outer[first][1]


@lru_cache(maxsize=4096)
def _is_ascending(order: tuple[int, ...]) -> bool:
    return order == tuple(range(len(order)))


@lru_cache(maxsize=16384)
def _shape_and_stride(box: Box, order: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = box_shape(box)
    return shape, stride_like(shape, order)


def narrow(value: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a tensor in a box."""
    shape = value.shape
    for dim, (start, stop) in enumerate(box):
        if stop - start != shape[dim]:
            value = value.narrow(dim, start, stop - start)
    return value
