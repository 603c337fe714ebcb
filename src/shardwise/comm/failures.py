"""Failures: a rank that fails tells the others, which raise instead of waiting for it.

Each rank has one note in the store that all processes share. It says

- which error ended the rank's program, if one did (`sys.excepthook`),
- or in how many calls on each mesh the rank failed so far. An error in values, such as an index out
  of range, may be one rank's alone. A program that catches it goes on if all ranks of the mesh
  failed as often; otherwise the ranks are not in step, and those that failed raise at their next
  collective as the others do.

A rank that waits reads the notes every two seconds. If the backend says that a connection was
closed, it finds out whose process has ended, and writes the note on behalf of that rank: whoever
comes later names the same rank, and not one that ended because of it.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

from .._torch import ends_a_checkpoint, gloo_timeout
from ..errors import CommunicationError, OutOfRangeError, ShardwiseError
from ..layout.mesh import Topology
from ..layout.user_line import user_line
from ..layout.world import World, at_end, at_start, known_world, refuse_forked

__all__ = ["TICK", "PairWork", "clear", "raise_if_peer_failed", "report", "under_way", "wait"]

TICK = timedelta(seconds=2)
"""How long a rank waits before it reads the notes."""
_DRAIN = 30.0
"""How many seconds a process that ends waits for others to take what it has sent them."""
_PATIENCE = 5.0
"""How many seconds the process that has the store waits for others to read the notes."""

Counts = dict[str, int]
"""How often a rank has failed on each mesh, by the mesh's ranks."""


class _Own:
    """What this rank has said of itself."""

    counts: ClassVar[Counts] = {}
    unsettled: ClassVar[set[str]] = set()  # meshes on which others may not have failed as often
    text = ""
    order = 0
    ended = False
    knows = False  # of a failure, its own or another's


# --- telling -------------------------------------------------------------------------------------


def report(error: BaseException, topology: Topology) -> None:
    """Note that this rank failed in a call on a mesh.

    Other errors of the library than those in values are found by all ranks alike. On other devices
    than CPUs nobody reads notes while waiting.
    """
    alike = isinstance(error, ShardwiseError) and not isinstance(error, OutOfRangeError)
    world = known_world()
    if alike or world is None or topology.world is not world or topology.device_type != "cpu":
        return
    if getattr(error, "_shardwise_reported", False) or ends_a_checkpoint(error):
        return  # reported by the call within this one that it comes from, or no error
    error._shardwise_reported = True  # type: ignore[attr-defined]
    mesh = ",".join(map(str, topology.ranks))
    _Own.counts[mesh] = _Own.counts.get(mesh, 0) + 1
    _Own.unsettled.add(mesh)
    if not _Own.text:
        _Own.text = _text(world.rank, error)
    _write_own(world)


def _report_end(error: BaseException) -> None:
    """Note that an error ends this rank's program, unless it is the consequence of another's."""
    world = known_world()
    if world is None or not world.is_current():
        return
    _Own.knows = True
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "_shardwise_consequence", False):
            return
        cause = cause.__cause__ or cause.__context__
    _Own.ended, _Own.text = True, _text(world.rank, error)
    _write_own(world)


def _text(rank: int, error: BaseException) -> str:
    return f"rank {rank} failed: {type(error).__name__}: {error}"[:2000]


def _write_own(world: World) -> None:
    try:
        _Own.order = _Own.order or world.store.add(world.key("notes"), 1)
        note = {"order": _Own.order, "ended": _Own.ended, "text": _Own.text, "counts": _Own.counts}
        world.store.set(world.key("note", world.rank), json.dumps(note))
    except RuntimeError:
        return  # the store is gone, and with it the process that had it: all hear of that


def _note_gone(world: World, rank: int) -> None:
    """Note on behalf of a rank that its process has ended."""
    text = (
        f"rank {rank} is gone: its process has ended or destroyed its process group. What ended it "
        "is in its own output"
    )
    note = {"order": world.store.add(world.key("notes"), 1), "ended": True, "text": text}
    world.store.compare_set(world.key("note", rank), "", json.dumps({**note, "counts": {}}))
    if not json.loads(world.store.get(world.key("note", rank)))["text"]:  # it was settled before
        world.store.set(world.key("note", rank), json.dumps({**note, "counts": {}}))


# --- hearing -------------------------------------------------------------------------------------


def raise_if_peer_failed(cause: BaseException | None = None) -> None:
    """Raise if another rank has failed where this one did not."""
    refuse_forked()
    world = known_world()
    if world is None or not world.is_current():
        return
    try:
        found = _first_failure(world)
        if found is not None:
            for rank in {world.rank, found[0]}:
                world.store.set(world.key("apart", rank), "")
    except RuntimeError as gone:
        _raise_store_gone(world, cause or gone)
    if found is not None:
        _raise(f"a collective cannot finish: {found[1].rstrip('.')}.", cause)


