"""Who listens to communication: every collective is reported here with kind, axes and bytes."""

from __future__ import annotations

from typing import Protocol

from .mesh import Topology

__all__ = ["Listener", "listen", "record", "unlisten"]


class Listener(Protocol):
    """Someone who wants to know of every collective."""

    def on_collective(
        self, kind: str, topology: Topology, axes: tuple[int, ...], nbytes: int
    ) -> None: ...


_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Report every collective to `listener` from now on."""
    _listeners.append(listener)


def unlisten(listener: Listener) -> None:
    """Stop reporting to `listener`."""
    _listeners.remove(listener)


def record(kind: str, topology: Topology, axes: tuple[int, ...], nbytes: int) -> None:
    """Report a collective; `nbytes` is what the rank that receives most receives."""
    for listener in _listeners:
        listener.on_collective(kind, topology, axes, nbytes)
