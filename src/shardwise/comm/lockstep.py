"""Lockstep: the ranks compare what they run before each collective.

Ranks that run different programs may finish with wrong numbers: a sum on one meets a maximum on
another. Under `lockstep` each rank says in the store what it is about to run, and reads what the
others say, before it starts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from types import FrameType
from typing import ClassVar, NoReturn

import torch.distributed as dist

from .._torch import gloo_timeout
from ..errors import CommunicationError
from ..layout.user_line import user_line
from ..layout.world import World, at_end, current_world, known_world
from .arrival import wait_for
from .failures import raise_if_peer_failed
from .protocol import Job, Task

__all__ = ["compare", "describe", "is_compared", "lockstep"]

_TICK = timedelta(seconds=1)
"""How long a rank waits before it looks whether the others can still come."""
_ENDS = ("left", "failed")


class LockstepError(CommunicationError):
    """The ranks run different programs."""


class _State:
    """One for the process: a backward runs in other threads than its forward."""

    depth = 0
    session = 0  # how many contexts were left: all ranks count alike
    counts: ClassVar[dict[tuple[int, ...], int]] = {}  # collectives of each set of ranks


def is_compared() -> bool:
    """Whether the ranks compare what they run."""
    return _State.depth > 0 or _is_always()


def _is_always() -> bool:
    """Whether a mesh was made with `lockstep=True`."""
    world = known_world()
    return world is not None and world.lockstep


@contextmanager
def lockstep() -> Iterator[None]:
    """Let the ranks compare, before each collective, the operator, the layouts and the user's line.

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
    _State.depth += 1
    try:
        yield
    except BaseException as error:
        _leave(error)
        raise
    else:
        _leave(None)


def describe(jobs: Sequence[Job]) -> str:
    """A collective in a few words, and a digest of all that it is."""
    parts = []
    for job in jobs[:4]:
        task, dtype = job.task, str(job.dtype).removeprefix("torch.")
        how = f"{task.kind}({task.op})" if task.op else task.kind
        shape = [max(stops) for stops in zip(*_stops(task), strict=True)]
        parts.append(f"{how} of {dtype}{shape} over axes {list(task.axes)}")
    more = f" and {len(jobs) - 4} more" if len(jobs) > 4 else ""
    digest = sha256(repr([(job.task, job.dtype) for job in jobs]).encode()).hexdigest()[:8]
    return f"{'; '.join(parts)}{more}, layouts {digest}"


def _stops(task: Task) -> list[list[int]]:
    """Where the pieces of all ranks end, in each dim."""
    mesh = task.src.topology
    every = mesh.group_coords((0,) * mesh.ndim, range(mesh.ndim))
    return [[stop for _, stop in task.src.box(coord)] for coord in every]


