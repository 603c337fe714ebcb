"""Flights: redistributions that threads of the background run.

Every rank of a mesh calls those on it in the same order, and a thread runs them one after another,
so that the background of each rank runs the same collectives in the same order, whatever the
program does meanwhile. Moves between other meshes have other threads: ranks that are on several
need not call all of them in one order. A thread lives while there is something to do. A flight that
nobody waits for is flown to its end all the same: others need it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from .._torch import never_free
from ..errors import CommunicationError, ShardwiseError
from .buffer import buffer_size
from .faults import LOOK_AFTER, leave_note, look, note_stands
from .lane import Ends, Lane, here, using
from .protocol import Locals

__all__ = ["Seat", "fly", "in_flight", "is_idle", "settle"]

Work = Callable[[], Iterable[Callable[[], Locals]]]
"""Starts something, and gives what waits for each of its results."""

_PATIENCE = 30.0
"""How many seconds a process that ends waits for others that do nothing."""

in_flight: list[Flight] = []
"""The flights that have not landed."""


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
    """Some work in the background, which reads some memory and fills some seats.

    What `copies` has read all of it once it is under way.
    """

    __slots__ = (
        "_copies", "_done", "_has_read", "_inference", "_nbytes", "_seats", "_work", "error",
        "reads",
    )  # fmt: skip

    def __init__(self, work: Work, reads: frozenset[int], copies: bool) -> None:
        self.reads = reads
        self.error: BaseException | None = None
        self._work: Work | None = work
        self._copies = copies
        self._seats: list[weakref.ref[Seat]] = []
        self._done, self._has_read = threading.Event(), threading.Event()
        self._nbytes = buffer_size()
        self._inference = torch.is_inference_mode_enabled()

    def seat(self) -> Seat:
        """A place for one more of the results."""
        made = Seat(self)
        self._seats.append(weakref.ref(made))
        return made

    def wait(self) -> None:
        """Wait for the end, be it good or bad; raise if another rank failed before it called."""
        _wait(self._done)

    def wait_until_read(self) -> None:
        """Wait until what it reads may be written."""
        _wait(self._has_read)

    def call_off(self, why: str) -> None:
        """Let those who want what it makes hear that it does not arrive."""
        self.error = CommunicationError(f"a redistribution with async_op=True is lost: {why}.")
        # The locks of the old ones may be held by a thread.
        self._done, self._has_read = threading.Event(), threading.Event()
        self._has_read.set()
        self._done.set()

    def run(self, runway: _Runway) -> None:
        """Do the work; its errors are for those who want what it makes."""
        try:
            if runway.broken is not None:
                raise CommunicationError(
                    f"a redistribution with async_op=True failed: {runway.broken}. No other one "
                    "can run in the background after that."
                )
            with torch.inference_mode(self._inference), torch.no_grad(), using(self._nbytes):
                for ready, seat in zip(self._started(), self._seats, strict=True):
                    made = ready()
                    if (taken := seat()) is not None:
                        taken.made = made
        except BaseException as error:  # whatever it is, who waits must hear of it
            self.error = error
            runway.fail(error)
        finally:
            self._work = None
            in_flight.remove(self)
            self._has_read.set()
            self._done.set()

    def _started(self) -> Iterable[Callable[[], Locals]]:
        assert self._work is not None
        ready = self._work()
        if self._copies:
            self._work, self.reads = None, frozenset()
            self._has_read.set()
        return ready


def _wait(event: threading.Event) -> None:
    while not event.wait(LOOK_AFTER.total_seconds()):
        look(None)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


class _Runway(Lane):
    """A lane and its queue. The thread that serves it ends when there is nothing left."""

    def __init__(self, ends: Ends) -> None:
        super().__init__(ends)
        self.broken: str | None = None
        self._queue: deque[Flight] = deque()
        self._lock = threading.Lock()
        self._served = False
        self._thread = threading.Thread()

    def add(self, flight: Flight) -> None:
        with self._lock:
            in_flight.append(flight)
            self._queue.append(flight)
            if not self._served:
                self._served = True
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
            self._served = False
            if dist.group.WORLD is not self.world:
                self.groups.clear()
            return None

    def is_idle(self) -> bool:
        """Whether it has nothing to do."""
        with self._lock:
            return not self._served

    def fail(self, error: BaseException) -> None:
        """After an error that other ranks need not have the groups are not in step any more."""
        alike = isinstance(error, ShardwiseError) and not isinstance(error, CommunicationError)
        if not alike and self.broken is None:
            self.broken = _told(error)
            for group in self.groups.values():
                never_free(group)
            if not isinstance(error, CommunicationError):
                leave_note(self, error)

    def is_busy(self) -> bool:
        """Whether its thread lives: one that frees a group while Python ends would abort it."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Let the thread end, or at least stop; see `park`."""
        self.closing = True
        end = time.monotonic() + 5
        while self.is_busy() and time.monotonic() < end:
            if self.parked.wait(0.05):
                return
        if not self.is_busy():
            self.groups.clear()


