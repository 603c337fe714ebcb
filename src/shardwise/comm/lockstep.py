"""Lockstep: the ranks compare what they run before each collective.

Ranks that run different programs may finish with wrong numbers: a sum on one meets a maximum on
another. Under `lockstep` each rank writes into the store what it is about to run, and reads what
the others have written, before it starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist

from .._torch import gloo_timeout, is_alone
from ..config import Block, current
from ..errors import CommunicationError
from ..layout.mesh import Topology
from ..layout.user_line import user_line
from ..layout.world import World, at_end, current_world, known_world
from .failures import raise_if_peer_failed
from .protocol import Job

_TICK = timedelta(seconds=1)
"""How long a rank waits before it looks whether the others can still come."""
_ARRIVAL = timedelta(seconds=5)
"""How long a rank waits for the others where a plain tensor is compared."""


class LockstepError(CommunicationError):
    """The ranks run different programs."""


class _State:
    session = 0  # how many contexts were left: all ranks count alike
    counts: ClassVar[dict[tuple[int, ...], int]] = {}  # comparisons of each set of ranks


def is_compared() -> bool:
    """True under `lockstep()`, or if a mesh was made with `lockstep=True`."""
    world = known_world()
    return current().lockstep or (world is not None and world.lockstep)


class lockstep(Block):
    """Let the ranks compare, before each collective, its kind, the layouts and the user's line.

    A difference is an error on all ranks that shows what each of them runs. All ranks enter and
    leave the context; who still waits for a collective when another leaves gets the error too. Use
    it to find out why a program hangs, or gives other numbers than in one process. Each comparison
    takes several messages to the store of `torch.distributed`. On a virtual mesh there is nothing
    to compare.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.arange(4.0), mesh, [shardwise.Shard(0)])
    >>> with shardwise.lockstep():
    ...     x.sum().item()
    6.0
    """

    def __init__(self) -> None:
        super().__init__(lockstep=True)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _leave(raised[1])


def _leave(error: BaseException | None) -> None:
    """After a context; the outermost one waits until all ranks leave it too, unless by an error."""
    world = known_world()
    if is_compared() or world is None or not world.is_current():
        return
    try:
        if error is None:
            _leave_together(world, "leaves lockstep()")
        elif not isinstance(error, LockstepError):  # of a difference the others know
            how = f"raised {type(error).__name__}: {error}"[:500]
            world.store.set(_at(world, world.rank), f"\n{how} and left lockstep() at {user_line()}")
    finally:
        _State.session, _State.counts = _State.session + 1, {}


@at_end
def _end(world: World) -> None:
    """Before the process group is destroyed: raise if another rank still waits for this one."""
    try:
        if world.lockstep and world.is_current():
            _leave_together(world, "destroys the process group")
    except dist.DistNetworkError:
        pass  # the process that has the store saw that all have left, and went first
    finally:
        _State.session, _State.counts = 0, {}


def _leave_together(world: World, what: str) -> None:
    texts = _exchange(world, tuple(range(world.size)), f"{what} at {user_line()}")
    if not all(each.startswith(what) for each in texts.values()):
        _raise_difference(texts)


# --- comparing -----------------------------------------------------------------------------------


def compare(ranks: tuple[int, ...], what: str) -> None:
    """Compare with `ranks` the collective that is about to start; raise if they run another."""
    text = f"{what} at {user_line()}"
    texts = _exchange(current_world(), ranks, text)
    if any(each != text for each in texts.values()):
        _raise_difference(texts)


def describe(jobs: Sequence[Job]) -> str:
    """A collective in a few words, and a digest of its layouts."""
    step, dtype = jobs[0].step, str(jobs[0].dtype).removeprefix("torch.")
    how = f"{step.kind}({step.op})" if step.op else step.kind
    digest = sha256(repr([(job.step, job.dtype) for job in jobs]).encode()).hexdigest()[:8]
    return f"{how} of {len(jobs)} x {dtype} over axes {list(step.axes)}, layouts {digest}"


def _exchange(world: World, ranks: tuple[int, ...], text: str) -> dict[int, str]:
    """The next call that each of `ranks` compares with the others."""
    count = _State.counts[ranks] = _State.counts.get(ranks, 0) + 1
    base = world.key("lockstep", _State.session, ",".join(map(str, ranks)))
    store, others = world.store, [rank for rank in ranks if rank != world.rank]
    store.set(f"{base}/{count}/{world.rank}", text)
    keys = [f"{base}/{count}/{rank}" for rank in others]
    end = time.monotonic() + gloo_timeout().total_seconds()
    while not world.wait(keys, _TICK):
        store.set(_at(world, world.rank), f"{','.join(map(str, ranks))}/{count}\n{text}")
        said = {rank: _said(world, rank) for rank in others}
        absent = [r for r, key in zip(others, keys, strict=True) if not store.check([key])]
        if elsewhere := {rank: said[rank] for rank in absent if said[rank]}:
            _raise_difference({world.rank: text} | elsewhere)
        raise_if_peer_failed()
        if absent and time.monotonic() > end:
            _raise_difference({world.rank: text} | dict.fromkeys(absent, "it did not come"))
    if count > 2:  # the others have read what was written before the last comparison
        store.delete_key(f"{base}/{count - 2}/{world.rank}")
    found = [raw.decode() for raw in store.multi_get(keys)] if others else []
    return {world.rank: text} | dict(zip(others, found, strict=True))


def _at(world: World, rank: int) -> str:
    """The key under which a rank writes which comparison it waits in, or that it raised."""
    return world.key("lockstep", _State.session, "at", rank)


def _said(world: World, rank: int) -> str:
    """The call of a rank that will not come: it has raised, or waits for this rank elsewhere."""
    if not world.store.check([_at(world, rank)]):
        return ""
    place, text = world.store.get(_at(world, rank)).decode().split("\n", 1)
    names, _, count = place.rpartition("/")
    ranks = tuple(map(int, names.split(","))) if place else ()
    waits_for_me = world.rank in ranks and _State.counts.get(ranks, 0) < int(count)
    return str(text) if waits_for_me or not place else ""


def _raise_difference(texts: dict[int, str]) -> NoReturn:
    lines = "\n".join([f"  rank {rank}: {text}" for rank, text in sorted(texts.items())])
    raise LockstepError(
        f"lockstep: the ranks run different programs:\n{lines}\n"
        "All ranks must make the same calls on DTensors in the same order: look for a branch on "
        "the rank, or on a value that differs by rank."
    )


# --- plain tensors -------------------------------------------------------------------------------


def all_arrive(
    what: str, topology: Topology, call: str, advice: str, patience: timedelta = _ARRIVAL
) -> None:
    """Return when all ranks of a mesh are at the same `call`; raise if some do not come in time.

    `call` is equal on all ranks and not used again. The store keeps one verdict for all ranks: one
    that comes too late raises too. The error ends with `advice`.
    """
    topology.refuse_destroyed()
    if is_alone():
        return
    world = current_world()
    store, line = world.store, user_line()
    name = world.key("arrival", sha256(f"{topology.ranks} {call}".encode()).hexdigest()[:32])
    store.set(f"{name}/{world.rank}", line)
    if store.add(name, 1) == len(topology.ranks):
        store.compare_set(f"{name}/end", "", "all")
    if not world.wait([f"{name}/end"], patience):
        absent = [rank for rank in topology.ranks if not store.check([f"{name}/{rank}"])]
        store.compare_set(f"{name}/end", "", ", ".join(map(str, absent)) or str(world.rank))
    verdict = store.get(f"{name}/end").decode()
    if verdict == "all":
        return
    late = str(world.rank) in verdict.split(", ")
    raise CommunicationError(
        f"{what}, so all ranks of mesh {topology} must make the same call, but rank {verdict} did "
        f"not come within {patience.total_seconds():g} seconds. This rank "
        f"{'came later' if late else 'is there'}, at {line}.\n{advice}"
    )
