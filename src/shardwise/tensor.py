"""`DTensor`: a tensor on a mesh, and the ways in and out of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .deferred import DeferredView
from .dispatch import dispatch
from .errors import LayoutError, MeshError
from .geometry import contiguous_stride, stride_like
from .mesh import AnyMesh, Coord, Topology, topology
from .per_rank import PerRank
from .placement import Partial, Placement, Replicate, Shard
from .plans import moved
from .spec import DTensorSpec, TensorMeta, checked_placements, default_placements
from .wrapper import Wrapper, share_cell, wrap

__all__ = ["DTensor", "distribute_tensor", "keep_partial_grads", "place_local"]


class DTensor(Wrapper):
    """A tensor laid out on a device mesh; every PyTorch operation on it gives the single-device answer.

    Make one with `distribute_tensor`, `DTensor.from_local` or a factory such as `shardwise.zeros`.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    >>> (x * 2).sum().item()
    30.0
    """

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise TypeError(
            "DTensor() cannot be called. Use distribute_tensor(tensor, mesh, placements) for a whole "
            "tensor or DTensor.from_local(local, mesh, placements) for the parts."
        )

    # --- the layout ------------------------------------------------------------------------

    @property
    def device_mesh(self) -> AnyMesh:
        """The mesh the tensor is on."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._spec.placements

    @property
    def cuts(self) -> tuple[tuple[int, ...] | None, ...]:
        """For each dim the sizes of its pieces, None if it is cut as `torch.chunk` would."""
        return self._spec.cuts or (None,) * self.ndim

    # --- ways in and out ---------------------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor | PerRank,
        device_mesh: AnyMesh,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
    ) -> DTensor:
        """A DTensor of local tensors: the one of this rank, or a `PerRank` in a virtual mesh.

        The global shape is inferred as if all ranks had local tensors of this size. `run_check` compares
        the ranks instead: it finds unequal sizes, infers the true shape, and makes replicas equal
        to the first rank's. `shape` and `stride` give the global ones without communication.
        """
        return _from_local(local_tensor, device_mesh, placements, run_check, shape, stride)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Any:
        """The local tensor of this rank; in a virtual mesh a `PerRank` with that of every rank.

        `grad_placements` says how the gradients of the local tensors make up the global one. By
        default it is the tensor's own layout: the gradient of a replicated tensor is taken to be
        the same on all ranks, that of a partial one to be replicated.
        """
        return _to_local(self, grad_placements)

    def full_tensor(self) -> torch.Tensor:
        """The whole value as a plain tensor, on every rank."""
        whole = self.redistribute(placements=default_placements(self._spec.topology))
        return _WholeLocal.apply(whole)  # type: ignore[no-any-return]

    def redistribute(
        self,
        device_mesh: AnyMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        cuts: Sequence[Sequence[int] | None] | None = None,
        async_op: bool = False,
    ) -> DTensor:
        """The same tensor in another layout.

        `cuts` gives for each dim the sizes of its pieces, where they shall not be `torch.chunk`'s.

        >>> import torch, shardwise
        >>> from shardwise import Replicate, Shard
        >>> mesh = shardwise.init_device_mesh("cpu", (2,))
        >>> x = shardwise.distribute_tensor(torch.arange(5), mesh, [Replicate()])
        >>> x.redistribute(placements=[Shard(0)], cuts=[(1, 4)]).to_local().parts
        (tensor([0]), tensor([1, 2, 3, 4]))
        """
        spec = self._spec
        where = spec.topology if device_mesh is None else topology(device_mesh)
        if where is not spec.topology:
            raise MeshError(
                f"redistribute: from mesh {spec.topology} to another mesh {where} is not supported "
                "yet. Gather with full_tensor() and distribute again."
            )
        places = checked_placements("redistribute", where, placements, self.ndim)
        target = DTensorSpec(where, places, spec.meta, cuts=cuts)
        return _Redistribute.apply(self, target)  # type: ignore[no-any-return]

    # --- values ------------------------------------------------------------------------------

    def tolist(self) -> Any:
        """The global value as nested lists."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The global value as a NumPy array."""
        return self.full_tensor().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        array = self.full_tensor().detach().numpy()
        return array if dtype is None else array.astype(dtype)

    def __format__(self, spec: str) -> str:
        if self.ndim == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Layout and local part; nothing is communicated. `full_tensor()` shows the values."""
        text = f"DTensor({self._spec!r}"
        if isinstance(self, DeferredView):
            local = "a view not read yet"
        elif self._spec.topology.virtual:
            shapes = [list(part.shape) for part in self._locals]
            local = f"local={shapes}"
        else:
            local = f"local={self._locals[0]!r}" if self._locals else "not on this rank"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{text}, {local}{grad})"

    # --- gradients of leaves -------------------------------------------------------------------

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        super().requires_grad_(requires_grad)
        _watch_leaf(self)
        return self

    @property
    def requires_grad(self) -> bool:
        return bool(_requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        _requires_grad.__set__(self, value)
        _watch_leaf(self)

    # --- copies ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        found = memo.get(id(self))
        if found is None:
            if not self.is_leaf:
                raise RuntimeError("Only leaf DTensors can be deep-copied: detach() it first.")
            found = wrap(self._spec, tuple(part.clone() for part in self._locals))
            memo[id(self)] = found
            found.__dict__.update(_plain_attributes(self))
            if self.requires_grad:
                found.requires_grad_()
            if self.grad is not None:
                found.grad = self.grad.__deepcopy__(memo)
        return found  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = _plain_attributes(self)
        return _restore, (self._spec, self._locals, self.requires_grad, state)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"_local{index}" for index in range(len(self._locals))]
        for name, part in zip(names, self._locals, strict=True):
            setattr(self, name, part)
        return names, self._spec

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], spec: Any, size: Any, stride: Any) -> Any:
        return wrap(spec, tuple(inner.values()))


_requires_grad: Any = torch.Tensor.requires_grad
_OWN = ("_spec", "_locals", "_cell", "_memo", "_base", "_how", "_seen", "_value", _watched := "_watched")


def _plain_attributes(tensor: DTensor) -> dict[str, Any]:
    return {
        k: v for k, v in tensor.__dict__.items() if k not in _OWN and not k.startswith("_local")
    }


def _restore(
    spec: DTensorSpec, local: tuple[torch.Tensor, ...], requires_grad: bool, state: dict[str, Any]
) -> DTensor:
    made: DTensor = wrap(spec, local)
    made.__dict__.update(state)
    return made.requires_grad_() if requires_grad else made


class _Deferred(DeferredView, DTensor):
    """A DTensor that is a deferred view."""


Wrapper.public = DTensor
Wrapper.deferred = _Deferred  # type: ignore[attr-defined]


# --- gradients of leaves -----------------------------------------------------------------------


class _Grads:
    keep_partial = False


@contextmanager
def keep_partial_grads() -> Any:
    """Leave the gradients of leaves partial, so that they accumulate without communication.

    Redistribute them when they are needed: `p.grad = p.grad.redistribute(placements=p.placements)`.
    """
    before, _Grads.keep_partial = _Grads.keep_partial, True
    try:
        yield
    finally:
        _Grads.keep_partial = before


def _watch_leaf(tensor: Any) -> None:
    """See to it that the gradient of a leaf arrives in the leaf's own layout."""
    if tensor.is_leaf and _requires_grad.__get__(tensor) and not hasattr(tensor, _watched):
        setattr(tensor, _watched, True)
        tensor.register_hook(_LikeLeaf(tensor._spec))


