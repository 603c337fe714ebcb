"""Making meshes: new ones, and those that a pickle describes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from .._torch import is_alone
from ..errors import MeshError, public
from .cost import Link, Links, links_of
from .mesh import (
    AnyMesh,
    Topology,
    VirtualMesh,
    axes_text,
    checked_names,
    find,
    topologies,
    topology,
)
from .world import current_world, known_world


def distributed_is_on() -> bool:
    """True if this process is one of several: initialised, or started by torchrun."""
    if not dist.is_available():
        return False
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dist.is_initialized() or all(name in os.environ for name in needed)


@public
def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    links: Links = None,
    lockstep: bool = False,
) -> AnyMesh:
    """Make a mesh: over the ranks of `torch.distributed` if there are any, else virtual.

    `links` says what connects the ranks along each axis: a `Link`, a preset such as "ethernet", one
    of these per axis, or the `Path` of a file that `shardwise calibrate` has written. All processes
    take what the mesh's first rank has, for as long as the mesh lives. With `lockstep` the
    ranks compare what they run before each collective, as in `shardwise.lockstep`, until the
    process group is destroyed.

    >>> init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    VirtualMesh('cpu', dp=2, tp=2)
    """
    if not isinstance(mesh_shape, Sequence):
        raise MeshError(
            f"init_device_mesh: mesh_shape must have one size per axis, but got {mesh_shape!r}. "
            f"Write ({mesh_shape!r},) for one axis."
        )
    shape = tuple(mesh_shape)
    if any(not isinstance(size, int) or size < 1 for size in shape) or not shape:
        raise MeshError(f"init_device_mesh: mesh_shape must hold positive ints, but got {shape}.")
    names = checked_names(mesh_dim_names, len(shape))
    _check_device(device_type)
    if not distributed_is_on():
        ranks = torch.arange(prod(shape)).view(shape)
        return VirtualMesh(device_type, ranks, mesh_dim_names=names, links=links)
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if prod(shape) != world:
        raise MeshError(
            f"init_device_mesh: mesh_shape {shape} has {prod(shape)} ranks, but {world} processes "
            f"run. Start {prod(shape)}, or use DeviceMesh(device_type, ranks) for a part of them."
        )
    made = _made(torch_init_device_mesh(device_type, shape, mesh_dim_names=names), links)
    current_world().lockstep |= lockstep
    return made


def _check_device(device_type: Any) -> None:
    """An error if tensors cannot be on a device of this type here."""
    try:
        torch.empty(0, device=device_type)
    except (AssertionError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise MeshError(
            f"init_device_mesh: PyTorch cannot use the device type {device_type!r} here: {reason}. "
            'Use "cpu", or install PyTorch for that device.'
        ) from error


@public
def is_virtual(mesh: AnyMesh) -> bool:
    """True if this process plays all ranks of a mesh.

    >>> is_virtual(init_device_mesh("cpu", (2,)))
    True
    """
    return topology(mesh).virtual


class _DeviceMeshMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, VirtualMesh | TorchDeviceMesh)


@public
class DeviceMesh(metaclass=_DeviceMeshMeta):
    """`DeviceMesh(device_type, ranks)` makes a mesh of given ranks, virtual or over processes.

    >>> DeviceMesh("cpu", [[0, 1], [2, 3]])
    VirtualMesh('cpu', 2x2)
    """

    def __new__(  # type: ignore[misc]  # it chooses one of two mesh classes
        cls,
        device_type: str,
        mesh: torch.Tensor | Sequence[Any],
        *,
        mesh_dim_names: Sequence[str] | None = None,
        links: Links = None,
    ) -> AnyMesh:
        if not distributed_is_on():
            return VirtualMesh(device_type, mesh, mesh_dim_names=mesh_dim_names, links=links)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        made = TorchDeviceMesh(device_type, torch.as_tensor(mesh), mesh_dim_names=names)
        return _made(made, links)


def _made(mesh: TorchDeviceMesh, links: Links) -> TorchDeviceMesh:
    """A mesh over processes, with its links and its flattened groups: every rank comes here."""
    agreed = _agreed_links(mesh, links)
    known = find(mesh)
    if known is not None and known.links != agreed:
        if links is not None:
            raise MeshError(
                f"links: {list(agreed)} were given for mesh {known}, which exists already with "
                f"{list(known.links)}. The links of a mesh stay as they are."
            )
        agreed = known.links
    where = topology(mesh, agreed)
    if not where.groups:
        where.groups.update(_flattened_groups(where))
    share_random_state(mesh)
    current_world().find_addresses(where.ranks)  # all have said so: they took part in the above
    return mesh


def _agreed_links(mesh: TorchDeviceMesh, links: Links) -> tuple[Link, ...]:
    """The links that the first rank of a new mesh has, on every rank of the world: ranks outside
    the mesh price moves to it too."""
    told: list[Any] = []
    try:
        told.append(links_of(links, mesh.ndim))
    except MeshError as error:
        told.append(error)
    if not is_alone():
        dist.broadcast_object_list(told, int(mesh.mesh.flatten()[0]))
    if isinstance(told[0], MeshError):
        raise told[0]
    return told[0]  # type: ignore[no-any-return]


def _flattened_groups(where: Topology) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A process group for each run of adjacent axes, made in one order by all.

    `new_group` needs every rank of the world, also those that the group or the mesh leaves out.
    """
    assert dist.group.WORLD is not None
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    axes = [axis for axis in range(where.ndim) if where.shape[axis] > 1]
    for first, last in combinations(range(len(axes)), 2):
        run = tuple(axes[first : last + 1])
        rest = [axis for axis in range(where.ndim) if axis not in run]
        for start in where.group_coords((0,) * where.ndim, rest):
            members = where.group_coords(start, run)
            if len(members) == dist.get_world_size():
                groups[run] = dist.group.WORLD
                continue
            made = dist.new_group([where.rank_of(member) for member in members])
            if where.coordinate in members:
                groups[run] = made
    return groups


