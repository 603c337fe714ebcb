"""Waiting for all ranks of a mesh through the store, for a short time only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any

from ..errors import CommunicationError
from ..layout.mesh import Topology
from ..layout.user_line import user_line
from ..layout.world import current_world

__all__ = ["ARRIVAL", "all_arrive", "wait_for"]

ARRIVAL = timedelta(seconds=5)
"""How long a rank waits for the others."""


def all_arrive(what: str, topology: Topology, call: str) -> None:
    """Return when all ranks of a mesh are at the same `call`; an error on those that are, if some
    do not come in time.

    `call` is equal on all ranks and not used again. Whether all came is decided once: a rank that
    comes too late hears so.
    """
    topology.refuse_destroyed()
    world = current_world()
    store, line = world.store, user_line()
    name = world.key("arrival", sha256(f"{topology.ranks} {call}".encode()).hexdigest()[:32])
    store.set(f"{name}/{world.rank}", line)
    if store.add(name, 1) == len(topology.ranks):
        store.compare_set(f"{name}/end", "", "all")
    if not wait_for(store, [f"{name}/end"], ARRIVAL):
        absent = [rank for rank in topology.ranks if not store.check([f"{name}/{rank}"])]
        store.compare_set(f"{name}/end", "", ", ".join(map(str, absent)) or str(world.rank))
    absent_text = store.get(f"{name}/end").decode()
    if absent_text == "all":
        return
    seconds = f"{ARRIVAL.total_seconds():g}"
    late = str(world.rank) in absent_text.split(", ")
    came = f"This rank is there, at {line}" if not late else f"This rank came later, at {line}"
    raise CommunicationError(
        f"{what}, so all ranks of mesh {topology} must make the same call, but rank "
        f"{absent_text} did not come within {seconds} seconds. {came}.\n"
        "Make the call on every rank, or put a plain tensor on the mesh before: "
        "distribute_tensor(tensor, mesh, [Replicate()]) on every rank. "
        'With shardwise.plain_tensors("trust") plain tensors are not compared.'
    )


def wait_for(store: Any, keys: Sequence[str], timeout: timedelta) -> bool:
    """Wait until the store has all keys; False if it has not in time.

    `store.wait` would do, but warns on the error output when its time is over.
    """
    end, pause = time.monotonic() + timeout.total_seconds(), 0.0
    while not store.check(list(keys)):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause + 1e-5, 0.02)
    return True
