"""The default process group of `torch.distributed`, for as long as it lives.

All state that this library keeps for a group is in its `World`, and goes with it.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist

from .._torch import call_at_destroy, shared_store, store_address
from ..errors import CommunicationError, MeshError

Callback = Callable[["World"], None]


class World:
    """The default process group: its rank and size, its store, and which other processes run."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.number = next(_numbers)
        self.group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store: Any = shared_store()
        self.lockstep = False  # True if ranks compare what they run, see comm/lockstep.py
        self.prefix = f"shardwise/{self.number}"  # a store may outlive the group
        self._doorbell = _listen(store_address(self.store))
        self._addresses: dict[int, tuple[str, int]] = {}
        if self._doorbell is not None:
            host, port = self._doorbell.getsockname()[:2]
            self.store.set(self.key("address", self.rank), f"{host} {port}")

    def key(self, *parts: object) -> str:
        """A key of the store that belongs to this group alone."""
        return "/".join([self.prefix, *map(str, parts)])

    def wait(self, keys: Sequence[str], timeout: timedelta) -> bool:
        """Wait until the store has all keys; False if it has not in time.

        `store.wait` would do, but warns on the error output when its time is over.
        """
        end, pause = time.monotonic() + timeout.total_seconds(), 0.0
        while not self.store.check(list(keys)):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause + 1e-5, 0.02)
        return True

    def is_current(self) -> bool:
        """True if the group has not been destroyed."""
        group = self.group()
        return group is not None and group is dist.group.WORLD

    def find_addresses(self, ranks: Sequence[int]) -> None:
        """Read where these ranks can be reached, as far as they have said so."""
        for rank in ranks:
            key = self.key("address", rank)
            if rank not in self._addresses and self.store.check([key]):
                host, port = self.store.get(key).decode().split()
                self._addresses[rank] = host, int(port)

    def is_gone(self, rank: int) -> bool:
        """True if a rank's process is known to have ended, or to have destroyed its group.

        Each process listens on a port and never answers. The operating system takes connections
        while the process lives, be it busy or stuck, and refuses them afterwards.
        """
        try:
            self.find_addresses([rank])
            socket.create_connection(self._addresses[rank], timeout=1).close()
        except ConnectionRefusedError:
            return True
        except (OSError, KeyError, RuntimeError):  # not reached, no address, or the store is gone
            return False
        return False

    def stop_listening(self) -> None:
        """Let others take this process for gone."""
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None


def _listen(host: str) -> socket.socket | None:
    """A socket that listens where processes that use the store at `host` can reach it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing, but chooses the interface
            here = probe.getsockname()[0]
        return socket.create_server((here, 0), backlog=128)
    except OSError:
        return None  # others will not know whether this process lives


class _State:
    """The world that there is now."""

    world: World | None = None
    parents: World | None = None  # that of the process which this one was forked from


_numbers = count()
_starts: list[Callback] = []
_ends: list[Callback] = []


def at_start(callback: Callback) -> Callback:
    """Call `callback` with each new world, on the first mesh over its processes."""
    _starts.append(callback)
    return callback


def at_end(callback: Callback) -> Callback:
    """Call `callback` with each world whose group was destroyed."""
    _ends.append(callback)
    return callback


def known_world() -> World | None:
    """The world that a mesh was made in, if there is one."""
    return _State.world


def current_world() -> World:
    """The world of the default process group; an error if there is none."""
    refuse_forked()
    world, group = _State.world, dist.group.WORLD if dist.is_available() else None
    if world is not None and world.group() is group is not None:
        return world
    if world is not None:
        _end(world.number)
    if group is None:
        raise MeshError(
            "torch.distributed is not initialised, or its process group was destroyed. Make a mesh "
            "with shardwise.init_device_mesh under torchrun."
        )
    world = _State.world = World(group)
    call_at_destroy(partial(_end, world.number))
    for callback in _starts:
        callback(world)
    return world


def _end(number: int) -> None:
    """Forget a world whose group is being destroyed, or has been."""
    world = _State.world
    if world is None or world.number != number:
        return
    errors: list[CommunicationError] = []
    for callback in _ends:
        try:
            callback(world)
        except CommunicationError as error:  # the other callbacks have their own to let go of
            errors.append(error)
    _State.world = None
    world.store = None
    world.stop_listening()
    if errors:
        raise errors[0]


def _after_fork() -> None:
    """A child has none of its parent's threads, and must not speak in its name."""
    if _State.world is not None:
        _State.parents, _State.world = _State.world, None
        _State.parents.stop_listening()


os.register_at_fork(after_in_child=_after_fork)


def refuse_forked() -> None:
    """An error in a child of a process that has a mesh: nobody would answer it."""
    parents = _State.parents
    if parents is not None and parents.is_current():
        raise CommunicationError(
            f"this process was forked from rank {parents.rank}, as DataLoader workers are: it is "
            "no rank of the mesh, so a DTensor cannot communicate here, and values that were under "
            "way do not arrive. Take plain tensors before the fork, with x.full_tensor() or "
            'x.to_local(), or start workers with multiprocessing_context="spawn".'
        )
