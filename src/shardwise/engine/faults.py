"""What a rank does when another one fails: it raises at its next collective instead of hanging.

An error in values, such as an index out of range, happens on one rank alone. That rank leaves a
note in the store that all processes share; a rank that waits long for a collective looks there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .._torch import shared_store
from ..errors import CommunicationError, ShardwiseError
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
LOOK_AFTER = timedelta(seconds=2)


class _Told:
    """Whether this rank has left a note that still stands."""

    note = False


def tell(error: BaseException) -> None:
    """Leave a note that this rank failed. Errors of the library are found by all ranks alike."""
    if isinstance(error, ShardwiseError) or not dist.is_initialized():
        return
    text = f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
    shared_store().set(_KEY, text[:2000])
    _Told.note = True


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
        return any(lane.store.check([key]) for key in (_KEY, _key_of(lane)))
    except RuntimeError:
        return True  # the store is gone, and with it the process that had it


def _key_of(lane: Lane) -> str:
    return f"{lane.name}/fault"


def forgive() -> None:
    """Take the note back: the program caught the error and goes on."""
    if _Told.note and here.lane is None:
        shared_store().delete_key(_KEY)
        _Told.note = False


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
    if here.lane is not None:
        store, key = here.lane.store, _key_of(here.lane)
    elif dist.is_initialized():
        store, key = shared_store(), _KEY
    else:
        return
    if store.check([key]):
        text = store.get(key).decode()
        raise CommunicationError(f"a collective cannot finish: {text}.") from error
