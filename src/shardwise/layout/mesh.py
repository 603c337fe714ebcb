"""Meshes: an N-d array of ranks, in one process (virtual) or over `torch.distributed`.

A public mesh is a `VirtualMesh` or a `torch.distributed.DeviceMesh`. Everything inside the package
works with its `Topology`: an interned value that says what the mesh is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from .._torch import entered_torch_mesh, root_mesh, traced_as_constant, without_modes
from ..config import current, set_meshes
from ..errors import MeshError, public
from .cost import Link, Links, links_of
from .geometry import all_coords, flat_index
from .placement import Placement
from .world import World, at_end, current_world

Coord = tuple[int, ...]

if TYPE_CHECKING:  # for type checkers a virtual mesh is a DeviceMesh: one annotation serves both
    _MeshInterface = TorchDeviceMesh
else:
    _MeshInterface = object


@public
class VirtualMesh(_MeshInterface):
    """A mesh whose ranks all live in this process, with the interface of PyTorch's `DeviceMesh`.

    >>> mesh = VirtualMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    >>> mesh
    VirtualMesh('cpu', dp=2, tp=2)
    >>> mesh["tp"].size()
    2
    """

    device_type: str
    mesh: torch.Tensor
    mesh_dim_names: tuple[str, ...] | None

    def __init__(
        self,
        device_type: str,
        mesh: torch.Tensor | Sequence[Any],
        *,
        mesh_dim_names: Sequence[str] | None = None,
        links: Links = None,
    ) -> None:
        try:
            ranks = torch.as_tensor(mesh, dtype=torch.int64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            text = f"DeviceMesh: {mesh!r} is no array of ranks: {error}."
            raise MeshError(text) from error
        if ranks.numel() == 0:
            raise MeshError("DeviceMesh: a mesh needs at least one rank, but the array is empty.")
        if len(set(ranks.flatten().tolist())) != ranks.numel():
            raise MeshError(f"DeviceMesh: a rank appears twice in {ranks.tolist()}.")
        self.device_type = device_type
        self.mesh = ranks.reshape(1) if ranks.ndim == 0 else ranks
        self.mesh_dim_names = checked_names(mesh_dim_names, self.mesh.ndim)
        self.links = links_of(links, self.mesh.ndim)
        self.root = self  # the mesh that this one is a part of

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def size(self, mesh_dim: int | None = None) -> int:
        if mesh_dim is None:
            return self.mesh.numel()
        if not isinstance(mesh_dim, int) or not -self.ndim <= mesh_dim < self.ndim:
            raise MeshError(f"size: {mesh_dim!r} is no axis of {self!r}. Give its number.")
        return self.mesh.size(mesh_dim)

    def __getitem__(self, names: str | Sequence[str]) -> VirtualMesh:
        """The sub-mesh of the named axes that the first rank is in."""
        wanted = tuple(names) if isinstance(names, (list, tuple)) else (names,)
        have = self.mesh_dim_names
        if have is None or any(name not in have for name in wanted):
            raise MeshError(f"mesh[{names!r}]: the axes of this mesh are {have or 'not named'}.")
        axes = [have.index(name) for name in wanted]
        if axes != sorted(set(axes)):
            raise MeshError(f"mesh[{names!r}]: name each axis once, in the mesh's order {have}.")
        index = tuple(slice(None) if axis in axes else 0 for axis in range(self.ndim))
        links = [self.links[axis] for axis in axes]
        topology(self)
        part = VirtualMesh(self.device_type, self.mesh[index], mesh_dim_names=wanted, links=links)
        part.root = self.root
        return part

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        raise MeshError("get_group: a virtual mesh has no process groups; run under torchrun.")

    def get_rank(self) -> int:
        raise MeshError(_no_single_rank("get_rank"))

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        raise MeshError(_no_single_rank("get_local_rank"))

    def get_coordinate(self) -> tuple[int, ...]:
        raise MeshError(_no_single_rank("get_coordinate"))

    def __enter__(self) -> VirtualMesh:
        """Make it the mesh of all calls in the block that name none."""
        set_meshes((*current().meshes, self))
        return self

    def __exit__(self, *_: object) -> None:
        set_meshes(current().meshes[:-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualMesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """How a graph of `torch.compile` names this mesh."""
        name = f"virtual_mesh_{id(self)}"
        return name, {name: self}

    def _key(self) -> tuple[object, ...]:
        with without_modes():
            ranks = tuple(self.mesh.flatten().tolist())
        return self.device_type, self.shape, ranks, self.mesh_dim_names, self.links

    def __repr__(self) -> str:
        return f"VirtualMesh({self.device_type!r}, {axes_text(self.shape, self.mesh_dim_names)})"


traced_as_constant(VirtualMesh)
AnyMesh = VirtualMesh | TorchDeviceMesh


def whole_mesh(mesh: AnyMesh) -> AnyMesh:
    """The mesh that `mesh` was taken from, such as that of `mesh["tp"]`; itself if from none."""
    found: AnyMesh = mesh.root if isinstance(mesh, VirtualMesh) else root_mesh(mesh)
    return found


def _no_single_rank(method: str) -> str:
    return (
        f"{method}: in a virtual mesh this process is every rank, so there is no single answer.\n"
        "For a value that differs by rank use shardwise.per_rank(mesh, fn); "
        "to print once use shardwise.is_first_rank()."
    )


def checked_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    """The names of `ndim` axes, or an error."""
    if names is None:
        return None
    got = tuple(names) if isinstance(names, Iterable) else (names,)
    if len(got) != ndim or len(set(map(str, got))) != ndim:
        raise MeshError(
            f"mesh_dim_names: {ndim} different names are needed for a mesh of {ndim} axes, "
            f"but got {got}."
        )
    return got


def axes_text(shape: Sequence[int], names: Sequence[str] | None) -> str:
    """The axes of a mesh for messages: `2x2`, or `dp=2, tp=2`."""
    if names is None:
        return "x".join(map(str, shape))
    return ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))


class Topology:
    """Shape, names and ranks of a mesh, and the coordinate of this process in it. Interned."""

    def __init__(self, mesh: AnyMesh, links: tuple[Link, ...]) -> None:
        self.mesh = mesh
        self.device_type = mesh.device_type
        self.shape = tuple(mesh.shape)
        self.ndim = len(self.shape)
        self.names = tuple(mesh.mesh_dim_names or map(str, range(self.ndim)))
        self.ranks: tuple[int, ...] = tuple(mesh.mesh.flatten().tolist())
        self.virtual = isinstance(mesh, VirtualMesh)
        here = None if isinstance(mesh, VirtualMesh) else mesh.get_coordinate()
        self.coordinate: Coord | None = None if here is None else tuple(here)
        self.links = links
        self.world = None if self.virtual else current_world()
        self.groups = self._axis_groups()
        self.is_flattened = False  # True if `groups` has those of several axes, too

    def _axis_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The process groups by their axes: that of each axis, and of all if they are the world.

        An error if they were destroyed since the mesh was made: PyTorch finds them by name, and may
        give one of that name that was made since.
        """
        found: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if isinstance(self.mesh, VirtualMesh) or self.coordinate is None:
            return found
        for axis in range(self.ndim):
            members = map(self.rank_of, self.group_coords(self.coordinate, (axis,)))
            try:
                found[axis,] = self.mesh.get_group(axis)
                ranks = dist.get_process_group_ranks(found[axis,])
            except RuntimeError as error:
                if "resolve" not in str(error):
                    raise
                ranks = []
            if sorted(ranks) != sorted(members):
                raise MeshError(_destroyed(str(self)))
        run = self.long_axes(range(self.ndim))
        if len(run) > 1 and len(self.ranks) == dist.get_world_size():
            assert dist.group.WORLD is not None
            found[run] = dist.group.WORLD
        return found

    def long_axes(self, axes: Iterable[int]) -> tuple[int, ...]:
        """The axes among `axes` that have more than one rank."""
        return tuple([axis for axis in axes if self.shape[axis] > 1])

    def refuse_destroyed(self) -> None:
        """An error if the process group of this mesh was destroyed."""
        if self.world is not None and not self.world.is_current():
            raise MeshError(_destroyed(str(self)))

    def has_siblings_on(self, other: Topology) -> bool:
        """True if this is a part of a mesh, such as `mesh["dp"]`, and ranks of `other` are in this
        part and in others of that mesh: they do not mean the same ranks by it."""
        if self is other or (whole := whole_mesh(self.mesh)) is self.mesh:
            return False
        own, all_parts, there = set(self.ranks), set(topology(whole).ranks), set(other.ranks)
        return bool(there & own and there & (all_parts - own))

    def coords_here(self, axes: Sequence[int]) -> tuple[Coord, ...]:
        """The coordinates that live in this process, the axes outside `axes` fixed at 0 if virtual.

        A virtual mesh stores once what does not vary over an axis: one coordinate stands for all.
        """
        if not self.virtual:
            return () if self.coordinate is None else (self.coordinate,)
        return self.coords(axes)

    def coords(self, axes: Iterable[int]) -> tuple[Coord, ...]:
        """The coordinates that are 0 on all axes but `axes`, first axis slowest."""
        return self.group_coords((0,) * self.ndim, sorted(axes))

    def group_coords(self, coord: Coord, axes: Sequence[int]) -> tuple[Coord, ...]:
        """The coordinates that differ from `coord` only in `axes`, first axis slowest."""
        return _group_coords(self.shape, coord, tuple(axes))

    def rank_of(self, coord: Coord) -> int:
        """The rank at a coordinate."""
        return self.ranks[flat_index(coord, self.shape, range(self.ndim))]

    def __repr__(self) -> str:
        return f"({axes_text(self.shape, self.mesh.mesh_dim_names)})"


