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

__all__ = ["forgive", "tell", "wait", "wait_pairs"]

_KEY = "shardwise/fault"
_LOOK_AFTER = timedelta(seconds=2)


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


def forgive() -> None:
    """Take the note back: the program caught the error and goes on."""
    if _Told.note:
        shared_store().delete_key(_KEY)
        _Told.note = False


def wait(work: Any, on_cpu: bool) -> None:
    """Wait for a collective; raise if meanwhile another rank has failed."""
    if work is None:
        return
    while on_cpu:
        try:
            work.wait(_LOOK_AFTER)
            return
        except RuntimeError as error:
            _look(error)
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
    while not done.wait(_LOOK_AFTER.total_seconds()):
        _look(None)
    if failures:
        _look(failures[0])
        raise failures[0]


def _look(error: RuntimeError | None) -> None:
    """Raise if another rank has left a note."""
    store = shared_store()
    if store.check([_KEY]):
        text = store.get(_KEY).decode()
        raise CommunicationError(f"a collective cannot finish: {text}.") from error
