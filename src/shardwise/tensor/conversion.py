"""`distribute_tensor`, `from_local` and `to_local`: between plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from .._torch import PARAMETER, called_in_graph, is_tracing, untraced
from ..comm import engine_of
from ..comm.dtypes import as_bytes
from ..comm.process import broadcast_from
from ..errors import LayoutError, MeshError, need, public
from ..layout.geometry import memory_order, stride_like
from ..layout.mesh import AnyMesh, Coord, Topology, topology
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import (
    DTensorSpec,
    Placements,
    TensorMeta,
    checked_placements,
    default_placements,
)
from ..layout.user_line import warn_user
from ..redistribute import ordered
from ..storage import policy
from ..storage.operands import in_layout
from ..storage.parts import DTYPES, Part, check_alike, common_order, told_by_all
from ..storage.plain import check_dense, check_equal, digest
from ..storage.wrapper import Wrapper, exposed_locals, wrap
from .autograd import FromLocal, ToLocal, refuse_recording
from .per_rank import PerRank

if TYPE_CHECKING:
    from .dtensor import DTensor


@untraced
@public
def to_local(tensor: DTensor, *, grad_placements: Placements | None = None) -> Any:
    """The local tensor of this rank; in a virtual mesh a `PerRank` with that of every rank.

    `grad_placements` are the placements of the gradient whose parts are the gradients of the
    local tensors; by default those of the tensor, with Replicate in place of Partial. So the
    gradient of a replicated tensor is taken to be the same on all ranks.
    """
    if is_tracing() and tensor._spec.topology.virtual:
        raise NotImplementedError(
            "DTensor.to_local cannot be compiled on a virtual mesh, where it has the local tensors "
            "of all ranks: it runs between the graphs of torch.compile. With fullgraph=True call "
            "it outside, or compile on real processes."
        )
    refuse_recording("to_local", (tensor,))
    spec = tensor._spec
    grad_spec = spec.reduced
    if grad_placements is not None:
        grad_spec = _given_grads("to_local", spec, grad_placements)
    if tensor.requires_grad and torch.is_grad_enabled():
        if grad_placements is None and any(place.is_replicate() for place in spec.placements):
            _warn_of_equal_gradients()
        axes = tuple(sorted({*spec.slot_axes, *grad_spec.slot_axes}))
        parts = ToLocal.apply(tensor, grad_spec, axes)
    else:
        axes = spec.slot_axes
        parts = exposed_locals(tensor)
    if getattr(tensor, PARAMETER, False):
        parts = tuple(map(_as_parameter, parts))
    if spec.topology.virtual:
        return PerRank(spec.topology, axes, parts)
    # A rank that is not in the mesh holds nothing.
    return parts[0] if parts else torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _as_parameter(part: torch.Tensor) -> torch.Tensor:
    """A local tensor of an `nn.Parameter`, for which `isinstance` is true too."""
    made = part if part.grad_fn is not None else part.view_as(part)
    setattr(made, PARAMETER, True)
    return made


def whole_local(whole: Any, grad_placements: Placements) -> torch.Tensor:
    """The local tensor of a replicated DTensor, whose gradient has `grad_placements`."""
    if not whole._locals:
        raise MeshError(f"full_tensor: this rank is not in mesh {whole._spec.topology}.")
    spec = whole._spec
    grad_spec = _given_grads("full_tensor", spec, grad_placements)
    if spec.topology.virtual and grad_spec.slot_axes:
        _refuse_slots("full_tensor", spec, grad_spec)
    local = to_local(whole, grad_placements=grad_placements)
    part: torch.Tensor = local.parts[0] if isinstance(local, PerRank) else local
    return part.clone()


def _given_grads(what: str, spec: DTensorSpec, grad_placements: Placements) -> DTensorSpec:
    """The spec of a gradient with `grad_placements`; its shards must have the shapes of those of
    `spec`."""
    mesh = spec.topology
    places = checked_placements(what, mesh, grad_placements, spec.ndim)
    if places == spec.reduced.placements:
        return spec.reduced
    pairs = zip(spec.placements, places, strict=True)
    alike = all(a is b or not (a.is_shard() or b.is_shard()) for a, b in pairs)
    grad_spec = spec.with_placements(places, spec.cuts if alike else None)
    every = mesh.group_coords((0,) * mesh.ndim, range(mesh.ndim))
    if any(spec.local_shape(coord) != grad_spec.local_shape(coord) for coord in every):
        raise LayoutError(
            f"{what}: grad_placements {list(places)} for local tensors of {spec}: a gradient has "
            "the shape of its local tensor, so it is sharded where the tensor is. Give the same "
            "shards; on the other axes Replicate() or Partial()."
        )
    return grad_spec


def _refuse_slots(what: str, spec: DTensorSpec, grad_spec: DTensorSpec) -> None:
    """Raise that gradients vary over other mesh axes than their local tensors."""
    raise LayoutError(
        f"{what}: grad_placements {list(grad_spec.placements)} of local tensors of {spec}: a "
        "virtual mesh keeps one local tensor for all replicas, which has one gradient. Partial "
        "gradients need Shard or Partial tensors there."
    )


@cache
def _warn_of_equal_gradients() -> None:
    """Warn once in a process."""
    warn_user(
        "to_local() of a replicated DTensor that requires grad: the gradient of its local tensor "
        "is taken to be equal on all ranks. If each rank computes a part of it, say so with "
        "grad_placements=[Partial()]. This is said once."
    )


@public
@called_in_graph
def from_local(
    local_tensor: torch.Tensor | PerRank,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
    *,
    run_check: bool | None = None,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Placements | None = None,
) -> DTensor:
    """A DTensor of local tensors: the one of this rank, or a `PerRank` in a virtual mesh.

    If the tensor is sharded and no `shape` is given, the ranks exchange their local shapes in
    one small all-gather, and the global shape follows, also from unequal parts.

    - `run_check=True` always exchanges them. It also makes replicas equal to the first rank's,
      and compares dtypes, the order of dims in memory, and `requires_grad`.
    - `run_check=False` never does: all ranks are taken to hold tensors of this rank's size.
    - `shape` and `stride` are the global ones; nothing is exchanged then.

    Without `device_mesh` it is the mesh of the innermost `with mesh:`.

    `grad_placements` are the placements of the gradient whose parts are the gradients of the
    local tensors; by default those of the tensor, with Replicate in place of Partial.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> local = shardwise.per_rank(mesh, lambda coord: torch.ones(2 + coord[0]))
    >>> shardwise.DTensor.from_local(local, mesh, [shardwise.Shard(0)])
    DTensor([1., 1., 1., 1., 1.], float32[5@0(2+3)] on (2))
    """
    local: Any = local_tensor
    mesh = topology(device_mesh)
    if isinstance(local, Wrapper) or not isinstance(local, (torch.Tensor, PerRank)):
        raise LayoutError(
            f"from_local: a local tensor is needed, but got {type(local).__name__}. "
            "To change the layout of a DTensor use redistribute."
        )
    if isinstance(local, PerRank) and local.mesh is not mesh:
        raise MeshError(f"from_local: the local tensors are of mesh {local.mesh}, not {mesh}.")
    sample = local.parts[0] if isinstance(local, PerRank) else local
    check_dense("from_local", sample)
    places = checked_placements("from_local", mesh, placements, sample.ndim)
    _check_dtype(places, sample.dtype)
    ask = run_check
    if run_check is None:
        ask = shape is None and any(place.is_shard() for place in places)
    traced = is_tracing() or hasattr(sample, "fake_mode")
    held = _held(local, mesh, bool(ask) and not traced)
    if held is not None:
        check_alike(mesh, held, gradients=bool(run_check), order=stride is None)
    spec = _inferred(mesh, places, held, sample, shape, stride)
    parts = _place_local(local, spec, held)
    if run_check and held is not None and not mesh.virtual:
        parts = _same_replicas(spec, parts)
    grad_spec = None
    if grad_placements is not None:
        grad_spec = _given_grads("from_local", spec, grad_placements)
        if mesh.virtual and not set(grad_spec.slot_axes) <= set(spec.slot_axes):
            _refuse_slots("from_local", spec, grad_spec)
    made: DTensor = FromLocal.apply(spec, grad_spec, *parts)
    return made


def _check_dtype(places: Sequence[Placement], dtype: torch.dtype) -> None:
    for place in places:
        if place.is_partial("avg") and not (dtype.is_floating_point or dtype.is_complex):
            raise LayoutError(
                f"from_local: {place!r} of {dtype}: the average of integers is no integer."
            )


def _place_local(
    local: Any, spec: DTensorSpec, held: dict[Coord, Part] | None
) -> tuple[torch.Tensor, ...]:
    """The local tensors in the order of the spec's slots."""
    parts = []
    for coord in spec.slots:
        part = local.at(coord) if isinstance(local, PerRank) else local
        parts.append(part.resolve_conj().resolve_neg())
    shapes = {coord: tuple(p.shape) for coord, p in zip(spec.slots, parts, strict=True)}
    if held is not None:  # every rank checks all of them, so that all raise
        shapes = {coord: part.shape for coord, part in held.items()}
    for coord, shape in shapes.items():
        if shape != spec.local_shape(coord):
            raise LayoutError(
                f"from_local: the rank at {coord} holds {list(shape)}, but {spec} gives it "
                f"{list(spec.local_shape(coord))}. Leave shape= out to infer it from all ranks "
                "(run_check=True does so too), or give shape= and stride= that fit."
            )
    if spec.topology.virtual and not isinstance(local, PerRank) and len(parts) > 1:
        parts = [part.clone() for part in parts]  # ranks do not share memory
    return tuple(parts)


