"""Flights: redistributions that a thread of the background runs, one after another as called.

Every rank of a mesh calls them in the same order, so the background of each runs the same
collectives in the same order, whatever the program does meanwhile. The thread lives while there is
something to do. A flight that nobody waits for is flown to its end all the same: others need it.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from .._torch import never_free
from ..errors import CommunicationError, ShardwiseError
from .buffer import buffer_size
from .faults import LOOK_AFTER, leave_note, look, note_stands
from .lane import Lane, here, using
from .protocol import Locals

__all__ = ["Seat", "fly", "in_flight", "settle"]

Work = Callable[[], Iterable[Locals]]

_PATIENCE = 30.0
"""How many seconds a process that ends waits for others that do nothing."""

in_flight: list[Flight] = []
"""The flights that may still read their sources."""


class Seat:
    """What a flight makes for one tensor. Nobody else holds it: it goes with the tensor."""

    __slots__ = ("__weakref__", "_flight", "made")

    def __init__(self, flight: Flight) -> None:
        self._flight: Flight = flight
        self.made: Locals = ()

    def take(self) -> tuple[torch.Tensor, ...]:
        """The local tensors, after a wait; an error if the flight failed."""
        self._flight.wait()
        error = self._flight.error
        if isinstance(error, ShardwiseError):
            raise error
        if error is not None:
            raise CommunicationError(
                f"a redistribution with async_op=True failed: {_told(error)}."
            ) from error
        return tuple(self.made)


class Flight:
    """Some work in the background, which reads some memory and fills some seats."""

    __slots__ = ("_done", "_inference", "_nbytes", "_seats", "_work", "error", "reads")

    def __init__(self, work: Work, reads: frozenset[int]) -> None:
        self.reads = reads
        self.error: BaseException | None = None
        self._work: Work | None = work
        self._seats: list[weakref.ref[Seat]] = []
        self._done = threading.Event()
        self._nbytes = buffer_size()
        self._inference = torch.is_inference_mode_enabled()

    def seat(self) -> Seat:
        """A place for one more of the results."""
        made = Seat(self)
        self._seats.append(weakref.ref(made))
        return made

    def wait(self) -> None:
        """Wait for the end, be it good or bad; raise if another rank failed before it called."""
        while not self._done.wait(LOOK_AFTER.total_seconds()):
            look(None)

    def run(self, runway: _Runway) -> None:
        """Do the work; its errors are for those who want what it makes."""
        assert self._work is not None
        try:
            if runway.broken is not None:
                raise CommunicationError(
                    f"a redistribution with async_op=True failed: {runway.broken}. No other one "
                    "can run in the background after that."
                )
            with torch.inference_mode(self._inference), torch.no_grad(), using(self._nbytes):
                for made, seat in zip(self._work(), self._seats, strict=True):
                    if (taken := seat()) is not None:
                        taken.made = made
        except BaseException as error:  # whatever it is, who waits must hear of it
            self.error = error
            runway.fail(error)
        finally:
            self._work = None
            in_flight.remove(self)
            self._done.set()


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


class _Runway(Lane):
    """A lane and its queue. The thread that serves it ends when there is nothing left."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: str | None = None
        self._queue: deque[Flight] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, flight: Flight) -> None:
        with self._lock:
            in_flight.append(flight)
            self._queue.append(flight)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="shardwise-background", daemon=True
                )
                self._thread.start()

    def _serve(self) -> None:
        here.lane = self
        while (flight := self._next()) is not None:
            flight.run(self)
            del flight

    def _next(self) -> Flight | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._thread = None
            if dist.group.WORLD is not self.world:
                self.groups.clear()
            return None

    def fail(self, error: BaseException) -> None:
        """After an error that other ranks need not have the groups are not in step any more."""
        alike = isinstance(error, ShardwiseError) and not isinstance(error, CommunicationError)
        if not alike and self.broken is None:
            self.broken = _told(error)
            for group in self.groups.values():
                never_free(group)
            if not isinstance(error, CommunicationError):
                leave_note(self, error)

    def drain(self) -> None:
        """Wait until nothing is left to do, or for nothing but ranks that do nothing."""
        thread = self._thread
        seen, since = self.finished, time.monotonic()
        while thread is not None and thread.is_alive():
            thread.join(0.1)
            if self.finished != seen:
                seen, since = self.finished, time.monotonic()
            elif note_stands(self):
                return
            elif time.monotonic() - since > _PATIENCE:
                print(
                    "shardwise: this process ends before a redistribution with async_op=True is "
                    f"done: for {_PATIENCE:g} seconds other ranks have sent nothing.",
                    file=sys.stderr,
                )
                return

    def close(self) -> None:
        """Let the thread end, or at least stop; see `park`."""
        self.closing, thread = True, self._thread
        end = time.monotonic() + 5
        while thread is not None and thread.is_alive() and time.monotonic() < end:
            thread.join(0.05)
            if self.parked.is_set():
                return
        if thread is None or not thread.is_alive():
            self.groups.clear()


class _Airport:
    """The one runway that is in use."""

    runway: _Runway | None = None


def fly(work: Work, local: Sequence[torch.Tensor], count: int) -> list[Seat]:
    """Run `work` in the background, after what was given to it before; it has `count` results.

    All ranks that take part give it the same, in the same order. It reads `local`, which nobody may
    write before; see `settle`.
    """
    runway = _Airport.runway
    if runway is None or runway.world is not dist.group.WORLD:
        if runway is None:
            atexit.register(_leave)
        runway = _Airport.runway = _Runway()
    flight = Flight(work, frozenset(_memory(local)))
    seats = [flight.seat() for _ in range(count)]
    runway.add(flight)
    return seats


def settle(local: Sequence[torch.Tensor]) -> None:
    """Wait for the flights that read this memory: it is about to be written, or handed out."""
    memory = _memory(local)
    for flight in tuple(in_flight):
        if not flight.reads.isdisjoint(memory):
            flight.wait()


def _memory(local: Sequence[torch.Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in local} - {0}


def _leave() -> None:
    """At the end of the program: others may still wait for this rank's part of a flight.

    Not so after an error that nobody caught: the others must hear of it by the end of this process.
    """
    if _Airport.runway is not None:
        if getattr(sys, "last_value", None) is None:
            _Airport.runway.drain()
        _Airport.runway.close()