class _Airport:
    """The runways of the world that there is now, and those of former ones that are still busy."""

    world: Any = None
    runways: ClassVar[dict[Ends, _Runway]] = {}
    former: ClassVar[list[_Runway]] = []

    @classmethod
    def every(cls) -> list[_Runway]:
        return [*cls.runways.values(), *cls.former]


def fly(
    ends: Ends, work: Work, local: Sequence[torch.Tensor], count: int, *, copies: bool
) -> list[Seat]:
    """Run `work` in the background, after what was given to it before for the same `ends`; it has
    `count` results.

    All ranks that take part give it the same, in the same order. It reads `local`, until it ends or
    if it `copies` until it is under way. Nobody may write that before; see `settle`.
    """
    runway = _runway(ends)
    flight = Flight(work, frozenset(_memory(local)), copies)
    seats = [flight.seat() for _ in range(count)]
    runway.add(flight)
    return seats


def is_idle(ends: Ends) -> bool:
    """Whether nothing runs or waits in the background for these `ends`."""
    return _runway(ends).is_idle()


def _runway(ends: Ends) -> _Runway:
    if _Airport.world is not dist.group.WORLD:
        if _Airport.world is None:
            atexit.register(_leave)
        _Airport.world = dist.group.WORLD
        _Airport.former[:] = [runway for runway in _Airport.every() if runway.is_busy()]
        _Airport.runways.clear()
    runway = _Airport.runways.get(ends)
    if runway is None:
        runway = _Airport.runways[ends] = _Runway(ends)
    return runway


def settle(local: Sequence[torch.Tensor]) -> None:
    """Wait for the flights that read this memory: it is about to be written, or handed out."""
    memory = _memory(local)
    for flight in tuple(in_flight):
        if not flight.reads.isdisjoint(memory):
            flight.wait_until_read()


def _memory(local: Sequence[torch.Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in local} - {0}


def _leave() -> None:
    """At the end of the program: others may still wait for this rank's part of a flight.

    Not so after an error that nobody caught: the others must hear of it by the end of this process.
    """
    runways = _Airport.every()
    if getattr(sys, "last_value", None) is None:
        _drain(runways)
    for runway in runways:
        runway.closing = True
    for runway in runways:
        runway.close()


def _drain(runways: Sequence[_Runway]) -> None:
    """Wait until nothing is left to do, or for nothing but ranks that do nothing."""
    seen, since = -1, time.monotonic()
    while busy := [runway for runway in runways if runway.is_busy()]:
        time.sleep(0.05)
        finished = sum([runway.finished for runway in runways])
        if finished != seen:
            seen, since = finished, time.monotonic()
        elif all(map(note_stands, busy)):
            return
        elif time.monotonic() - since > _PATIENCE:
            print(
                "shardwise: this process ends before a redistribution with async_op=True is "
                f"done: for {_PATIENCE:g} seconds other ranks have sent nothing.",
                file=sys.stderr,
            )
            return


def _after_fork() -> None:
    """A child has the memory and none of the threads: what is in flight does not arrive there, and
    reads nothing there."""
    for flight in in_flight:
        flight.call_off("this process was forked while it was under way")
    in_flight.clear()
    for runway in _Airport.every():
        for group in runway.groups.values():
            never_free(group)  # its threads are those of the parent
    _Airport.runways.clear()
    _Airport.former.clear()


os.register_at_fork(after_in_child=_after_fork)
