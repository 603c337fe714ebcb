"""Who talks in a collective of processes, and by which process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch.distributed as dist

from ..errors import CommunicationError
from ..layout.mesh import Coord, Topology, VirtualMesh
from ..layout.world import World, at_end
from .protocol import Task

__all__ = ["Channel", "channel_of", "members", "reduction_groups"]


@dataclass(frozen=True)
class Channel:
    """The ranks that talk, in the order of their group, and where each stands on the two meshes.

    `group` is None if no process group has these ranks: they then talk in pairs. A group may have
    other ranks of the mesh too, which exchange something else among themselves, or nothing: all
    must count alike how often they talk. A rank that is not on a mesh has no coordinate there.
    `me` is the place of this rank.
    """

    group: Any
    ranks: tuple[int, ...]
    senders: tuple[Coord | None, ...]
    receivers: tuple[Coord | None, ...]
    me: int


def channel_of(tasks: Sequence[Task]) -> Channel:
    """The channel for collectives that go out as one."""
    src, dst = tasks[0].src.topology, tasks[0].dst.topology
    axes = tuple(sorted({axis for task in tasks for axis in task.axes}))
    if src is dst:
        return _on_one_mesh(src, axes)
    return _between(src, dst)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise CommunicationError("torch.distributed is not initialised any more.")
    return group


@lru_cache(maxsize=4096)
def _on_one_mesh(topology: Topology, axes: tuple[int, ...]) -> Channel:
    group = _spanning(topology, axes)
    if group is None:
        return members(topology, axes)
    return _among(topology, tuple(dist.get_process_group_ranks(group)), group)


@lru_cache(maxsize=4096)
def members(topology: Topology, axes: tuple[int, ...]) -> Channel:
    """The members along `axes`, without a group."""
    assert topology.coordinate is not None
    found = topology.group_coords(topology.coordinate, axes)
    return _among(topology, tuple(sorted(map(topology.rank_of, found))), None)


def _among(topology: Topology, ranks: tuple[int, ...], group: Any) -> Channel:
    every = topology.group_coords((0,) * topology.ndim, range(topology.ndim))
    where = dict(zip(topology.ranks, every, strict=True))
    coords = tuple(where[rank] for rank in ranks)
    return Channel(group, ranks, coords, coords, coords.index(topology.coordinate))


def _spanning(topology: Topology, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
    """A group with the members along `axes`: just them, else as few others of the mesh as can be.

    All ranks of the mesh take part in a step, so others can be asked to send and receive nothing.
    """
    own = tuple(axis for axis in axes if topology.shape[axis] > 1)
    assert not isinstance(topology.mesh, VirtualMesh)
    if len(own) < 2:
        return topology.mesh.get_group(own[0] if own else 0)
    wider = [run for run in topology.groups if set(own) <= set(run)]
    if wider:
        best = min(wider, key=lambda run: (prod(topology.shape[a] for a in run), run))
        return topology.groups[best]
    return world() if len(topology.ranks) == dist.get_world_size() else None


@lru_cache(maxsize=4096)
def _between(src: Topology, dst: Topology) -> Channel:
    found = _of_both(src, dst)
    return replace(found, group=world()) if len(found.ranks) == dist.get_world_size() else found


@lru_cache(maxsize=4096)
def _of_both(src: Topology, dst: Topology) -> Channel:
    """The ranks of two meshes, without a group."""
    senders = dict(zip(src.ranks, src.group_coords((0,) * src.ndim, range(src.ndim)), strict=True))
    receivers = dict(
        zip(dst.ranks, dst.group_coords((0,) * dst.ndim, range(dst.ndim)), strict=True)
    )
    ranks = tuple(sorted({*senders, *receivers}))
    mesh = dst if src.coordinate is None else src
    assert mesh.coordinate is not None
    me = ranks.index(mesh.rank_of(mesh.coordinate))
    have, want = tuple(map(senders.get, ranks)), tuple(map(receivers.get, ranks))
    return Channel(None, ranks, have, want, me)


def reduction_groups(topology: Topology, axes: tuple[int, ...]) -> list[dist.ProcessGroup]:
    """Groups that, one after another, reduce over `axes`: one if there is one for all of them."""
    own = tuple(axis for axis in axes if topology.shape[axis] > 1)
    assert not isinstance(topology.mesh, VirtualMesh)
    if len(own) > 1 and own in topology.groups:
        return [topology.groups[own]]
    if len(own) > 1 and prod(topology.shape[axis] for axis in own) == dist.get_world_size():
        return [world()]
    for count in range(len(own) - 1, 1, -1):  # the longest run that has a group, then the rest
        for first in range(len(own) - count + 1):
            run = own[first : first + count]
            if run in topology.groups:
                rest = (*own[:first], *own[first + count :])
                return [topology.groups[run], *reduction_groups(topology, rest)]
    return [topology.mesh.get_group(axis) for axis in own]


@at_end
def _forget_channels(_: World) -> None:
    for cached in (_on_one_mesh, members, _between, _of_both):
        cached.cache_clear()
