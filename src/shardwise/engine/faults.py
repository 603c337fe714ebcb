"""What a rank does when another one fails: it raises at its next collective instead of hanging.

An error in values, such as an index out of range, happens on one rank alone. That rank leaves a
note in the store that all processes share; a rank that waits long for a collective looks there.

A program may catch an error and go on. If all ranks of the mesh had one in the same call, as they
have of an index that all of them hold, they are still in step. Else those that had none come to a
collective that was meant for the results of the call: they must hear of the error all the same,
and the ranks that went on raise with them. So each rank counts its failures on a mesh, and one that
goes on first waits until the others have failed as often as it has. Of each failure there is a note
until then: the ranks may have had the first one alike and not the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from .._torch import ends_a_checkpoint, gloo_timeout, shared_store
from ..errors import CommunicationError, OutOfRangeError, ShardwiseError
from ..mesh import Topology
from .lane import Lane, here

__all__ = [
    "LOOK_AFTER",
    "forgive",
    "leave_note",
    "look",
    "note_stands",
    "tell",
    "wait",
    "wait_pairs",
]

_KEY = "shardwise/fault"
_STANDING = f"{_KEY}/standing"
"""How many notes stand."""
LOOK_AFTER = timedelta(seconds=2)


class _Told:
    """How often this rank has failed since it last talked, and on which meshes."""

    notes = 0
    meshes: tuple[tuple[int, ...], ...] = ()


def tell(error: BaseException, topology: Topology) -> None:
    """Leave a note that this rank failed in a call on a mesh.

    Errors of the library are found by all ranks alike, but for those in values.
    """
    alike = isinstance(error, ShardwiseError) and not isinstance(error, OutOfRangeError)
    if alike or topology.virtual or not dist.is_initialized():
        return
    if getattr(error, "_shardwise_told", False) or ends_a_checkpoint(error):
        return  # told by the call within this one that it comes from, or no error
    error._shardwise_told = True  # type: ignore[attr-defined]
    me = dist.get_rank()
    # Elsewhere nobody looks for notes, so nobody would answer to one.
    ranks = topology.ranks if topology.device_type == "cpu" else ()
    text = f"rank {me} failed: {type(error).__name__}: {error}"[:2000]
    try:
        store = shared_store()
        count = store.add(_count_key(ranks, me), 1)
        note = f"{','.join(map(str, ranks))}\n{count}\n{text}"
        store.set(f"{_notes_key(me)}/{_Told.notes}", note)
        store.add(_notes_key(me), 1)
        store.add(_STANDING, 1)
    except RuntimeError:
        return  # the store is gone, and with it the process that had it: all hear of that
    _Told.notes += 1
    if ranks not in _Told.meshes:
        _Told.meshes = (*_Told.meshes, ranks)


def _notes_key(rank: int) -> str:
    """Where a rank counts its notes that stand; the notes are below. None is ever deleted, because
    a rank that looks for what was there a moment ago would wait for it."""
    return f"{_KEY}/notes/{rank}"


def _count_key(ranks: Sequence[int], rank: int) -> str:
    """Where a rank counts its failures on a mesh of these ranks."""
    return f"{_KEY}/{sha256(str(tuple(ranks)).encode()).hexdigest()[:32]}/{rank}"


def _apart_key(rank: int) -> str:
    """Set when a rank has raised because another failed, or another because it did: it is not in
    step with all others any more."""
    return f"{_KEY}/apart/{rank}"


def leave_note(lane: Lane, error: BaseException) -> None:
    """As `tell`, for what ran in the background. This note stays: its groups are of no more use."""
    text = f"rank {lane.rank} failed in the background: {type(error).__name__}: {error}"
    try:
        lane.store.set(_key_of(lane), text[:2000])
    except RuntimeError:
        return  # the store is gone, and with it the process that had it: all hear of that


def note_stands(lane: Lane) -> bool:
    """Whether some rank has failed where this one did not."""
    try:
        found = _note(lane.store, lane.rank, lane.size)
        return found is not None or bool(lane.store.check([_key_of(lane)]))
    except RuntimeError:
        return True  # the store is gone, and with it the process that had it


def _key_of(lane: Lane) -> str:
    return f"{lane.name}/fault"


def forgive() -> None:
    """Take the notes back if the program caught the errors and goes on, on every rank that ran the
    calls; raise if some of them had no error."""
    if not _Told.notes or here.lane is not None:
        return
    store, me = shared_store(), dist.get_rank()
    for ranks in _Told.meshes:
        own = store.add(_count_key(ranks, me), 0)
        for rank in ranks:
            _await_failure(store, _count_key(ranks, rank), own, rank)
    store.add(_notes_key(me), -_Told.notes)
    store.add(_STANDING, -_Told.notes)
    _Told.notes, _Told.meshes = 0, ()


def _await_failure(store: Any, key: str, count: int, rank: int) -> None:
    """Wait until another rank has failed as often; raise if one has heard that this one failed, or
    that one raised because of somebody's error."""
    me = dist.get_rank()
    pause, start = 0.001, time.monotonic()
    while store.add(key, 0) < count:
        late = time.monotonic() - start > gloo_timeout().total_seconds()
        if late or any(store.check([_apart_key(each)]) for each in (me, rank)):
            store.set(_apart_key(me), "")
            raise CommunicationError(
                f"a call failed on this rank and not on rank {rank}. The program caught the error "
                "here and went on, but the others have results of the call and use them, so the "
                "ranks are not in step any more. Let the error end the program, or find out on "
                "all ranks whether the values are right before the call."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def wait(work: Any, on_cpu: bool) -> None:
    """Wait for a collective; raise if meanwhile another rank has failed."""
    if work is None:
        return
    while on_cpu:
        try:
            work.wait(LOOK_AFTER)
            if here.lane is not None:
                here.lane.finished += 1
            return
        except RuntimeError as error:
            if here.lane is not None:
                here.lane.park()
            look(error)
            if "timed out" not in str(error).lower():
                raise
            if work.is_completed():  # it ended just now, well or badly: the next wait tells
                break
    work.wait()


def wait_pairs(works: Sequence[Any], on_cpu: bool) -> None:
    """Wait for messages between pairs of ranks; raise if meanwhile another rank has failed.

    gloo closes the connection if such a wait is given up. So another thread waits to the end, and
    this one looks for notes. If there is one the thread is left behind: what it waits for will not
    come, and it ends with the process.
    """
    if not on_cpu:
        for work in works:
            work.wait()
        return
    done, failures = threading.Event(), []

    def wait_for_all() -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=wait_for_all, name="shardwise-wait", daemon=True).start()
    while not done.wait(LOOK_AFTER.total_seconds()):
        look(None)
    if failures:
        look(failures[0])
        raise failures[0]


