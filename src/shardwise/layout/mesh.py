"""Meshes: an N-d array of ranks, in one process (virtual) or over `torch.distributed`.

A public mesh is a `VirtualMesh` or a `torch.distributed.DeviceMesh`. Everything inside the package
works with its `Topology`: an interned value that says what the mesh is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from .._torch import entered_torch_mesh, root_mesh, shared_store
from ..config import current, enter_mesh, leave_mesh
from ..errors import MeshError
from .cost import Link, LinkLike, links_of
from .geometry import all_coords
from .links import told_by_first
from .placement import Placement
from .world import World, at_end, current_world, known_world

__all__ = [
    "AnyMesh",
    "DeviceMesh",
    "Topology",
    "VirtualMesh",
    "described",
    "described_mesh",
    "from_first_rank",
    "init_device_mesh",
    "topology",
]

Coord = tuple[int, ...]


class VirtualMesh:
    """A mesh whose ranks all live in this process, with the interface of PyTorch's `DeviceMesh`.

    >>> mesh = VirtualMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    >>> mesh
    VirtualMesh('cpu', dp=2, tp=2)
    >>> mesh["tp"].size()
    2
    """

    def __init__(
        self,
        device_type: str,
        mesh: torch.Tensor | Sequence[Any],
        *,
        mesh_dim_names: Sequence[str] | None = None,
        links: LinkLike | Sequence[LinkLike] | None = None,
    ) -> None:
        ranks = torch.as_tensor(mesh, dtype=torch.int64, device="cpu")
        if ranks.numel() == 0:
            raise MeshError("DeviceMesh: a mesh needs at least one rank, but the array is empty.")
        if len(set(ranks.flatten().tolist())) != ranks.numel():
            raise MeshError(f"DeviceMesh: a rank appears twice in {ranks.tolist()}.")
        self.device_type = device_type
        self.mesh = ranks.reshape(1) if ranks.ndim == 0 else ranks
        self.mesh_dim_names = _checked_names(mesh_dim_names, self.mesh.ndim)
        self.links = links_of(links, self.mesh.ndim)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def size(self, mesh_dim: int | None = None) -> int:
        return self.mesh.numel() if mesh_dim is None else self.mesh.size(mesh_dim)

    def __getitem__(self, names: str | Sequence[str]) -> VirtualMesh:
        """The sub-mesh of the named axes that the first rank is in."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        have = self.mesh_dim_names
        if have is None or any(name not in have for name in wanted):
            raise MeshError(f"mesh[{names!r}]: the axes of this mesh are {have or 'not named'}.")
        axes = [have.index(name) for name in wanted]
        if axes != sorted(set(axes)):
            raise MeshError(f"mesh[{names!r}]: name each axis once, in the mesh's order {have}.")
        index = tuple(slice(None) if axis in axes else 0 for axis in range(self.ndim))
        links = [self.links[axis] for axis in axes]
        topology(self)
        return VirtualMesh(self.device_type, self.mesh[index], mesh_dim_names=wanted, links=links)

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        raise MeshError("get_group: a virtual mesh has no process groups; run under torchrun.")

    def get_rank(self) -> int:
        raise MeshError(_no_single_rank("get_rank"))

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        raise MeshError(_no_single_rank("get_local_rank"))

    def get_coordinate(self) -> list[int]:
        raise MeshError(_no_single_rank("get_coordinate"))

    def __enter__(self) -> VirtualMesh:
        """Make it the mesh of all calls in the block that name none."""
        enter_mesh(self)
        return self

    def __exit__(self, *_: object) -> None:
        leave_mesh()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualMesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        ranks = tuple(self.mesh.flatten().tolist())
        return self.device_type, self.shape, ranks, self.mesh_dim_names, self.links

    def __repr__(self) -> str:
        return f"VirtualMesh({self.device_type!r}, {_axes_text(self.shape, self.mesh_dim_names)})"


AnyMesh = VirtualMesh | TorchDeviceMesh


def _no_single_rank(method: str) -> str:
    return (
        f"{method}: in a virtual mesh this process is every rank, so there is no single answer.\n"
        "For a value that differs by rank use shardwise.per_rank(mesh, fn); "
        "to print once use shardwise.is_first_rank()."
    )


