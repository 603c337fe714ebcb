"""`DTensorSpec`: the layout of a tensor on a mesh. Immutable, interned: identity is equality."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import compress
from math import prod
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch

from ..errors import LayoutError, need, public
from .geometry import Box, Cuts, box_shape, chunk_cuts, intervals
from .layout import DimMap, Layout
from .make_mesh import described, described_mesh
from .mesh import AnyMesh, Coord, Topology, topology
from .placement import Partial, Placement, Replicate, Shard, block_groups, split_placements

Groups = tuple[tuple[int, ...], ...]
"""For each dim the sizes it is the product of, outer first."""

Placements: TypeAlias = Sequence[Placement] | Mapping[str, Placement]
"""One placement per mesh axis, or placements by axis name: an axis that is not named replicates."""


class TensorMeta(NamedTuple):
    """Global shape, stride and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def repeated(self) -> list[int]:
        """The dims of stride 0: every place along them is the same memory."""
        pairs = enumerate(zip(self.shape, self.stride, strict=True))
        return [dim for dim, (size, step) in pairs if step == 0 and size > 1]

    @property
    def overlaps(self) -> bool:
        """True if two elements may share memory, as in an `expand` or in windows of `unfold`.

        As in PyTorch some strides are taken to overlap that do not: to know is expensive.
        """
        if 0 in self.shape:
            return False
        span = 0
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if step <= span:
                    return True
                span += step * (size - 1)
        return False


def default_placements(mesh: Topology) -> tuple[Placement, ...]:
    """Replicate on every axis."""
    return (Replicate(),) * mesh.ndim


def checked_placements(
    what: str, mesh: Topology, placements: object, ndim: int | None
) -> tuple[Placement, ...]:
    """`placements` as a tuple, negative dims made positive, or an error that says what is wrong."""
    if isinstance(placements, Placement):
        texts = [placements.code, *["Replicate()"] * (mesh.ndim - 1)]
        raise LayoutError(
            f"{what}: placements must be a list with one placement for each of the {mesh.ndim} "
            f"axes of mesh {mesh}, but got {placements.code}. Write [{', '.join(texts)}]."
        )
    if placements is None:
        return default_placements(mesh)
    if isinstance(placements, Mapping):
        placements = _by_axis_name(what, mesh, placements)
    if isinstance(placements, str) or not isinstance(placements, Iterable):
        raise LayoutError(f"{what}: placements must be a sequence, but got {placements!r}.")
    given = tuple(placements)
    for entry in given:
        if not isinstance(entry, Placement):
            theirs = type(entry).__module__.startswith("torch.")
            hint = " It is PyTorch's class: import shardwise's own." if theirs else ""
            use = "Use Replicate(), Shard(dim) or Partial(op)."
            raise LayoutError(f"{what}: {entry!r} is not a placement. {use}{hint}")
    if len(given) != mesh.ndim:
        texts = [place.code for place in (*given, *default_placements(mesh))][: mesh.ndim]
        raise LayoutError(
            f"{what}: {len(given)} placements {list(given)} were given for the {mesh.ndim} axes of "
            f"mesh {mesh}. Give one per axis, such as [{', '.join(texts)}]."
        )
    if ndim is None:
        return given
    return tuple([_normal(what, entry, ndim) for entry in given])


def _by_axis_name(what: str, mesh: Topology, given: Mapping[Any, Any]) -> list[Any]:
    """One placement per axis, of those given by name."""
    if mesh.mesh.mesh_dim_names is None:
        raise LayoutError(
            f"{what}: the placements {dict(given)} name axes, but those of mesh {mesh} have no "
            "names. Give init_device_mesh(..., mesh_dim_names=), or one placement per axis."
        )
    for name in given:
        if name not in mesh.names:
            have = ", ".join(map(repr, mesh.names))
            raise LayoutError(f"{what}: mesh {mesh} has no axis {name!r}. Its axes are {have}.")
    return [given.get(name, Replicate()) for name in mesh.names]


