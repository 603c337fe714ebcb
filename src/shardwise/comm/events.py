"""Observers: listeners get every collective, watchers every call that is planned, and choosers the
rows it could have run by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..layout.mesh import Topology

Listener = Callable[[str, Topology, tuple[int, ...], int], None]
Watcher = Callable[[object, str, Sequence[Any]], None]
Chooser = Callable[[int, Sequence[object], Sequence[int], object], None]

_listeners: list[Listener] = []
_watchers: list[Watcher] = []
choosers: list[Chooser] = []
"""Called with a mesh axis, the rows of a rule, their prices, and the row that is taken."""

listen, unlisten = _listeners.append, _listeners.remove
watch, unwatch = _watchers.append, _watchers.remove


def is_heard() -> bool:
    """True if there is a listener: otherwise nobody needs to count bytes."""
    return bool(_listeners)


@contextmanager
def unheard() -> Iterator[None]:
    """Report nothing to listeners meanwhile: printing a tensor is no part of a program."""
    listeners = _listeners[:]
    _listeners.clear()
    try:
        yield
    finally:
        _listeners[:] = listeners


def record(kind: str, topology: Topology, axes: tuple[int, ...], nbytes: int) -> None:
    """Report a collective; `nbytes` is what the rank that receives most receives."""
    for listener in _listeners:
        listener(kind, topology, axes, nbytes)


def planned(op: object, tier: str, operands: Sequence[Any]) -> None:
    """Report that a call of `op` was planned, and how it runs: rows, form, fallback, ..."""
    for watcher in _watchers:
        watcher(op, tier, operands)
