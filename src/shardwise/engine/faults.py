"""What a rank does when another one fails: it raises at its next collective instead of hanging.

An error in values, such as an index out of range, happens on one rank alone. That rank leaves a
note in the store that all processes share; a rank that waits long for a collective looks there.
"""

from __future__ import annotations

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


def wait_pairs(works: Sequence[Any]) -> None:
    """Wait for messages between pairs of ranks.

    gloo closes the connection if such a wait is given up, so a rank cannot look in between: it
    hears of a failure when the backend's own time is over, or when the other process ends.
    """
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            _look(error)
            raise


def _look(error: RuntimeError) -> None:
    """Raise if another rank has left a note."""
    store = shared_store()
    if store.check([_KEY]):
        text = store.get(_KEY).decode()
        raise CommunicationError(f"a collective cannot finish: {text}.") from error