def _normal(what: str, placement: Placement, ndim: int) -> Placement:
    if not isinstance(placement, Shard) or 0 <= placement.dim < ndim:
        return placement
    if not -ndim <= placement.dim < ndim:
        have = f"dims {-ndim} to {ndim - 1}" if ndim else "no dim to shard: use Replicate()"
        raise LayoutError(f"{what}: {placement!r} of a tensor of {ndim} dims, which has {have}.")
    return Shard(placement.dim % ndim, placement.split)


class DTensorSpec:
    """Mesh, one placement per axis, cuts, and the tensor's global shape, stride and dtype.

    >>> from shardwise import Replicate, Shard, init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2, 2))
    >>> meta = TensorMeta((8, 6), (6, 1), torch.float32)
    >>> spec = DTensorSpec(mesh, (Shard(0), Replicate()), meta)
    >>> spec
    float32[8, 6] [S(0), R] on (2x2)
    >>> spec is DTensorSpec(mesh, (Shard(0), Replicate()), meta)
    True
    """

    topology: Topology
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta | None
    cuts: tuple[Cuts | None, ...] | None

    _interned: WeakValueDictionary[tuple[Any, ...], DTensorSpec] = WeakValueDictionary()
    _lock = threading.Lock()

    @public
    def __new__(
        cls,
        mesh: AnyMesh | Topology,
        placements: Sequence[Placement],
        tensor_meta: TensorMeta | None = None,
        *,
        cuts: Sequence[Sequence[int] | None] | None = None,
    ) -> DTensorSpec:
        where = mesh if isinstance(mesh, Topology) else topology(mesh)
        if tensor_meta is not None and not hasattr(tensor_meta, "_replace"):  # or PyTorch's own
            need("DTensorSpec", tensor_meta, TensorMeta, "a TensorMeta(shape, stride, dtype)")
        ndim = None if tensor_meta is None else len(tensor_meta.shape)
        places = checked_placements("DTensorSpec", where, placements, ndim)
        if tensor_meta is None:
            return cls._intern(where, places, None, None)
        meta = TensorMeta(tuple(tensor_meta.shape), tuple(tensor_meta.stride), tensor_meta.dtype)
        places, groups = block_groups(places, meta.shape)
        normal = None
        if cuts is not None:
            seen, sizes = split_placements(places, groups) if groups else (places, meta.shape)
            normal = _normal_cuts(where, seen, sizes, cuts)
        return cls._intern(where, places, meta, normal)

    @classmethod
    def _intern(
        cls,
        where: Topology,
        places: tuple[Placement, ...],
        meta: TensorMeta | None,
        cuts: tuple[Cuts | None, ...] | None,
    ) -> DTensorSpec:
        key = (where, places, meta, cuts)
        found = cls._interned.get(key)
        if found is None:
            found = object.__new__(cls)
            found.topology = where
            found.placements, found.tensor_meta, found.cuts = places, meta, cuts
            with cls._lock:
                found = cls._interned.setdefault(key, found)
        return found

    @classmethod
    def replicated(cls, mesh: Topology, meta: TensorMeta) -> DTensorSpec:
        """The spec of a tensor that every rank of a mesh holds whole."""
        return cls._intern(mesh, default_placements(mesh), meta, None)

    @classmethod
    @public
    def from_dim_map(
        cls,
        mesh: AnyMesh,
        dim_map: Sequence[int],
        sums: Sequence[int],
        tensor_meta: TensorMeta | None = None,
    ) -> DTensorSpec:
        """The spec in which axis `dim_map[dim]` shards `dim` (-1: none) and `sums` are partial.

        >>> from shardwise import init_device_mesh
        >>> DTensorSpec.from_dim_map(init_device_mesh("cpu", (2, 2)), [-1, 0], [1]).placements
        (S(1), P(sum))
        """
        where = topology(mesh)
        places: list[Placement] = [Replicate()] * where.ndim
        for axis in sums:
            places[axis] = Partial()
        for dim, axis in enumerate(dim_map):
            if axis < 0:
                continue
            if places[axis] is not Replicate():
                raise LayoutError(
                    f"from_dim_map: axis {axis} is used twice in dim_map={list(dim_map)}, "
                    f"sums={list(sums)}. An axis does one thing to a tensor."
                )
            places[axis] = Shard(dim)
        return cls(where, places, tensor_meta)

    # --- the global tensor -----------------------------------------------------------------

    @cached_property
    def meta(self) -> TensorMeta:
        """Shape, stride and dtype, for specs that have them."""
        if self.tensor_meta is None:
            raise LayoutError(f"the spec {self!r} says nothing of a tensor: it has no tensor_meta.")
        return self.tensor_meta

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.meta.shape)

    @property
    def ndim(self) -> int:
        return len(self.meta.shape)

    @property
    def stride(self) -> tuple[int, ...]:
        return self.meta.stride

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    # --- dims in blocks ----------------------------------------------------------------------

    @cached_property
    def groups(self) -> Groups | None:
        """For each dim the sizes it is the product of; None if no axis shards blocks of a dim."""
        return block_groups(self.placements, self.meta.shape)[1]

    @property
    def blocks(self) -> Groups:
        """For each dim the sizes it is the product of."""
        return self.groups or trivial(self.meta.shape)

    @cached_property
    def fine(self) -> DTensorSpec:
        """The same layout with the dims split into `blocks`: every rank holds a box."""
        if self.groups is None:
            return self
        places, _ = split_placements(self.placements, self.groups)
        return self._intern(self.topology, places, fine_meta(self.meta, self.groups), self.cuts)

    @cached_property
    def layout(self) -> Layout:
        """The box of each rank, with the dims split into `blocks`."""
        fine = self.fine
        dims = map(DimMap, fine.dim_axes, fine._tables)
        return Layout(self.topology, tuple(dims), self.partial)

    @cached_property
    def consecutive(self) -> DTensorSpec:
        """This layout, with consecutive pieces in place of pieces of every block."""
        if self.groups is None:
            return self
        places = tuple(Shard(p.dim) if isinstance(p, Shard) else p for p in self.placements)
        return self._intern(self.topology, places, self.tensor_meta, None)

    @property
    def mesh(self) -> AnyMesh:
        """The mesh as the user knows it."""
        return self.topology.mesh

    # --- how it is laid out ----------------------------------------------------------------

    @property
    def dim_map(self) -> list[int]:
        """For each tensor dim the axis that shards it, -1 if none does."""
        dims = [-1] * self.ndim
        for axis, place in enumerate(self.placements):
            if isinstance(place, Shard):
                if dims[place.dim] >= 0:
                    raise LayoutError(f"dim_map: several axes shard dim {place.dim} of {self!r}.")
                dims[place.dim] = axis
        return dims

    @property
    def partial(self) -> tuple[tuple[int, str], ...]:
        """The axes on which the tensor is Partial, with the reductions."""
        places = enumerate(self.placements)
        return tuple([(axis, p.reduce_op) for axis, p in places if isinstance(p, Partial)])

    @cached_property
    def sums(self) -> list[int]:
        """The axes on which the tensor is Partial, with any reduction."""
        return [axis for axis, place in enumerate(self.placements) if place.is_partial()]

    @cached_property
    def reduced(self) -> DTensorSpec:
        """The layout with Replicate on the axes that are Partial, and the others as they are."""
        places = [Replicate() if place.is_partial() else place for place in self.placements]
        return self.with_placements(places, self.cuts)

    @cached_property
    def whole(self) -> DTensorSpec:
        """The layout with Replicate on every axis."""
        return self.replicated(self.topology, self.meta)

    @property
    def num_shards(self) -> int:
        """The number of pieces the tensor is cut into."""
        shards = [place.is_shard() for place in self.placements]
        return prod(compress(self.topology.shape, shards))

    def is_sharded(self) -> bool:
        """True if some axis shards the tensor."""
        return any(place.is_shard() for place in self.placements)

    def is_replicated(self) -> bool:
        """True if every rank holds the whole tensor."""
        return all(place.is_replicate() for place in self.placements)

    @cached_property
    def dim_axes(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor dim the axes that shard it, outer first."""
        axes: list[list[int]] = [[] for _ in range(self.ndim)]
        for axis, place in enumerate(self.placements):
            if isinstance(place, Shard):
                axes[place.dim].append(axis)
        return tuple(map(tuple, axes))

    @cached_property
    def dim_cuts(self) -> tuple[Cuts, ...]:
        """For each tensor dim the sizes of its pieces; one piece if it is not sharded."""
        if self.groups is not None:
            raise LayoutError(
                f"the ranks hold pieces of every block of {self!r}, not consecutive ones. "
                f"Redistribute to {list(self.consecutive.placements)} first."
            )
        shape = self.topology.shape
        every = self.cuts or (None,) * self.ndim
        cuts = []
        for size, axes, own in zip(self.meta.shape, self.dim_axes, every, strict=True):
            counts = tuple([shape[axis] for axis in axes])
            cuts.append(chunk_cuts(size, counts) if own is None else own)
        return tuple(cuts)

    def box(self, coord: Coord) -> Box:
        """The region of the global tensor that the rank at `coord` holds.

        A dim that is sharded block by block has no such interval: it is None.
        """
        if self.groups is None:
            return self.layout.box(coord)
        pieces = iter(self.layout.box(coord))
        found = [[next(pieces) for _ in group] for group in self.groups]
        return tuple([each[0] if len(each) == 1 else None for each in found])  # type: ignore

    def pieces(self, dim: int) -> tuple[tuple[int, int], ...]:
        """The interval of a dim that each of its shards holds."""
        return self._tables[dim]

    @cached_property
    def _tables(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(map(intervals, self.dim_cuts))

    def local_shape(self, coord: Coord) -> tuple[int, ...]:
        """The shape of the local tensor at `coord`."""
        return self._merged(box_shape(self.layout.box(coord)))

    @cached_property
    def largest_shape(self) -> tuple[int, ...]:
        """For each dim the size of its largest piece."""
        return self._merged([max(cuts) for cuts in self.fine.dim_cuts])

    def _merged(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the dims, from those of the dims split into `blocks`."""
        if self.groups is None:
            return tuple(sizes)
        left = iter(sizes)
        return tuple([prod([next(left) for _ in group]) for group in self.groups])

    # --- which local tensors this process holds ----------------------------------------------

    @property
    def slot_axes(self) -> tuple[int, ...]:
        """The axes over which the local tensor varies."""
        return self.layout.axes

    @cached_property
    def slots(self) -> tuple[Coord, ...]:
        """The coordinates of the local tensors held here, in the order in which they are stored."""
        return self.layout.slots

    def slot(self, coord: Coord) -> int:
        """Where the local tensor of `coord` is stored."""
        return self.layout.slot(coord)

    # --- other layouts of the same tensor ------------------------------------------------------

    @public
    def with_placements(
        self,
        placements: Sequence[Placement],
        cuts: Sequence[Sequence[int] | None] | None = None,
    ) -> DTensorSpec:
        """The same tensor in another layout."""
        return DTensorSpec(self.topology, placements, self.meta, cuts=cuts)

    def with_meta(self, meta: TensorMeta) -> DTensorSpec:
        """Another tensor of the same shape in the same layout: other strides or dtype."""
        return self._intern(self.topology, self.placements, meta, self.cuts)

    def resized(self, meta: TensorMeta) -> DTensorSpec:
        """A tensor of other sizes in the same layout, which has no cuts and shards no blocks."""
        made = self._intern(self.topology, self.placements, meta, None)
        known, new = self.__dict__, made.__dict__
        for name in _OF_PLACEMENTS:
            if name in known:
                new[name] = known[name]
        return made

    def layout_text(self) -> str:
        """The placements, with the cuts of dims that are not cut as `torch.chunk` would."""
        text = "[" + ", ".join(map(repr, self.placements)) + "]"
        if self.cuts is None:
            return text
        names = [str(dim) for dim in range(self.ndim)]
        if self.groups is not None:
            pairs = enumerate(self.groups)
            names = [f"{d}.{i}" if i else str(d) for d, each in pairs for i in range(len(each))]
        for name, cuts in zip(names, self.cuts, strict=True):
            if cuts is not None:
                text += f" cuts({name})={list(cuts)}"
        return text

    def __repr__(self) -> str:
        text = f"{self.layout_text()} on {self.topology}"
        if self.tensor_meta is None:
            return text
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.tensor_meta.shape)} {text}"

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensorSpec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        meta = None if self.tensor_meta is None else tuple(self.tensor_meta)
        return rebuild_spec, (described(self.topology), self.placements, meta, self.cuts)