def _checked_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    got = tuple(names)
    if len(got) != ndim or len(set(got)) != ndim:
        raise MeshError(
            f"mesh_dim_names: {ndim} different names are needed for a mesh of {ndim} axes, "
            f"but got {got}."
        )
    return got


def _axes_text(shape: Sequence[int], names: Sequence[str] | None) -> str:
    if names is None:
        return "x".join(map(str, shape))
    return ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))


def distributed_is_on() -> bool:
    """Whether this process is one of several: initialised, or started by torchrun."""
    if not dist.is_available():
        return False
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dist.is_initialized() or all(name in os.environ for name in needed)


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    links: LinkLike | Sequence[LinkLike] | None = None,
    lockstep: bool = False,
) -> AnyMesh:
    """Make a mesh: over the ranks of `torch.distributed` if there are any, else virtual.

    `links` says what connects the ranks along each axis: a `Link`, a preset such as "ethernet", or
    one per axis, the same for as long as the mesh lives. Processes that are told nothing read what
    `shardwise calibrate` has measured; all take what the mesh's first rank has. With `lockstep` the
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
    names = _checked_names(mesh_dim_names, len(shape))
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


class _DeviceMeshMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, VirtualMesh | TorchDeviceMesh)


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
        links: LinkLike | Sequence[LinkLike] | None = None,
    ) -> AnyMesh:
        if not distributed_is_on():
            return VirtualMesh(device_type, mesh, mesh_dim_names=mesh_dim_names, links=links)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        made = TorchDeviceMesh(device_type, torch.as_tensor(mesh), mesh_dim_names=names)
        return _made(made, links)


def _made(mesh: TorchDeviceMesh, links: LinkLike | Sequence[LinkLike] | None) -> TorchDeviceMesh:
    """A mesh over processes, with its links and its flattened groups: every rank comes here."""
    ranks = tuple(mesh.mesh.flatten().tolist())
    own = None if links is None else links_of(links, mesh.ndim)
    agreed = told_by_first(mesh.device_type, tuple(mesh.shape), ranks, own)
    known = _find(mesh)
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


def _flattened_groups(where: Topology) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A process group for each run of adjacent axes that has none yet, made in one order by all.

    `new_group` needs every rank of the world, also those that the group or the mesh leaves out.
    """
    assert isinstance(where.mesh, TorchDeviceMesh) and dist.group.WORLD is not None
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    axes = [axis for axis in range(where.ndim) if where.shape[axis] > 1]
    everyone = set(range(dist.get_world_size()))
    for count in range(2, len(axes) + 1):
        for first in range(len(axes) - count + 1):
            run = tuple(axes[first : first + count])
            rest = [axis for axis in range(where.ndim) if axis not in run]
            for start in where.group_coords((0,) * where.ndim, rest):
                members = where.group_coords(start, run)
                ranks = [where.rank_of(member) for member in members]
                if set(ranks) == everyone:
                    groups[run] = dist.group.WORLD
                    continue
                made = dist.new_group(ranks)
                if where.coordinate in members:
                    groups[run] = made
    return groups


class Topology:
    """What a mesh is: its shape, names and ranks, where this process stands in it. Interned."""

    __slots__ = (
        "__weakref__",
        "coordinate",
        "device_type",
        "groups",
        "links",
        "mesh",
        "names",
        "ndim",
        "ranks",
        "shape",
        "virtual",
        "world",
    )

    mesh: AnyMesh
    device_type: str
    shape: tuple[int, ...]
    ndim: int
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    virtual: bool
    coordinate: Coord | None
    links: tuple[Link, ...]
    groups: dict[tuple[int, ...], dist.ProcessGroup]
    world: World | None

    def __init__(self, mesh: AnyMesh, links: tuple[Link, ...]) -> None:
        self.mesh = mesh
        self.device_type = mesh.device_type
        self.shape = tuple(mesh.shape)
        self.ndim = len(self.shape)
        self.names = tuple(mesh.mesh_dim_names or map(str, range(self.ndim)))
        self.ranks = tuple(mesh.mesh.flatten().tolist())
        self.virtual = isinstance(mesh, VirtualMesh)
        here = None if isinstance(mesh, VirtualMesh) else mesh.get_coordinate()
        self.coordinate = None if here is None else tuple(here)
        self.links = links
        self.groups = {}
        self.world = None if self.virtual else current_world()

    def refuse_destroyed(self) -> None:
        """An error if the process group of this mesh was destroyed."""
        if self.world is not None and not self.world.is_current():
            raise MeshError(_destroyed(str(self)))

    def coords_here(self, axes: Sequence[int]) -> tuple[Coord, ...]:
        """The coordinates that live in this process, the axes outside `axes` fixed at 0 if virtual.

        A virtual mesh stores once what does not vary over an axis: one coordinate stands for all.
        """
        if not self.virtual:
            return () if self.coordinate is None else (self.coordinate,)
        shape = tuple(size if axis in axes else 1 for axis, size in enumerate(self.shape))
        return all_coords(shape)

    def group_coords(self, coord: Coord, axes: Sequence[int]) -> tuple[Coord, ...]:
        """The coordinates that differ from `coord` only in `axes`, first axis slowest."""
        return _group_coords(self.shape, coord, tuple(axes))

    def rank_of(self, coord: Coord) -> int:
        """The rank at a coordinate."""
        index = 0
        for size, place in zip(self.shape, coord, strict=True):
            index = index * size + place
        return self.ranks[index]

    def __repr__(self) -> str:
        names = self.mesh.mesh_dim_names
        return f"({_axes_text(self.shape, names)})"


