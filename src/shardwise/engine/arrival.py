"""Waiting for all ranks of a mesh through the store, for a short time only."""

from __future__ import annotations

from datetime import timedelta
from hashlib import sha256

import torch.distributed as dist

from ..errors import CommunicationError
from ..mesh import Topology
from ..user_line import user_line
from ..world import current_world

__all__ = ["ARRIVAL", "all_arrive"]

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
    try:
        store.wait([f"{name}/end"], ARRIVAL)
    except dist.DistStoreError:
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