_OF_PLACEMENTS = ("sums", "dim_axes", "slots", "groups")
"""Cached properties that are the same for all sizes, if no axis shards blocks of a dim."""


def rebuild_spec(
    mesh: tuple[Any, ...],
    placements: tuple[Placement, ...],
    meta: tuple[Any, ...] | None,
    cuts: tuple[Cuts | None, ...] | None,
) -> DTensorSpec:
    """The spec of a pickle."""
    if meta is None:
        return DTensorSpec(described_mesh(*mesh), placements, cuts=cuts)
    shape, stride, dtype = meta
    tuples = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride)
    sizes = tuples and all(type(size) is int and size >= 0 for size in (*shape, *stride))
    if not sizes or not isinstance(dtype, torch.dtype):
        raise LayoutError(
            f"a pickle of a DTensor says that it has shape {shape}, stride {stride} and dtype "
            f"{dtype}, which no tensor has: it is damaged."
        )
    return DTensorSpec(described_mesh(*mesh), placements, TensorMeta(*meta), cuts=cuts)


def trivial(shape: Sequence[int]) -> Groups:
    """The groups of a tensor whose dims are not split."""
    return tuple((size,) for size in shape)


def fine_meta(meta: TensorMeta, groups: Groups) -> TensorMeta:
    """The shape, stride and dtype of a tensor with its dims split into `groups`."""
    shape, stride = [], []
    for group, step in zip(groups, meta.stride, strict=True):
        inner = prod(group)
        for size in group:
            inner //= max(size, 1)
            shape.append(size)
            stride.append(step * inner)
    return TensorMeta(tuple(shape), tuple(stride), meta.dtype)