def _raise(text: str, cause: BaseException | None) -> NoReturn:
    """Raise what is the consequence of another rank's failure."""
    _Own.knows = True
    error = CommunicationError(text)
    error._shardwise_consequence = True  # type: ignore[attr-defined]
    raise error from cause


def _notes(world: World) -> dict[int, dict[str, Any]]:
    if world.store.add(world.key("notes"), 0) == 0:
        return {}
    keys = {rank: world.key("note", rank) for rank in range(world.size)}
    there = {rank: key for rank, key in keys.items() if world.store.check([key])}
    return {rank: json.loads(world.store.get(key)) for rank, key in there.items()}


def _first_failure(world: World) -> tuple[int, str] | None:
    """The first rank that failed where another one did not, and its text."""
    notes = _notes(world)
    counts = {rank: note["counts"] for rank, note in notes.items()}
    counts[world.rank] = _Own.counts
    for rank, note in sorted(notes.items(), key=lambda item: item[1]["order"]):
        if rank == world.rank or not note["text"]:
            continue
        if note["ended"] or _is_apart(world.rank, note["counts"], counts):
            return rank, note["text"]
    return None


def _is_apart(me: int, failed: Counts, counts: dict[int, Counts]) -> bool:
    """Whether some rank of a mesh has failed less often than one that has `failed`: this rank, or
    any if it is not on the mesh."""
    for mesh, count in failed.items():
        ranks = list(map(int, mesh.split(",")))
        for rank in (me,) if me in ranks else ranks:
            if counts.get(rank, {}).get(mesh, 0) < count:
                return True
    return False


def _raise_store_gone(world: World, cause: BaseException) -> NoReturn:
    """Raise when the store cannot be asked any more: the process that had it has ended."""
    text = world.received()  # if it ended because of another, it has left word of that
    gone = _gone(world, range(world.size))
    if text is not None:
        who = text.rstrip(".")
    elif _is_in_first_rank() and 0 in gone:
        who = "rank 0 is gone: its process has ended, and with it the store. See its own output"
    elif gone:
        names = ", ".join(map(str, gone))
        who = f"the store of torch.distributed is gone, and so are ranks {names}. See their output"
    else:
        who = "the process that has the store of torch.distributed has ended. See its own output"
    _raise(f"a collective cannot finish: {who}.", cause)


def _is_in_first_rank() -> bool:
    """Whether rank 0 has the store, and not the agent of torchrun."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _gone(world: World, ranks: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if rank != world.rank and world.is_gone(rank)]


def _explain(error: RuntimeError, ranks: Sequence[int]) -> NoReturn:
    """Raise for a collective among `ranks` that the backend gave up: say which rank failed."""
    world = known_world()
    if world is None or not world.is_current():
        raise error
    end = time.monotonic() + TICK.total_seconds()
    while True:
        raise_if_peer_failed(error)
        gone = _gone(world, ranks)
        if gone:
            raise_if_peer_failed(error)  # one of them may have ended because of the other
            try:
                for rank in gone:
                    _note_gone(world, rank)
            except RuntimeError as lost:
                _raise_store_gone(world, lost)
            if len(gone) == 1:
                raise_if_peer_failed(error)
            names = ", ".join(map(str, gone))
            _raise(
                f"a collective cannot finish: ranks {names} are gone: their processes have ended "
                "or destroyed their process groups. What ended them is in their own output.",
                error,
            )
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    names = ", ".join(map(str, ranks))
    _raise(
        f"a collective among ranks {names} failed at {user_line()}: {str(error).rstrip('.')}. All "
        "of their processes live, and none has told of an error. If it is a timeout, some may not "
        "have come here: shardwise.lockstep() shows which lines the ranks run.",
        error,
    )


# --- going on ------------------------------------------------------------------------------------


def clear() -> None:
    """Before a collective: go on after errors that the program has caught, if all ranks of the mesh
    had them; otherwise raise."""
    if not _Own.unsettled:
        return
    world = known_world()
    if world is None:
        return
    for mesh in sorted(_Own.unsettled):
        for rank in map(int, mesh.split(",")):
            _await_failure(world, mesh, rank)
    _Own.unsettled.clear()
    _Own.text, _Own.order = "", 0
    _write_own(world)


def _await_failure(world: World, mesh: str, rank: int) -> None:
    """Wait until another rank has failed as often on a mesh; raise if one has heard that this one
    failed, or raised because of somebody's error."""
    pause, end = 0.001, time.monotonic() + gloo_timeout().total_seconds()
    key = world.key("note", rank)
    while rank != world.rank:
        try:
            if world.store.check([key]):
                note = json.loads(world.store.get(key))
                if note["counts"].get(mesh, 0) >= _Own.counts[mesh]:
                    return
                if note["ended"]:
                    raise_if_peer_failed()
            apart = any(world.store.check([world.key("apart", r)]) for r in (world.rank, rank))
        except RuntimeError as gone:
            if isinstance(gone, CommunicationError):
                raise
            _raise_store_gone(world, gone)
        if apart or time.monotonic() > end or (pause >= 0.05 and world.is_gone(rank)):
            world.store.set(world.key("apart", world.rank), "")
            _raise(
                f"a call failed on this rank and not on rank {rank}. The program caught the error "
                "here and went on, but the others have results of the call and use them, so the "
                "ranks are not in step any more. Let the error end the program, or find out on "
                "all ranks whether the values are right before the call.",
                None,
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


# --- waiting -------------------------------------------------------------------------------------


_works: dict[int, Any] = {}
"""The collectives that have not been waited for, by id: others need this rank's part of them."""


def under_way(work: Any) -> Any:
    """Remember a collective that was started, so that the process does its part before it ends."""
    for key, each in list(_works.items()):
        if each.is_completed():
            _works.pop(key, None)
    if work is not None:
        _works[id(work)] = work
    return work


def wait(work: Any, ranks: Sequence[int], on_cpu: bool) -> None:
    """Wait for a collective among `ranks`; raise if one of them has failed."""
    if work is None:
        return
    refuse_forked()
    if not on_cpu:
        work.wait()
        _works.pop(id(work), None)
        return
    try:
        while not _ended(work):
            raise_if_peer_failed()
    except RuntimeError as error:
        if isinstance(error, ShardwiseError):
            raise
        _explain(error, ranks)
    _works.pop(id(work), None)


def _ended(work: Any) -> bool:
    """Wait for a collective; False if it is still under way after a while."""
    try:
        work.wait(TICK)
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        if not work.is_completed():
            return False
        work.wait()  # it ended just now, well or badly
    return True


class PairWork:
    """Messages between pairs of ranks as one `Work`.

    gloo closes the connection if a wait for one of them is given up. So a thread waits to the end.
    If a rank has failed the thread is left behind: what it waits for will not come, and it ends
    with the process.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._wait_for_all, name="shardwise-wait", daemon=True).start()

    def _wait_for_all(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        finally:
            self._works = ()
            self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """As that of a `Work`."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the wait timed out")
        if self._error is not None:
            raise self._error