class _LikeLeaf:
    __slots__ = ("spec",)

    def __init__(self, spec: DTensorSpec) -> None:
        self.spec = spec

    def __call__(self, grad: Any) -> Any:
        if not isinstance(grad, DTensor):
            return distribute_tensor(grad, self.spec.mesh, self.spec.placements, src_data_rank=None)
        if _Grads.keep_partial and grad._spec.sums:
            return grad
        target = DTensorSpec._intern(
            self.spec.topology, _not_partial(self.spec), grad._spec.meta, self.spec.cuts
        )
        return grad if grad._spec is target else _Redistribute.apply(grad, target)


def _not_partial(spec: DTensorSpec) -> tuple[Placement, ...]:
    return tuple(Replicate() if p.is_partial() else p for p in spec.placements)


# --- autograd functions --------------------------------------------------------------------------


class _Redistribute(torch.autograd.Function):
    """The backward of a redistribution is a redistribution."""

    @staticmethod
    def forward(ctx: Any, value: Any, target: DTensorSpec) -> Any:
        src = value._spec
        ctx.spec = src
        if src is target:
            return wrap(src, value._locals, share_cell(value))
        return wrap(target, moved(value, target, fresh=True))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        back = DTensorSpec._intern(
            ctx.spec.topology, _not_partial(ctx.spec), grad._spec.meta, ctx.spec.cuts
        )
        return _Redistribute.apply(grad, back), None


