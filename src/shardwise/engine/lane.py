"""A lane: what collectives run over that a thread runs beside the program.

Ranks must call the collectives of a group in one order. What runs in the background would mix with
what the program calls meanwhile, on each rank in another way. So it has groups of its own, and a
connection of its own to the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from .._torch import gloo_group, gloo_timeout, shared_store
from ..errors import CommunicationError

__all__ = ["Ends", "Lane", "here", "rehearsing", "using"]

Ends = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks that have what is moved, and those that get it."""


class Lane:
    """The groups of the background for moves between two meshes, or on one, made when they are
    first needed, by each set of ranks."""

    def __init__(self, ends: Ends) -> None:
        self.name = f"shardwise/lane/{_digest(ends)}"
        self.world = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.home: Any = shared_store()  # one process has the server, and must keep it
        self.store: Any = self.home.clone()
        self.timeout = gloo_timeout()
        self.groups: dict[tuple[int, ...], Any] = {}
        self.finished = 0  # collectives: whether it gets on
        self.closing = False  # the process ends
        self.parked = threading.Event()

    def group(self, ranks: tuple[int, ...], look: Any) -> Any:
        """The group of some ranks, this one among them; all of them come here in the same order.

        gloo would wait for the others without a word: they are met in the store first, where `look`
        finds out if one of them has failed.
        """
        found = self.groups.get(ranks)
        if found is None:
            text = ",".join(map(str, ranks))
            name = f"{self.name}/{_digest(ranks)}"
            turn, last = divmod(self.store.add(name, 1) - 1, len(ranks))
            if last == len(ranks) - 1:
                self.store.set(f"{name}/{turn}/all", "here")
            self._meet(f"{name}/{turn}/all", text, look)
            own = dist.distributed_c10d.PrefixStore(f"{name}/{turn}", self.store)
            found = gloo_group(own, ranks.index(self.rank), len(ranks), self.timeout)
            self.groups[ranks] = found
        return found

    def park(self) -> None:
        """Stop for good if the process ends. What a group has begun cannot be called off: a thread
        that wakes up, or a group that is freed, while Python ends would disturb or stop that."""
        if self.closing:
            self.parked.set()
            threading.Event().wait()

    def _meet(self, key: str, ranks: str, look: Any) -> None:
        start = looked = time.monotonic()
        pause = 0.001
        while not self.store.check([key]):
            now = time.monotonic()
            if self.closing:
                raise CommunicationError("this process ends.")
            if now - looked > 2:
                look(None)
                looked = now
            if now - start > self.timeout.total_seconds():
                raise CommunicationError(
                    f"a redistribution with async_op=True waits for ranks {ranks}, which did not "
                    f"all make it within {self.timeout}."
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def _digest(ranks: object) -> str:
    return sha256(str(ranks).encode()).hexdigest()[:32]


class _Here(threading.local):
    """What holds in this thread alone."""

    lane: Lane | None = None
    nbytes: int | None = None
    rehearsing = False


here = _Here()


@contextmanager
def using(nbytes: int) -> Iterator[None]:
    """Let the collectives of this thread use buffers of at most `nbytes`."""
    before, here.nbytes = here.nbytes, nbytes
    try:
        yield
    finally:
        here.nbytes = before


@contextmanager
def rehearsing() -> Iterator[None]:
    """Let the collectives of this thread be reported and not run."""
    here.rehearsing = True
    try:
        yield
    finally:
        here.rehearsing = False