def from_first_rank(value: torch.Tensor, mesh: AnyMesh) -> torch.Tensor:
    """The value that the first rank of a mesh has; ranks outside the mesh keep theirs."""
    where = topology(mesh)
    if isinstance(mesh, VirtualMesh) or where.coordinate is None:
        return value
    shared = value.to(where.device_type)
    for axis in range(where.ndim):
        first = (*where.coordinate[:axis], 0, *where.coordinate[axis + 1 :])
        dist.broadcast(shared, where.rank_of(first), group=mesh.get_group(axis))
    return shared.to(value.device)


def share_random_state(mesh: AnyMesh) -> None:
    """Give every rank of a mesh the first one's random state, so that replicas draw alike."""
    torch.set_rng_state(from_first_rank(torch.get_rng_state(), mesh))
    if mesh.device_type != "cpu":
        device = torch.get_device_module(mesh.device_type)
        device.set_rng_state(from_first_rank(device.get_rng_state(), mesh))


# --- meshes in pickles ---------------------------------------------------------------------------


def described(where: Topology) -> tuple[Any, ...]:
    """A mesh in plain values: what a pickle keeps of it."""
    names = where.mesh.mesh_dim_names
    links = tuple((link.latency, link.bandwidth) for link in where.links)
    return where.virtual, where.device_type, where.shape, where.ranks, names, links


def described_mesh(
    virtual: bool,
    device_type: str,
    shape: tuple[int, ...],
    ranks: tuple[int, ...],
    names: tuple[str, ...] | None,
    links: Sequence[tuple[float, float]],
) -> Topology:
    """The mesh of a description. One over all processes is made if it does not exist, which needs
    every rank."""
    if virtual:
        own = [Link(*pair) for pair in links]
        array = torch.tensor(ranks).view(shape)
        return topology(VirtualMesh(device_type, array, mesh_dim_names=names, links=own))
    world = known_world()
    number = None if world is None or not world.is_current() else world.number
    found = topologies.get((number, device_type, tuple(shape), tuple(ranks), names))
    if found is None and names is not None:
        found = _part_of_known(device_type, tuple(ranks), tuple(names))
    if found is not None:
        return found
    text = f"{device_type}, {axes_text(shape, names)}, ranks {list(ranks)}"
    everybody = list(range(dist.get_world_size())) if dist.is_initialized() else None
    if sorted(ranks) != everybody:
        raise MeshError(
            f"a tensor was saved on a mesh of processes ({text}), which does not exist in this "
            "process. Make it with shardwise.init_device_mesh before the file is loaded, in as "
            "many processes; or save shardwise.full_state_dict(state), which has whole tensors."
        )
    _wait_for_all(text)
    mesh = TorchDeviceMesh(device_type, torch.tensor(ranks).view(shape), mesh_dim_names=names)
    return topology(_made(mesh, [Link(*pair) for pair in links]))


_LOAD_SECONDS = 60.0
"""How long a rank that loads a tensor waits for the others before it makes the mesh with them."""


def _wait_for_all(mesh: str) -> None:
    """Return when every rank is about to make a mesh; an error if some do not come."""
    world = current_world()
    store, here = world.store, world.rank
    keys = [world.key("loading", mesh, rank) for rank in range(world.size)]
    store.set(keys[here], "")
    try:
        store.wait(keys, timedelta(seconds=_LOAD_SECONDS))
    except RuntimeError:
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        store.delete_key(keys[here])
        raise MeshError(
            f"a tensor was saved on a mesh ({mesh}) that does not exist yet, and to make it all "
            f"ranks must load the tensor, but within {_LOAD_SECONDS:g} s ranks {late} did not. "
            "Make the mesh with shardwise.init_device_mesh before the file is loaded."
        ) from None


def _part_of_known(
    device_type: str, ranks: tuple[int, ...], names: tuple[str, ...]
) -> Topology | None:
    """The sub-mesh of a known mesh over processes that has these axes and ranks."""
    for whole in list(topologies.values()):
        axes = [axis for axis, name in enumerate(whole.names) if name in names]
        if whole.coordinate is None or tuple(whole.names[axis] for axis in axes) != names:
            continue
        found = tuple(map(whole.rank_of, whole.group_coords(whole.coordinate, axes)))
        if found == ranks and whole.device_type == device_type:
            return topology(whole.mesh[names])
    return None