def look(error: RuntimeError | None) -> None:
    """Raise if another rank has left a note: in the background one of those that were left there,
    for what a rank has called before it failed is run all the same."""
    try:
        text = _heard()
    except RuntimeError as gone:
        if isinstance(gone, CommunicationError):
            raise
        raise CommunicationError(
            "a collective cannot finish: the process that has the store of torch.distributed has "
            "ended. What ended it is in its own output."
        ) from (error or gone)
    if text is not None:
        reason = text.rstrip(".")
        raise CommunicationError(f"a collective cannot finish: {reason}.") from error


def _heard() -> str | None:
    """What there is to hear of another rank that failed."""
    if here.lane is not None:
        key = _key_of(here.lane)
        return here.lane.store.get(key).decode() if here.lane.store.check([key]) else None
    if not dist.is_initialized():
        return None
    store, me = shared_store(), dist.get_rank()
    found = _note(store, me, dist.get_world_size())
    if found is None:
        return None
    rank, text = found
    for each in {me, rank}:
        store.set(_apart_key(each), "")
    return text


def _note(store: Any, me: int, size: int) -> tuple[int, str] | None:
    """A rank that failed where another one did not, and its note."""
    if store.add(_STANDING, 0) <= 0:
        return None
    for rank in range(size):
        for index in range(store.add(_notes_key(rank), 0)):
            note = store.get(f"{_notes_key(rank)}/{index}").decode()
            mesh, count, text = note.split("\n", 2)
            ranks = tuple(map(int, mesh.split(","))) if mesh else ()
            if _is_apart(store, me, rank, ranks, int(count)):
                return rank, text
    return None


def _is_apart(store: Any, me: int, rank: int, ranks: tuple[int, ...], count: int) -> bool:
    """Whether a failure of `rank` means that it and this rank are not in step."""
    if rank == me:  # the others may still be on their way to theirs
        return bool(store.check([_apart_key(me)]))
    asked = (me,) if me in ranks else ranks
    return not asked or any(store.add(_count_key(ranks, each), 0) < count for each in asked)