def _normal_cuts(
    where: Topology,
    places: tuple[Placement, ...],
    shape: tuple[int, ...],
    cuts: Sequence[Sequence[int] | None],
) -> tuple[Cuts | None, ...] | None:
    """Cuts checked, and None where they are what `torch.chunk` gives: equal means `is`."""
    need("cuts", cuts, (list, tuple), "a list with the sizes of the pieces of each dim, or None,")
    if len(cuts) != len(shape):
        raise LayoutError(f"cuts: {len(cuts)} entries were given for {len(shape)} dims.")
    normal: list[Cuts | None] = []
    for dim, (size, own) in enumerate(zip(shape, cuts, strict=True)):
        counts = tuple(n for n, p in zip(where.shape, places, strict=True) if p.is_shard(dim))
        if own is None or not counts:
            normal.append(None)
            continue
        need("cuts", own, (list, tuple), f"a list of the sizes of the pieces of dim {dim}")
        sizes = tuple(own)
        if len(sizes) != prod(counts) or sum(sizes) != size or min(sizes) < 0:
            raise LayoutError(
                f"cuts: dim {dim} of size {size} is held in {prod(counts)} pieces by "
                f"{list(places)} on {where}, but the cuts {list(sizes)} are {len(sizes)} sizes "
                f"that add up to {sum(sizes)}. "
                f"Give {prod(counts)} sizes >= 0 that add up to {size}."
            )
        normal.append(None if sizes == chunk_cuts(size, counts) else sizes)
    return None if all(own is None for own in normal) else tuple(normal)