class DestroyedMesh:
    """A mesh whose process group was destroyed: it has a shape and no groups."""

    def __init__(self, mesh: AnyMesh) -> None:
        self.device_type, self.mesh_dim_names = mesh.device_type, mesh.mesh_dim_names
        self.mesh, self.shape, self.ndim = mesh.mesh, tuple(mesh.shape), mesh.ndim


def _destroyed(mesh: str) -> str:
    return (
        f"the process group of mesh {mesh} was destroyed, by destroy_process_group() or because "
        "another one was made since: its tensors cannot communicate any more. What this rank holds "
        "of them is still there, x.to_local(); make a new mesh and give them to it with "
        "DTensor.from_local or distribute_tensor."
    )


def axes_in(part: Topology, whole: Topology) -> tuple[int, ...] | None:
    """The axes of `whole` that `part` consists of, at the place of this process; None if it is no
    part of it."""
    if part is whole:
        return tuple(range(whole.ndim))
    if not set(part.names) <= set(whole.names):
        return None
    axes = tuple([whole.names.index(name) for name in part.names])
    members = whole.group_coords(whole.coordinate or (0,) * whole.ndim, axes)
    return axes if tuple(map(whole.rank_of, members)) == part.ranks else None


def joined(mesh: AnyMesh, other: Topology) -> Topology | None:
    """The mesh with the axes of two parts of one mesh; None if they are not parts of one."""
    root: Any = whole_mesh(mesh)
    names = {*topology(mesh).names, *other.names}
    have = tuple(name for name in root.mesh_dim_names or () if name in names)
    if set(have) != names:
        return None
    whole = topology(root if have == tuple(root.mesh_dim_names) else root[have])
    parts = topology(mesh), other
    return None if any(axes_in(part, whole) is None for part in parts) else whole