# --- the life of a world -------------------------------------------------------------------------


class _Hook:
    """Our `sys.excepthook`, and the one that was there before."""

    ours: Any = None
    before: Any = None


@at_start
def _install(world: World) -> None:
    _reset()
    before = sys.excepthook

    def on_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        try:
            if _Hook.ours is on_uncaught:  # else it is left in the chain of another's hook
                _report_end(error)
        finally:
            before(kind, error, trace)

    _Hook.ours, _Hook.before, sys.excepthook = on_uncaught, before, on_uncaught
    atexit.register(_leave)


@at_end
def _remove(world: World) -> None:
    if world.is_current():
        _drain()
    _works.clear()
    _reset()
    if sys.excepthook is _Hook.ours:
        sys.excepthook = _Hook.before
    _Hook.ours = _Hook.before = None
    atexit.unregister(_leave)


def _reset() -> None:
    _Own.counts, _Own.unsettled = {}, set()
    _Own.text, _Own.order, _Own.ended, _Own.knows = "", 0, False, False


def _drain() -> None:
    """Wait until others have what this rank has sent them, unless a rank has failed."""
    end = time.monotonic() + _DRAIN
    try:
        for work in list(_works.values()):
            while not _Own.knows and not _ended(work):
                raise_if_peer_failed()
                if time.monotonic() > end:
                    print(
                        "shardwise: this process ends before a redistribution with async_op=True "
                        f"is done: for {_DRAIN:g} seconds other ranks have not taken it.",
                        file=sys.stderr,
                    )
                    return
    except RuntimeError:
        return  # the others hear of it where they wait


def _leave() -> None:
    """At the end of a process: do its part of what is under way. If it knows of a failure and has
    the store, let others read it, and leave word with those that have not come to it in time."""
    world = known_world()
    if world is None:
        return
    _drain()
    if world.rank or not _is_in_first_rank() or not _Own.knows:
        return
    end = time.monotonic() + _PATIENCE
    waiting = list(range(1, world.size))
    try:
        while waiting and time.monotonic() < end:
            time.sleep(0.05)
            waiting = [rank for rank in waiting if not _has_heard(world, rank)]
        found = _first_failure(world)
    except RuntimeError:
        return
    for rank in waiting:
        world.send(rank, _Own.text if found is None else found[1])


def _has_heard(world: World, rank: int) -> bool:
    """Whether a rank has raised, told of an error itself, or ended."""
    if world.store.check([world.key("apart", rank)]):
        return True
    return world.is_gone(rank)