class _WholeLocal(torch.autograd.Function):
    """From a replicated DTensor to a plain tensor."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        ctx.spec = value._spec
        if not value._locals:
            raise MeshError(f"full_tensor: this rank is not in mesh {value._spec.topology}.")
        return value._locals[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return wrap(_spec_like(ctx.spec, grad), (grad,))


def _spec_like(spec: DTensorSpec, value: torch.Tensor) -> DTensorSpec:
    meta = TensorMeta(tuple(value.shape), tuple(value.stride()), value.dtype)
    return DTensorSpec._intern(spec.topology, spec.placements, meta, spec.cuts)


class _ToLocal(torch.autograd.Function):
    """From a DTensor to its local tensors."""

    @staticmethod
    def forward(ctx: Any, value: Any, grad_spec: DTensorSpec) -> Any:
        ctx.spec = grad_spec
        return tuple(part.view_as(part) for part in value._locals)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return wrap(ctx.spec, tuple(grads)), None


class _FromLocal(torch.autograd.Function):
    """From local tensors to a DTensor."""

    @staticmethod
    def forward(ctx: Any, spec: DTensorSpec, *parts: torch.Tensor) -> Any:
        ctx.spec = spec
        return wrap(spec, tuple(part.view_as(part) for part in parts))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        spec: DTensorSpec = ctx.spec
        back = DTensorSpec._intern(spec.topology, _not_partial(spec), grad._spec.meta, spec.cuts)
        whole = wrap(back, moved(grad, back))
        scale = 1
        for axis, place in enumerate(spec.placements):
            if place.is_partial("avg"):
                scale *= spec.topology.shape[axis]
            elif isinstance(place, Partial) and place.reduce_op not in ("sum", "avg"):
                raise LayoutError(
                    f"the gradient of local tensors that make up a {place!r} is not defined. "
                    "Reduce with redistribute before going on."
                )
        parts = [whole._locals[back.slot(coord)] / scale for coord in spec.slots]
        return None, *parts


def _to_local(tensor: DTensor, grad_placements: Sequence[Placement] | None) -> Any:
    spec = tensor._spec
    if grad_placements is not None:
        places = checked_placements("to_local", spec.topology, grad_placements, tensor.ndim)
        grad_spec = spec.with_placements(places)
    else:
        grad_spec = spec.with_placements(_not_partial(spec), spec.cuts)
        _say_assumption(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        grad_spec = _with_slots(spec, grad_spec)
        parts = _ToLocal.apply(tensor, grad_spec)
    else:
        parts = tensor._locals
    if spec.topology.virtual:
        return PerRank(spec.topology, spec.slot_axes, parts)
    if not parts:
        raise MeshError(f"to_local: this rank is not in mesh {spec.topology}.")
    return parts[0]


def _with_slots(spec: DTensorSpec, grad_spec: DTensorSpec) -> DTensorSpec:
    if spec.topology.virtual and spec.slot_axes != grad_spec.slot_axes:
        raise LayoutError(
            f"to_local: grad_placements {list(grad_spec.placements)} vary over other axes than the "
            f"placements {list(spec.placements)}, which a virtual mesh cannot follow. "
            "Redistribute to a sharded or partial layout before to_local."
        )
    return grad_spec


_said: set[str] = set()


def _say_assumption(tensor: DTensor) -> None:
    replicated = any(place.is_replicate() for place in tensor.placements)
    if replicated and tensor.requires_grad and torch.is_grad_enabled() and "to_local" not in _said:
        _said.add("to_local")
        warnings.warn(
            "to_local() of a replicated DTensor that requires grad: the gradient of its local tensor is "
            "taken to be equal on all ranks. If each rank computes a part of it, say so with "
            "grad_placements=[Partial()]. This is said once.",
            stacklevel=4,
        )


# --- local tensors in ----------------------------------------------------------------------------


def _from_local(
    local: Any,
    device_mesh: AnyMesh,
    placements: Sequence[Placement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> DTensor:
    mesh = topology(device_mesh)
    if isinstance(local, DTensor) or not isinstance(local, (torch.Tensor, PerRank)):
        raise LayoutError(
            f"from_local: a local tensor is needed, but got {type(local).__name__}. "
            "To change the layout of a DTensor use redistribute."
        )
    if isinstance(local, PerRank) and local.mesh is not mesh:
        raise MeshError(f"from_local: the local tensors are of mesh {local.mesh}, not {mesh}.")
    sample = local.parts[0] if isinstance(local, PerRank) else local
    places = checked_placements("from_local", mesh, placements, sample.ndim)
    _check_dtype(places, sample.dtype)
    shapes = _local_shapes(local, mesh, run_check)
    spec = _inferred(mesh, places, shapes, sample, shape, stride)
    parts = place_local(local, spec)
    if run_check and not mesh.virtual:
        parts = _same_replicas(spec, parts)
    return _FromLocal.apply(spec, *parts)  # type: ignore[no-any-return]


def _check_dtype(places: Sequence[Placement], dtype: torch.dtype) -> None:
    for place in places:
        if place.is_partial("avg") and not (dtype.is_floating_point or dtype.is_complex):
            raise LayoutError(f"from_local: {place!r} of {dtype}: the average of integers is no integer.")


def place_local(local: Any, spec: DTensorSpec) -> tuple[torch.Tensor, ...]:
    """The local tensors in the order of the spec's slots."""
    parts = []
    for coord in spec.slots:
        part = local.at(coord) if isinstance(local, PerRank) else local
        if tuple(part.shape) != spec.local_shape(coord):
            raise LayoutError(
                f"from_local: the rank at {coord} holds {list(part.shape)}, but {spec} gives it "
                f"{list(spec.local_shape(coord))}. Use run_check=True to infer the shape from all "
                "ranks, or give shape= and stride=."
            )
        parts.append(part)
    if spec.topology.virtual and not isinstance(local, PerRank) and len(parts) > 1:
        parts = [part.clone() for part in parts]  # ranks do not share memory
    return tuple(parts)