@at_end
def _forget_groups(world: World) -> None:
    """Let go of all groups of a world that was destroyed; tensors may keep their `Topology`."""
    for key, where in list(topologies.items()):
        if where.world is world:
            del topologies[key]
            where.groups.clear()
            where.mesh = DestroyedMesh(where.mesh)  # type: ignore[assignment]


@lru_cache(maxsize=65536)
def _group_coords(shape: tuple[int, ...], coord: Coord, axes: tuple[int, ...]) -> tuple[Coord, ...]:
    members = []
    for part in all_coords(tuple(shape[axis] for axis in axes)):
        member = list(coord)
        for axis, index in zip(axes, part, strict=True):
            member[axis] = index
        members.append(tuple(member))
    return tuple(members)


topologies: dict[tuple[object, ...], Topology] = {}


def topology(mesh: AnyMesh | Topology | None, links: tuple[Link, ...] | None = None) -> Topology:
    """The interned `Topology` of a mesh: meshes that are the same have the same one.

    None is the mesh of the innermost `with mesh:`. To find that of a PyTorch mesh takes a while.
    """
    if isinstance(mesh, Topology):
        return mesh
    mesh = _entered() if mesh is None else mesh
    found = find(mesh)
    if found is None:
        own = _links(mesh) if links is None else links
        if not isinstance(mesh, VirtualMesh) and root_mesh(mesh) is not mesh:
            topology(root_mesh(mesh))
        found = topologies.setdefault(_key(mesh), Topology(mesh, own))
    elif found.mesh is not mesh and whole_mesh(found.mesh) is found.mesh:
        found.mesh = mesh  # it may know of what it is a part
    return found


def _entered() -> AnyMesh:
    meshes = current().meshes
    found: AnyMesh | None = meshes[-1] if meshes else entered_torch_mesh()
    if found is None:
        raise MeshError(
            "a device mesh is needed, but none is given. Give one as device_mesh= (mesh= of "
            "fully_shard and replicate), or make the call in `with mesh:`. Make a mesh with "
            "shardwise.init_device_mesh(device_type, shape)."
        )
    return found


def find(mesh: Any) -> Topology | None:
    """The `Topology` of a mesh, if there is one already; an error if it is no mesh."""
    if not isinstance(mesh, VirtualMesh | TorchDeviceMesh):
        places = isinstance(mesh, (list, tuple)) and all(isinstance(p, Placement) for p in mesh)
        hint = f" For placements alone write placements={mesh!r}." if places else ""
        raise MeshError(
            f"a device mesh is needed, but got {type(mesh).__name__}. "
            "Make one with shardwise.init_device_mesh(device_type, shape)." + hint
        )
    return topologies.get(_key(mesh))


def _key(mesh: AnyMesh) -> tuple[object, ...]:
    if isinstance(mesh, VirtualMesh):
        return mesh._key()
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    with without_modes():  # a compiler that traces has fake tensors only
        ranks = tuple(mesh.mesh.flatten().tolist())
    return current_world().number, mesh.device_type, tuple(mesh.shape), ranks, names


def _links(mesh: AnyMesh) -> tuple[Link, ...]:
    """The links of a mesh that was not made here: those of the mesh that it is a part of."""
    if isinstance(mesh, VirtualMesh):
        return mesh.links
    root = root_mesh(mesh)
    whole = None if root is mesh else topologies.get(_key(root))
    named = {} if whole is None else dict(zip(whole.names, whole.links, strict=True))
    default = links_of(None, 1)[0]
    return tuple(named.get(name, default) for name in mesh.mesh_dim_names or [""] * mesh.ndim)
