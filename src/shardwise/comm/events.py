"""Who listens to communication: every collective is reported here with kind, axes and bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..layout.mesh import Topology

__all__ = ["Listener", "is_heard", "listen", "planned", "record", "unlisten", "unwatch", "watch"]


class Listener(Protocol):
    """Someone who wants to know of every collective."""

    def on_collective(
        self, kind: str, topology: Topology, axes: tuple[int, ...], nbytes: int
    ) -> None: ...


Watcher = Callable[[object, str], None]

_listeners: list[Listener] = []
_watchers: list[Watcher] = []


def listen(listener: Listener) -> None:
    """Report every collective to `listener` from now on."""
    _listeners.append(listener)


def unlisten(listener: Listener) -> None:
    """Stop reporting to `listener`."""
    _listeners.remove(listener)


def is_heard() -> bool:
    """Whether anybody listens: what to report need not be computed otherwise."""
    return bool(_listeners)


def record(kind: str, topology: Topology, axes: tuple[int, ...], nbytes: int) -> None:
    """Report a collective; `nbytes` is what the rank that receives most receives."""
    for listener in _listeners:
        listener.on_collective(kind, topology, axes, nbytes)


def planned(op: object, tier: str) -> None:
    """Report that a call of `op` was planned, and who serves it: rows, form, fallback, ..."""
    for watcher in _watchers:
        watcher(op, tier)


def watch(watcher: Watcher) -> None:
    """Call `watcher(op, tier)` whenever a call is planned."""
    _watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    """Stop calling `watcher`."""
    _watchers.remove(watcher)