def _held(local: Any, mesh: Topology, ask: bool) -> dict[Coord, Part] | None:
    """The local tensor of every rank, if they are known here, or if `ask` is true."""
    every = mesh.coords_here(range(mesh.ndim))
    if isinstance(local, PerRank):
        return {coord: Part.of(local.at(coord)) for coord in every}
    own = Part.of(local)
    if mesh.virtual:
        return dict.fromkeys(every, own)
    return told_by_all(mesh, own) if ask and mesh.coordinate is not None else None


_INTS = "shape and stride as lists of ints"


def _inferred(
    mesh: Topology,
    places: tuple[Placement, ...],
    held: dict[Coord, Part] | None,
    sample: torch.Tensor,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> DTensorSpec:
    """The spec of these local tensors."""
    sizes: list[int] = []
    cuts: list[tuple[int, ...] | None] = []
    for dim in range(sample.ndim):
        axes = [axis for axis, place in enumerate(places) if place.is_shard(dim)]
        count = prod(mesh.shape[axis] for axis in axes)
        if held is None:
            pieces = (sample.shape[dim],) * count
        else:
            pieces = _pieces(mesh, places, held, dim, axes)
        sizes.append(sum(pieces))
        cuts += _part_cuts(places, dim, pieces)
    for given in (shape, stride):
        need("from_local", given, Sequence | None, _INTS)
        for each in given or ():
            need("from_local", each, SupportsIndex | torch.SymInt, _INTS)
    if shape is not None:
        if held is None or tuple(shape) != tuple(sizes):
            cuts = []
        sizes = list(shape)
    if len(sizes) != sample.ndim:
        raise LayoutError(
            f"from_local: shape {sizes} is given for a local tensor of {sample.ndim} dims."
        )
    if stride is None:
        order = common_order({(): Part.of(sample)} if held is None else held)
        stride = stride_like(sizes, order or memory_order(sample.stride()))
    meta = TensorMeta(tuple(sizes), tuple(stride), sample.dtype)
    return DTensorSpec(mesh, places, meta, cuts=cuts or None)


def _part_cuts(
    places: Sequence[Placement], dim: int, pieces: tuple[int, ...]
) -> list[tuple[int, ...] | None]:
    """The cuts of a dim with these pieces: one entry, or one for the blocks and one for the pieces
    of a block if the dim has `split`. With several splits they are those of `torch.chunk`."""
    splits = {place.split for place in places if isinstance(place, Shard) and place.dim == dim}
    if not splits or not sum(pieces):
        return [None]
    if splits == {1}:
        return [pieces]
    split = max(splits)
    if len(splits) > 1 or any(size % split for size in pieces):
        return [None] * len(splits | {1})
    return [None, tuple(size // split for size in pieces)]


def _pieces(
    mesh: Topology,
    places: tuple[Placement, ...],
    held: dict[Coord, Part],
    dim: int,
    axes: list[int],
) -> tuple[int, ...]:
    pieces = []
    for coord in mesh.group_coords((0,) * mesh.ndim, axes):
        others = [axis for axis in range(mesh.ndim) if axis not in axes]
        found = {held[member].shape[dim] for member in mesh.group_coords(coord, others)}
        if len(found) > 1:
            raise LayoutError(
                f"from_local: the ranks disagree on the size of dim {dim}: {sorted(found)}, but "
                f"{list(places)} on {mesh} means that they hold the same. "
                f"If each holds a part of the dim, use Shard({dim})."
            )
        pieces.append(found.pop())
    return tuple(pieces)


def _same_replicas(spec: DTensorSpec, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Give all replicas the value of the first rank of the axis."""
    axes = [axis for axis, place in enumerate(spec.placements) if place.is_replicate()]
    if not axes or not parts:
        return parts
    order = memory_order(spec.stride)
    value = ordered(parts[0].clone(), order)  # a copy of which autograd knows; the value is below
    raw = as_bytes(value.detach().permute(order))
    broadcast_from(spec.topology, axes, raw, (0,) * len(spec.placements))
    return (value,)


@untraced
@public
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
    *,
    cuts: Sequence[Sequence[int] | None] | None = None,
    src_data_rank: int | None = 0,
) -> DTensor:
    """A whole tensor laid out on a mesh: a leaf, with the input's `requires_grad`.

    All ranks take the value of rank `src_data_rank` of the mesh. With None the tensors of the ranks
    are taken to be equal, and nothing is communicated. `cuts` gives for each dim the sizes of its
    pieces, None for those of `torch.chunk`. Without `device_mesh` it is the mesh of the innermost
    `with mesh:`.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> shardwise.distribute_tensor(torch.arange(5), mesh, [shardwise.Shard(0)])
    DTensor([0, 1, 2, 3, 4], int64[5@0] on (2))
    """
    if isinstance(tensor, Wrapper) or not isinstance(tensor, torch.Tensor):
        raise LayoutError(
            f"distribute_tensor: a plain tensor is needed, but got {type(tensor).__name__}. "
            "To change the layout of a DTensor use redistribute."
        )
    refuse_recording("distribute_tensor", (tensor,))
    check_dense("distribute_tensor", tensor)
    mesh = topology(device_mesh)
    places = checked_placements("distribute_tensor", mesh, placements, tensor.ndim)
    value = tensor.detach().resolve_conj().resolve_neg().to(mesh.device_type)
    stride = stride_like(value.shape, memory_order(value.stride()))
    meta = TensorMeta(tuple(value.shape), stride, value.dtype)
    whole = DTensorSpec(mesh, default_placements(mesh), meta)
    target = DTensorSpec(mesh, places, meta, cuts=cuts)
    parts: tuple[torch.Tensor, ...] = (value,) if whole.slots else ()
    if src_data_rank is not None and not mesh.virtual:
        parts = _from_source(whole, parts, src_data_rank)
    local = in_layout(wrap(whole, parts), target, fresh=True)
    made: DTensor = wrap(target, local)
    return made.requires_grad_(tensor.requires_grad)


def laid_out_like(value: torch.Tensor, like: DTensorSpec) -> Any:
    """A plain tensor, which counts as replicated, in the layout `like`: with its shards where the
    tensor has the dims, with its cuts if the shapes are equal."""
    mesh = like.topology
    check_dense("data", value)
    policy.on_plain("data", tuple(value.shape))
    if policy.current().plain in ("check", "check_always"):
        check_equal("data", mesh, value)
    places = [place if _fits(place, value) else Replicate() for place in like.placements]
    cuts = like.cuts if tuple(value.shape) == tuple(like.shape) else None
    return distribute_tensor(value.detach(), like.mesh, places, cuts=cuts, src_data_rank=None)


def _fits(place: Placement, value: torch.Tensor) -> bool:
    if not isinstance(place, Shard) or place.dim >= value.ndim:
        return False
    size = value.shape[place.dim]
    return place.split == 1 or (size > place.split and size % place.split == 0)


def _from_source(
    whole: DTensorSpec, parts: tuple[torch.Tensor, ...], source: int
) -> tuple[torch.Tensor, ...]:
    """The value of one rank on every rank of the mesh."""
    mesh = whole.topology
    if not 0 <= source < len(mesh.ranks):
        raise LayoutError(
            f"distribute_tensor: src_data_rank={source}, but mesh {mesh} has "
            f"{len(mesh.ranks)} ranks."
        )
    if not parts:
        return parts
    value = parts[0].contiguous().clone()
    described = torch.tensor([value.ndim, *value.shape, DTYPES.index(value.dtype)])
    if not engine_of(mesh).check_equal(mesh, digest(described)):
        raise LayoutError(
            f"distribute_tensor: the ranks give tensors of different shape or dtype; this rank "
            f"gives {value.dtype}{list(value.shape)}. All must give the same shape and "
            "dtype; use DTensor.from_local(..., run_check=True) for parts of different sizes."
        )
    axes = range(mesh.ndim)
    origin = mesh.group_coords((0,) * mesh.ndim, axes)[source]
    broadcast_from(mesh, axes, as_bytes(value), origin)
    return (value,)
