"""The ranks that take part in a collective, and the calls of `torch.distributed`.

Each of `all_reduce`, `broadcast`, `all_to_all`, `all_gather` and `reduce_scatter` starts a
collective and returns the function that waits for it. Both are recorded in captured steps.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ..layout.geometry import all_coords
from ..layout.mesh import Coord, Topology
from ..layout.world import World, at_end
from .failures import waiter
from .protocol import Wait
from .recording import recordable
from .step import Step


@dataclass(frozen=True)
class Group:
    """The ranks that talk, in the order of their process group, and their coordinates.

    - `process_group` is None if there is none with these ranks: they then talk in pairs. It may
      have other ranks of the mesh, too; all of its ranks must take part in each of its collectives.
    - `senders` and `receivers` are the coordinates on the mesh of the source and of the target;
      None for a rank that is not on that mesh.
    - `me` is the index of this rank.
    """

    process_group: Any
    ranks: tuple[int, ...]
    senders: tuple[Coord | None, ...]
    receivers: tuple[Coord | None, ...]
    me: int


def group_of(steps: Sequence[Step]) -> Group:
    """The group for steps that are sent as one collective."""
    src, dst = steps[0].src.topology, steps[0].dst.topology
    return _group(src, dst, tuple(sorted({axis for step in steps for axis in step.axes})))


@lru_cache(maxsize=4096)
def _group(src: Topology, dst: Topology, axes: tuple[int, ...]) -> Group:
    if src is dst:
        assert src.coordinate is not None
        found = _spanning(src, axes)
        ranks = tuple(sorted(map(src.rank_of, src.group_coords(src.coordinate, axes))))
    else:
        ranks = tuple(sorted({*src.ranks, *dst.ranks}))
        found = dist.group.WORLD if len(ranks) == dist.get_world_size() else None
    if found is not None:
        ranks = tuple(dist.get_process_group_ranks(found))
    places = [dict(zip(mesh.ranks, all_coords(mesh.shape), strict=True)) for mesh in (src, dst)]
    senders, receivers = (tuple(map(each.get, ranks)) for each in places)
    return Group(found, ranks, senders, receivers, ranks.index(dist.get_rank()))


def _spanning(topology: Topology, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The smallest process group with the members along `axes`.

    It may have other ranks of the mesh: all of them take part in a step, and these send nothing.
    """
    own = set(topology.long_axes(axes))
    wider = [
        (prod([topology.shape[axis] for axis in run]), run)
        for run in topology.groups
        if own <= set(run)
    ]
    return topology.groups[min(wider)[1]] if wider else None


@lru_cache(maxsize=4096)
def reduction_groups(topology: Topology, axes: tuple[int, ...]) -> list[dist.ProcessGroup]:
    """The process groups that reduce over `axes` one after another; one if it spans them all."""
    own = topology.long_axes(axes)
    runs = [own] if own in topology.groups else [(axis,) for axis in own]
    return [topology.groups[run] for run in runs]


@at_end
def _forget_groups(_: World) -> None:
    _group.cache_clear()
    reduction_groups.cache_clear()


# --- collectives ---------------------------------------------------------------------------------


@recordable(writes=[1])
def all_reduce(group: dist.ProcessGroup, value: torch.Tensor, op: Any) -> Wait:
    """Reduce `value` in place over the members of a process group."""
    work = dist.all_reduce(value, op, group=group, async_op=True)
    return waiter(work, dist.get_process_group_ranks(group), value.device)


@recordable(writes=[1])
def broadcast(group: dist.ProcessGroup, value: torch.Tensor, source: int) -> Wait:
    """Give the members of a process group the `value` of rank `source`, in place."""
    work = dist.broadcast(value, source, group=group, async_op=True)
    return waiter(work, dist.get_process_group_ranks(group), value.device)


@recordable(writes=[1])
def all_gather(group: Group, rows: torch.Tensor, row: torch.Tensor) -> Wait:
    """Gather the `row` of each member into `rows`."""
    work = dist.all_gather_single(rows, row, group=group.process_group, async_op=True)
    return waiter(work, group.ranks, rows.device)


@recordable(writes=[1])
def reduce_scatter(group: Group, total: torch.Tensor, rows: torch.Tensor, op: Any) -> Wait:
    """Reduce the members' `rows`, of which each member gets its row in `total`."""
    work = dist.reduce_scatter_single(total, rows, op, group=group.process_group, async_op=True)
    return waiter(work, group.ranks, total.device)


@recordable(writes=[1])
def all_to_all(
    group: Group,
    received: torch.Tensor,
    sent: torch.Tensor,
    incoming: list[int],
    outgoing: list[int],
) -> Wait:
    """Send each member its part of `sent`, and receive the parts of `received`."""
    if group.process_group is None:
        return _in_pairs(group, received.split(incoming), sent.split(outgoing))
    work = dist.all_to_all_single(
        received, sent, incoming, outgoing, group=group.process_group, async_op=True
    )
    return waiter(work, group.ranks, received.device)


def _in_pairs(
    group: Group, arrivals: Sequence[torch.Tensor], departures: Sequence[torch.Tensor]
) -> Wait:
    arrivals[group.me].copy_(departures[group.me])
    pairs: list[dist.P2POp] = []
    for index, rank in enumerate(group.ranks):
        if index != group.me and arrivals[index].numel():
            pairs.append(dist.P2POp(dist.irecv, arrivals[index], rank))
        if index != group.me and departures[index].numel():
            pairs.append(dist.P2POp(dist.isend, departures[index], rank))
    works = dist.batch_isend_irecv(pairs) if pairs else []
    device = arrivals[group.me].device
    if device.type == "cpu":
        return waiter(_PairWork(works) if works else None, group.ranks, device)

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


class _PairWork(threading.Thread):
    """Messages between pairs of ranks as one `Work`.

    gloo closes a connection when a wait for a message times out, so a thread waits without a
    timeout. If a rank has failed, the thread stays behind and ends with the process.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__(name="shardwise-wait", daemon=True)
        self._works = works
        self._error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error

    def get_future(self) -> _PairWork:
        return self

    def done(self) -> bool:
        return not self.is_alive()

    def wait(self, timeout: timedelta | None = None) -> None:
        self.join(None if timeout is None else timeout.total_seconds())
        if self.is_alive():
            raise RuntimeError("the wait timed out")
        if self._error is not None:
            raise self._error