def _local_shapes(local: Any, mesh: Topology, run_check: bool) -> dict[Coord, tuple[int, ...]] | None:
    """The local shape of every rank, if it is known here or shall be asked for."""
    every = mesh.coords_here(range(mesh.ndim))
    if isinstance(local, PerRank):
        return {coord: tuple(local.at(coord).shape) for coord in every}
    if mesh.virtual:
        return dict.fromkeys(every, tuple(local.shape))
    if not run_check or mesh.coordinate is None:
        return None
    mine = torch.tensor(local.shape, dtype=torch.int64, device=mesh.device_type)
    spec = DTensorSpec(
        mesh, [Shard(0)] * mesh.ndim, TensorMeta((len(mesh.ranks) * local.ndim,), (1,), torch.int64)
    )
    ndims = _gathered_ndims(mesh, local.ndim)
    if any(n != local.ndim for n in ndims):
        raise LayoutError(f"from_local: the ranks hold tensors of different numbers of dims: {ndims}.")
    rows = moved(wrap(spec, (mine,)), spec.with_placements(default_placements(mesh)))[0]
    shapes = rows.view(len(mesh.ranks), local.ndim).tolist()
    return dict(zip(mesh.group_coords((0,) * mesh.ndim, range(mesh.ndim)), map(tuple, shapes), strict=True))


