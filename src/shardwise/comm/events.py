"""Observers: listeners get every collective, watchers every call that is planned, choosers the rows
it could have run by, and `on_free` the memory that is given back before its tensor goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..layout.cost import slowest
from ..layout.mesh import Topology
from .step import Step, bytes_received

Made = Sequence[Sequence[torch.Tensor]]
"""The results of a collective: for each of its steps the local tensors."""
Landed = Callable[[Made], None]


@dataclass(frozen=True)
class Communication:
    """A collective that starts: its kind and axes, the bytes that the rank that receives most
    receives, and the moves that it serves, with the dtype of each."""

    kind: str
    topology: Topology
    axes: tuple[int, ...]
    nbytes: int
    steps: Sequence[Step] = ()
    dtypes: Sequence[torch.dtype] = ()

    @property
    def price(self) -> int:
        """The price by the slowest link that is used."""
        links = [self.topology.links[axis] for axis in self.axes]
        if self.kind == "transfer":
            links = [link for step in self.steps for link in step.dst.topology.links]
            links += self.topology.links
        return slowest(links, self.nbytes)


Listener = Callable[[Communication], Landed | None]
"""May return a function to be called with the results, when they are there."""
Watcher = Callable[[object, str, Sequence[Any]], None]
Chooser = Callable[[int, Sequence[object], Sequence[int], object], None]

listeners: list[Listener] = []
watchers: list[Watcher] = []
"""Called with an operator whose call was planned, how it runs (rows, form, fallback, ...), and its
operands."""
choosers: list[Chooser] = []
"""Called with a mesh axis, the rows of a rule, their prices, and the row that is taken."""
on_free: list[Callable[[torch.UntypedStorage], None]] = []
"""Called with memory that is freed while a tensor still refers to it."""


@contextmanager
def unheard() -> Iterator[None]:
    """Report nothing to listeners meanwhile: printing a tensor is no part of a program."""
    before = listeners[:]
    listeners.clear()
    try:
        yield
    finally:
        listeners[:] = before


def record(event: Communication) -> Landed:
    """Report a collective; call what is returned with its results when they are there."""
    ends = [end for listener in listeners if (end := listener(event)) is not None]

    def landed(made: Made) -> None:
        for end in ends:
            end(made)

    return landed


def record_moves(steps: Sequence[Step], dtypes: Sequence[torch.dtype]) -> Landed:
    """Report the collective that takes the steps of several tensors, as `record` does. If nobody
    listens, no bytes are counted."""
    if not listeners:
        return _unheard
    kind = steps[0].kind if len({step.kind for step in steps}) == 1 else "exchange"
    axes = tuple(sorted({axis for step in steps for axis in step.axes}))
    sizes = [dtype.itemsize for dtype in dtypes]
    alone = len(steps) == 1
    received = steps[0].bytes_received(*sizes) if alone else bytes_received(steps, sizes)
    return record(Communication(kind, steps[0].src.topology, axes, received, steps, dtypes))


def _unheard(_: Made) -> None:
    return
