"""What a rank does when another one fails: it raises at its next collective instead of hanging.

An error in values, such as an index out of range, happens on one rank alone. That rank leaves a
note in the store that all processes share; a rank that waits long for a collective looks there.

A program may catch an error and go on. If all ranks of the mesh had one in the same call, as they
have of an index that all of them hold, they are still in step. Else those that had none come to a
collective that was meant for the results of the call: they must hear of the error all the same,
and the ranks that went on raise with them. So each rank counts its failures on a mesh, and one that
goes on first waits until the others have failed as often as it has.
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
"""How many ranks have left a note that stands."""
_HEARD = f"{_KEY}/heard"
"""How often a rank has raised because of another's note."""
LOOK_AFTER = timedelta(seconds=2)


class _Told:
    """The meshes on which this rank has failed since it last talked, and what it had heard then."""

    meshes: tuple[tuple[int, ...], ...] = ()
    heard = 0


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
    try:
        store = shared_store()
        count = store.add(_count_key(ranks, me), 1)
        if not _Told.meshes:
            _Told.heard = store.add(_HEARD, 0)
            text = f"rank {me} failed: {type(error).__name__}: {error}"
            store.set(f"{_KEY}/{me}", f"{','.join(map(str, ranks))}\n{count}\n{text[:2000]}")
            store.add(_STANDING, 1)
    except RuntimeError:
        return  # the store is gone, and with it the process that had it: all hear of that
    if ranks not in _Told.meshes:
        _Told.meshes = (*_Told.meshes, ranks)


def _count_key(ranks: Sequence[int], rank: int) -> str:
    """Where a rank counts its failures on a mesh of these ranks."""
    return f"{_KEY}/{sha256(str(tuple(ranks)).encode()).hexdigest()[:32]}/{rank}"


def leave_note(lane: Lane, error: BaseException) -> None:
    """As `tell`, for what ran in the background. This note stays: its groups are of no more use."""
    text = f"rank {lane.rank} failed in the background: {type(error).__name__}: {error}"
    try:
        lane.store.set(_key_of(lane), text[:2000])
    except RuntimeError:
        return  # the store is gone, and with it the process that had it: all hear of that


def note_stands(lane: Lane) -> bool:
    """Whether some rank has failed and does not go on."""
    try:
        return bool(lane.store.add(_STANDING, 0) > 0 or lane.store.check([_key_of(lane)]))
    except RuntimeError:
        return True  # the store is gone, and with it the process that had it


def _key_of(lane: Lane) -> str:
    return f"{lane.name}/fault"


def forgive() -> None:
    """Take the note back if the program caught the error and goes on, on every rank that ran the
    call; raise if some of them had no error."""
    if not _Told.meshes or here.lane is not None:
        return
    store, me = shared_store(), dist.get_rank()
    for ranks in _Told.meshes:
        own = store.add(_count_key(ranks, me), 0)
        for rank in ranks:
            _await_failure(store, _count_key(ranks, rank), own, rank)
    _Told.meshes = ()
    if store.delete_key(f"{_KEY}/{me}"):
        store.add(_STANDING, -1)


def _await_failure(store: Any, key: str, count: int, rank: int) -> None:
    """Wait until another rank has failed as often; raise if it heard of this one's error."""
    pause, start = 0.001, time.monotonic()
    while store.add(key, 0) < count:
        late = time.monotonic() - start > gloo_timeout().total_seconds()
        if late or store.add(_HEARD, 0) > _Told.heard:
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
        text = _note()
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


def _note() -> str | None:
    """The note of a rank that failed where this one did not."""
    if here.lane is not None:
        key = _key_of(here.lane)
        return here.lane.store.get(key).decode() if here.lane.store.check([key]) else None
    if not dist.is_initialized():
        return None
    store, me = shared_store(), dist.get_rank()
    if store.add(_STANDING, 0) <= 0:
        return None
    for rank in range(dist.get_world_size()):
        if not store.check([f"{_KEY}/{rank}"]):
            continue
        mesh, count, text = store.get(f"{_KEY}/{rank}").decode().split("\n", 2)
        ranks = tuple(map(int, mesh.split(","))) if mesh else ()
        asked = () if me not in ranks else ranks if rank == me else (me,)
        if asked and all(store.add(_count_key(ranks, r), 0) >= int(count) for r in asked):
            continue  # both had the error: both go on
        store.add(_HEARD, 1)
        return str(text)
    return None