class DestroyedMesh:
    """What is left of a mesh whose process group was destroyed: it has a shape and no groups."""

    def __init__(self, mesh: TorchDeviceMesh) -> None:
        self.device_type = mesh.device_type
        self.mesh = mesh.mesh
        self.mesh_dim_names = mesh.mesh_dim_names
        self.shape = tuple(mesh.shape)
        self.ndim = len(self.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        return self.mesh.numel() if mesh_dim is None else self.mesh.size(mesh_dim)

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        raise MeshError(_destroyed(_axes_text(self.shape, self.mesh_dim_names)))

    def __repr__(self) -> str:
        return f"DestroyedMesh({_axes_text(self.shape, self.mesh_dim_names)})"


def _destroyed(mesh: str) -> str:
    return (
        f"the process group of mesh {mesh} was destroyed, by destroy_process_group() or because "
        "another one was made since: its tensors cannot communicate any more. What this rank holds "
        "of them is still there, x.to_local(); make a new mesh and give them to it with "
        "DTensor.from_local or distribute_tensor."
    )


@at_end
def _forget_groups(world: World) -> None:
    """Let go of all groups of a world that was destroyed; tensors may keep their `Topology`."""
    with _lock:
        for key, where in list(_topologies.items()):
            if where.world is world:
                del _topologies[key]
                where.groups.clear()
                where.mesh = DestroyedMesh(where.mesh)  # type: ignore[assignment, arg-type]


@lru_cache(maxsize=65536)
def _group_coords(shape: tuple[int, ...], coord: Coord, axes: tuple[int, ...]) -> tuple[Coord, ...]:
    members = []
    for part in all_coords(tuple(shape[axis] for axis in axes)):
        member = list(coord)
        for axis, index in zip(axes, part, strict=True):
            member[axis] = index
        members.append(tuple(member))
    return tuple(members)


_lock = threading.Lock()
_topologies: dict[tuple[object, ...], Topology] = {}


def topology(mesh: AnyMesh | None, links: tuple[Link, ...] | None = None) -> Topology:
    """The interned `Topology` of a mesh: meshes that are the same have the same one.

    None is the mesh of the innermost `with mesh:`.
    """
    mesh = _entered() if mesh is None else mesh
    found = _find(mesh)
    if found is None:
        own = _links(mesh) if links is None else links
        if not isinstance(mesh, VirtualMesh) and root_mesh(mesh) is not mesh:
            topology(root_mesh(mesh))
        made = Topology(mesh, own)
        _check_groups(made)
        with _lock:
            found = _topologies.setdefault(_key(mesh), made)
    return found


def _entered() -> AnyMesh:
    meshes = current().meshes
    found: AnyMesh | None = meshes[-1] if meshes else entered_torch_mesh()
    if found is None:
        raise MeshError(
            "a device mesh is needed, but none is given. Give device_mesh=, or make the call in "
            "`with mesh:`. Make a mesh with shardwise.init_device_mesh(device_type, shape)."
        )
    return found


def _check_groups(where: Topology) -> None:
    """An error if the groups of a mesh over processes were destroyed since it was made.

    PyTorch finds them by name, and may give one of that name that was made since.
    """
    if isinstance(where.mesh, VirtualMesh) or where.coordinate is None:
        return
    for axis in range(where.ndim):
        members = list(map(where.rank_of, where.group_coords(where.coordinate, (axis,))))
        try:
            ranks = dist.get_process_group_ranks(where.mesh.get_group(axis))
        except RuntimeError as error:
            if "resolve" not in str(error):
                raise
            ranks = []
        if sorted(ranks) != sorted(members):
            raise MeshError(_destroyed(str(where)))


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
    found = _topologies.get((number, device_type, tuple(shape), tuple(ranks), names))
    if found is None and names is not None:
        found = _part_of_known(device_type, tuple(ranks), tuple(names))
    if found is not None:
        return found
    text = f"{device_type}, {_axes_text(shape, names)}, ranks {list(ranks)}"
    everybody = list(range(dist.get_world_size())) if dist.is_initialized() else None
    if sorted(ranks) != everybody:
        raise MeshError(
            f"a tensor was saved on a mesh of processes ({text}), which does not exist in this "
            "process. Make it with shardwise.init_device_mesh before the file is loaded, in as "
            "many processes; for another mesh save full_tensor() and use distribute_tensor after "
            "loading it."
        )
    _wait_for_all(text)
    mesh = TorchDeviceMesh(device_type, torch.tensor(ranks).view(shape), mesh_dim_names=names)
    return topology(_made(mesh, [Link(*pair) for pair in links]))


_LOAD_SECONDS = 60.0
"""How long a rank that loads a tensor waits for the others before it makes the mesh with them."""


class _Made:
    """How many meshes the ranks have made of files: every rank counts alike."""

    times = 0


def _wait_for_all(mesh: str) -> None:
    """Return when every rank is about to make a mesh; an error if some do not come."""
    store, here = shared_store(), dist.get_rank()
    name = f"shardwise/loading/{_Made.times}/{mesh}"
    keys = [f"{name}/{rank}" for rank in range(dist.get_world_size())]
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
    _Made.times += 1


def _part_of_known(
    device_type: str, ranks: tuple[int, ...], names: tuple[str, ...]
) -> Topology | None:
    """The sub-mesh of a known mesh over processes that has these axes and ranks."""
    for whole in list(_topologies.values()):
        if isinstance(whole.mesh, VirtualMesh) or whole.device_type != device_type:
            continue
        axes = [whole.names.index(name) for name in names if name in whole.names]
        root = root_mesh(whole.mesh) is whole.mesh and whole.coordinate is not None
        if not root or len(axes) != len(names) or axes != sorted(axes):
            continue
        assert whole.coordinate is not None
        if tuple(map(whole.rank_of, whole.group_coords(whole.coordinate, axes))) == ranks:
            return topology(whole.mesh[names])
    return None


def _find(mesh: Any) -> Topology | None:
    if not isinstance(mesh, VirtualMesh | TorchDeviceMesh):
        places = isinstance(mesh, (list, tuple)) and all(isinstance(p, Placement) for p in mesh)
        hint = f" For placements alone write placements={mesh!r}." if places else ""
        raise MeshError(
            f"a device mesh is needed, but got {type(mesh).__name__}. "
            "Make one with shardwise.init_device_mesh(device_type, shape)." + hint
        )
    return _topologies.get(_key(mesh))


def _key(mesh: AnyMesh) -> tuple[object, ...]:
    if isinstance(mesh, VirtualMesh):
        return mesh._key()
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    ranks = tuple(mesh.mesh.flatten().tolist())
    return current_world().number, mesh.device_type, tuple(mesh.shape), ranks, names


def _links(mesh: AnyMesh) -> tuple[Link, ...]:
    """The links of a mesh that was not made here: those of the mesh that it is a part of."""
    if isinstance(mesh, VirtualMesh):
        return mesh.links
    root = root_mesh(mesh)
    whole = None if root is mesh else _topologies.get(_key(root))
    named = {} if whole is None else dict(zip(whole.names, whole.links, strict=True))
    default = links_of(None, 1)[0]
    return tuple(named.get(name, default) for name in mesh.mesh_dim_names or [""] * mesh.ndim)


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