def _gathered_ndims(mesh: Topology, ndim: int) -> list[int]:
    mine = torch.tensor([ndim], dtype=torch.int64, device=mesh.device_type)
    meta = TensorMeta((len(mesh.ranks),), (1,), torch.int64)
    spec = DTensorSpec(mesh, [Shard(0)] * mesh.ndim, meta)
    whole = moved(wrap(spec, (mine,)), spec.with_placements(default_placements(mesh)))[0]
    return list(map(int, whole.tolist()))


def _inferred(
    mesh: Topology,
    places: tuple[Placement, ...],
    shapes: dict[Coord, tuple[int, ...]] | None,
    sample: torch.Tensor,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> DTensorSpec:
    """The spec of local tensors with these shapes."""
    sizes: list[int] = []
    cuts: list[tuple[int, ...] | None] = []
    for dim in range(sample.ndim):
        axes = [axis for axis, place in enumerate(places) if place.is_shard(dim)]
        count = 1
        for axis in axes:
            count *= mesh.shape[axis]
        if shapes is None:
            pieces = (sample.shape[dim],) * count
        else:
            pieces = _pieces(mesh, places, shapes, dim, axes)
        sizes.append(sum(pieces))
        cuts.append(pieces if axes else None)
    if shape is not None:
        if shapes is None or tuple(shape) != tuple(sizes):
            cuts = [None] * len(sizes)
        sizes = list(shape)
    if len(sizes) != sample.ndim:
        raise LayoutError(f"from_local: shape {sizes} is given for a local tensor of {sample.ndim} dims.")
    global_stride = tuple(stride) if stride is not None else _global_stride(sample, sizes)
    meta = TensorMeta(tuple(sizes), global_stride, sample.dtype)
    return DTensorSpec(mesh, places, meta, cuts=cuts)


def _pieces(
    mesh: Topology,
    places: tuple[Placement, ...],
    shapes: dict[Coord, tuple[int, ...]],
    dim: int,
    axes: list[int],
) -> tuple[int, ...]:
    pieces = []
    for coord in mesh.group_coords((0,) * mesh.ndim, axes):
        others = [axis for axis in range(mesh.ndim) if axis not in axes]
        found = {shapes[member][dim] for member in mesh.group_coords(coord, others)}
        if len(found) > 1:
            raise LayoutError(
                f"from_local: the ranks disagree on the size of dim {dim}: {sorted(found)}, but "
                f"{list(places)} on {mesh} means that they hold the same. "
                f"If each holds a part of the dim, use Shard({dim})."
            )
        pieces.append(found.pop())
    return tuple(pieces)


def _global_stride(sample: torch.Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of the global tensor with the local one's order of dims."""
    if sample.is_contiguous():
        return contiguous_stride(sizes)
    order = sorted(range(sample.ndim), key=lambda dim: -sample.stride(dim))
    return stride_like(sizes, order)


def _same_replicas(spec: DTensorSpec, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """On axes where the ranks shall hold the same, all take the value of the axis's first rank."""
    axes = [axis for axis, place in enumerate(spec.placements) if place.is_replicate()]
    if not axes or not parts:
        return parts
    places = [Partial("sum") if axis in axes else p for axis, p in enumerate(spec.placements)]
    first = all(spec.slots[0][axis] == 0 for axis in axes)
    mine = parts[0].detach() if first else torch.zeros_like(parts[0])
    as_sum = wrap(DTensorSpec(spec.topology, places, spec.meta, cuts=spec.cuts), (mine,))
    whole = moved(as_sum, spec)[0]
    return (parts[0] + (whole - parts[0]).detach() if parts[0].requires_grad else whole,)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: AnyMesh,
    placements: Sequence[Placement] | None = None,
    *,
    cuts: Sequence[Sequence[int] | None] | None = None,
    src_data_rank: int | None = 0,
) -> DTensor:
    """A whole tensor laid out on a mesh: a leaf, with the input's `requires_grad`.

    All ranks take the value of `src_data_rank`, counted in the mesh; with None each rank's own tensor is
    taken to be the whole value already, and nothing is communicated. `cuts` gives for each dim the
    sizes of its pieces, where they shall not be `torch.chunk`'s.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> shardwise.distribute_tensor(torch.zeros(5, 2), mesh, [shardwise.Shard(0)])
    DTensor(float32[5, 2] [S(0)] on (2), local=[[3, 2], [2, 2]])
    """
    if isinstance(tensor, DTensor):
        raise LayoutError(
            f"distribute_tensor: the tensor is a DTensor already: {tensor._spec}. Use redistribute."
        )
    mesh = topology(device_mesh)
    places = checked_placements("distribute_tensor", mesh, placements, tensor.ndim)
    value = tensor.detach().to(mesh.device_type)
    order = sorted(range(value.ndim), key=lambda dim: -value.stride(dim))
    meta = TensorMeta(tuple(value.shape), stride_like(value.shape, order), value.dtype)
    whole = DTensorSpec(mesh, default_placements(mesh), meta)
    target = DTensorSpec(mesh, places, meta, cuts=cuts)
    parts: tuple[torch.Tensor, ...] = (value,) if whole.slots else ()
    if src_data_rank is not None and not mesh.virtual:
        parts = _from_source(whole, parts, src_data_rank)
    local = moved(wrap(whole, parts), target, fresh=True)
    made: DTensor = wrap(target, local)
    return made.requires_grad_(tensor.requires_grad)


def _from_source(
    whole: DTensorSpec, parts: tuple[torch.Tensor, ...], source: int
) -> tuple[torch.Tensor, ...]:
    """The value of one rank on every rank of the mesh."""
    import torch.distributed as dist

    from .engine import engine_of
    from .plain import digest

    mesh = whole.topology
    if not 0 <= source < len(mesh.ranks):
        raise LayoutError(
            f"distribute_tensor: src_data_rank={source}, but mesh {mesh} has {len(mesh.ranks)} ranks."
        )
    if not parts:
        return parts
    shape_digest = digest(torch.tensor([parts[0].ndim, *parts[0].shape, hash(str(parts[0].dtype)) % 997]))
    if not engine_of(mesh).check_equal(mesh, shape_digest):
        raise LayoutError(
            f"distribute_tensor: the ranks give tensors of different shape or dtype; this rank "
            f"gives {parts[0].dtype}{list(parts[0].shape)}. All must give the same shape and dtype; use "
            "DTensor.from_local(..., run_check=True) for parts of different sizes."
        )
    assert mesh.coordinate is not None
    value = parts[0].contiguous().clone()
    raw = value.view(-1).view(torch.uint8)
    coords = list(mesh.group_coords((0,) * mesh.ndim, range(mesh.ndim)))
    origin = coords[source]
    for axis in range(mesh.ndim):
        group = mesh.mesh.get_group(axis)  # type: ignore[union-attr]
        from_coord = (*mesh.coordinate[:axis], origin[axis], *mesh.coordinate[axis + 1 :])
        if all(mesh.coordinate[later] == origin[later] for later in range(axis + 1, mesh.ndim)):
            dist.broadcast(raw, mesh.rank_of(from_coord), group=group)
    return (value,)