def _operator() -> str:
    """The operator on DTensors that runs now, as the frames of this thread say."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "dispatch" and frame.f_globals["__name__"].endswith(".dispatch"):
            return str(frame.f_locals.get("op"))
        frame = frame.f_back
    return "a redistribution"


def compare(ranks: tuple[int, ...], what: str) -> None:
    """Compare with `ranks` the collective that is about to start; raise if they run another."""
    world = current_world()
    count = _State.counts[ranks] = _State.counts.get(ranks, 0) + 1
    text = f"{_operator()} at {user_line()}\n    {what}"
    texts = _exchange(world, ranks, count, text)
    if any(each != text for each in texts.values()):
        _raise_difference(texts)


def _exchange(world: World, ranks: tuple[int, ...], count: int, text: str) -> dict[int, str]:
    """What each of `ranks` runs as its collective number `count` among them."""
    place = f"{','.join(map(str, ranks))}/{count}"
    base = world.key("lockstep", _State.session, place)
    store, others = world.store, [rank for rank in ranks if rank != world.rank]
    store.set(f"{base}/{world.rank}", text)
    keys = [f"{base}/{rank}" for rank in others]
    end = time.monotonic() + gloo_timeout().total_seconds()
    while not wait_for(store, keys, _TICK):
        store.set(_at(world, world.rank), f"{place}\n{text}")
        absent = [rank for rank in others if not store.check([f"{base}/{rank}"])]
        _check_absent(world, place, text, absent)
        raise_if_peer_failed()
        if absent and time.monotonic() > end:
            _raise_difference({world.rank: text} | dict.fromkeys(absent, "it did not come"))
    if count > 2:  # who is here has read what was said before the last one
        before = world.key("lockstep", _State.session, f"{','.join(map(str, ranks))}/{count - 2}")
        store.delete_key(f"{before}/{world.rank}")
    found = dict(zip(others, store.multi_get(keys), strict=True)) if others else {}
    return {world.rank: text} | {rank: raw.decode() for rank, raw in found.items()}


def _at(world: World, rank: int) -> str:
    """Where a rank says which comparison it waits in, if it waits long, or that it has left."""
    return world.key("lockstep", _State.session, "at", rank)


def _check_absent(world: World, place: str, text: str, absent: Sequence[int]) -> None:
    """Raise if ranks that are waited for have left, or wait for this one elsewhere."""
    for rank in absent:
        there, what = _said(world, rank)
        elsewhere = there in _ENDS or _is_waiting_for(world.rank, there)
        came = world.store.check([world.key("lockstep", _State.session, place, rank)])
        if elsewhere and not came:
            _raise_difference({world.rank: text, rank: what})


def _said(world: World, rank: int) -> tuple[str, str]:
    """Which comparison a rank has waited in, or one of `_ENDS`, and in words; else nothing."""
    if not world.store.check([_at(world, rank)]):
        return "", ""
    there, what = world.store.get(_at(world, rank)).decode().split("\n", 1)
    return there, what


def _is_waiting_for(me: int, place: str) -> bool:
    """Whether this rank is missing in a comparison that another one waits in."""
    if not place or place in _ENDS:
        return False
    names, count = place.split("/")
    ranks = tuple(map(int, names.split(",")))
    return me in ranks and _State.counts.get(ranks, 0) < int(count)


def _raise_difference(texts: dict[int, str]) -> NoReturn:
    lines = "\n".join([f"  rank {rank}: {text}" for rank, text in sorted(texts.items())])
    raise LockstepError(
        f"lockstep: the ranks run different programs:\n{lines}\n"
        "All ranks must make the same calls on DTensors in the same order: look for a branch on "
        "the rank, or on a value that differs by rank."
    )


def _leave(error: BaseException | None) -> None:
    """Leave a context; the outermost one waits until all ranks leave it too, unless by an error."""
    _State.depth -= 1
    world = known_world()
    if _State.depth or _is_always() or world is None or not world.is_current():
        return
    try:
        if error is None:
            _meet(world, _say(world, "left", "left"))
        elif not isinstance(error, LockstepError):  # of a difference the others know
            _say(world, "failed", f"raised {type(error).__name__}: {error}"[:500] + " and left")
    finally:
        _State.session += 1
        _State.counts = {}


def _say(world: World, status: str, how: str) -> str:
    """Say in the store that this rank has "left" or "failed", and how."""
    text = f"{how} lockstep() at {user_line()}, after {sum(_State.counts.values())} collectives"
    world.store.set(_at(world, world.rank), f"{status}\n{text}")
    return text


def _meet(world: World, text: str) -> None:
    """Wait until all ranks have left; raise if one still waits for a collective with this rank."""
    looked = time.monotonic()
    end, pause = looked + gloo_timeout().total_seconds(), 0.001
    absent = [rank for rank in range(world.size) if rank != world.rank]
    while absent:
        said = {rank: _said(world, rank) for rank in absent}
        for rank, (there, what) in said.items():
            if there == "failed" or _is_waiting_for(world.rank, there):
                _raise_difference({world.rank: text, rank: what})
        absent = [rank for rank in absent if said[rank][0] != "left"]
        now = time.monotonic()
        if absent and now > end:
            _raise_difference({world.rank: text} | dict.fromkeys(absent, "it did not come"))
        if now - looked > _TICK.total_seconds():
            raise_if_peer_failed()
            looked = now
        time.sleep(pause if absent else 0)
        pause = min(2 * pause, 0.05)


@at_end
def _end(world: World) -> None:
    """Before the process group is destroyed: raise if another rank still waits for this one."""
    try:
        if world.lockstep and world.is_current():
            _meet(world, _say(world, "left", "destroys the process group under"))
    except dist.DistNetworkError:
        pass  # the process that has the store saw that all have left, and went first
    finally:
        _State.depth, _State.session, _State.counts = 0, 0, {}
