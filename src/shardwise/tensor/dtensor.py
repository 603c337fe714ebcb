"""`DTensor`: a tensor on a mesh, and the ways in and out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._torch import disabled_torch_function, take_lists, take_operators, untraced
from ..dispatch.dispatch import dispatch
from ..dispatch.views import DeferredView
from ..errors import ArgumentError, LayoutError, MeshError, need, public
from ..layout.mesh import AnyMesh, Topology, topology
from ..layout.placement import Placement
from ..layout.spec import DTensorSpec, Placements, checked_placements
from ..storage.async_value import AsyncValue
from ..storage.wrapper import Wrapper, wrap
from .autograd import Redistribute, WholeLocal, redistributed
from .autograd import data as autograd_data
from .autograd import requires_grad as autograd_requires_grad
from .checkpoint import CheckpointProtocol
from .compiled import CompileProtocol
from .conversion import distribute_tensor as distribute_tensor
from .conversion import from_local, laid_out_like, to_local, whole_local
from .gradients import take_data, watch_func_leaves, watch_leaf
from .inplace_views import as_strided, in_place
from .printing import html_of, text_of
from .saving import plain_attributes, saved


def _without_memory(name: str, more: str) -> Any:
    """A method that raises: PyTorch's own would use memory that a DTensor does not have."""

    @public
    def method(self: DTensor, *_: Any, **__: Any) -> Any:
        raise LayoutError(
            f"{name}: a DTensor {self._spec!r} has no memory of its own. Use to_local(), the "
            f"part of this rank, or full_tensor(), the whole value.{more}"
        )

    return method


class DTensor(CompileProtocol, CheckpointProtocol, Wrapper):
    """A tensor laid out on a device mesh; every PyTorch operation on it gives the single-device
    answer.

    Make one with `distribute_tensor`, `DTensor.from_local` or a factory such as `shardwise.zeros`.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    >>> (x * 2).sum().item()
    30.0
    """

    __torch_dispatch__: Any = classmethod(dispatch)
    # PyTorch looks this up for each argument, and finds it soonest here.
    __torch_function__ = disabled_torch_function

    @public
    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise ArgumentError(
            "DTensor() cannot be called. Use distribute_tensor(tensor, mesh, placements) for a "
            "whole tensor or DTensor.from_local(local, mesh, placements) for the parts."
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
        """For each dim the sizes of its pieces, None if it is cut as `torch.chunk` would.

        A dim with `Shard(dim, split=...)` has several entries: one for the blocks, and one for the
        pieces of a block.
        """
        return self._spec.cuts or (None,) * self.ndim

    # --- ways in and out ---------------------------------------------------------------------

    from_local = staticmethod(from_local)
    to_local = to_local

    @untraced
    @public
    def full_tensor(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """The whole value as a plain tensor, on every rank.

        Its gradient is taken to be equal on all ranks. If each rank computes a part of it, say so
        with `grad_placements=[Partial()]`.
        """
        if not self._spec.slots:
            raise MeshError(f"full_tensor: this rank is not in mesh {self._spec.topology}.")
        if grad_placements is None:
            return WholeLocal.apply(self)  # type: ignore[no-any-return]
        return whole_local(self.redistribute(), grad_placements)

    @untraced
    @public
    def redistribute(
        self,
        device_mesh: AnyMesh | None = None,
        placements: Placements | None = None,
        *,
        cuts: Sequence[Sequence[int] | None] | None = None,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor in another layout.

        - `cuts`: for each dim the sizes of its pieces, None for those of `torch.chunk`.
        - `device_mesh` may be another mesh, also of other ranks: all ranks of both make the call.
        - `async_op`: the move overlaps with what follows; the result waits when it is first used.
        - `forward_dtype`: the dtype in which the tensor is moved, and that of the result.
        - `backward_dtype`: the dtype in which the gradient is moved. The gradient that arrives has
          the dtype of the tensor.

        The result has its own memory: writes into it do not change this tensor. If the tensor has
        this layout already, the result is an alias, as `view_as` returns.

        >>> import torch, shardwise
        >>> from shardwise import Replicate, Shard
        >>> mesh = shardwise.init_device_mesh("cpu", (2,))
        >>> x = shardwise.distribute_tensor(torch.arange(5), mesh, [Replicate()])
        >>> x.redistribute(placements=[Shard(0)], cuts=[(1, 4)]).to_local().parts
        (tensor([0]), tensor([1, 2, 3, 4]))
        """
        for dtype in (forward_dtype, backward_dtype):
            need("redistribute", dtype, torch.dtype | None, "a dtype")
        target = _target(self, device_mesh, placements, cuts)
        if forward_dtype is not None:
            target = target.with_meta(target.meta._replace(dtype=forward_dtype))
        if target is self._spec and backward_dtype in (None, self.dtype):
            return _alias(self)
        made: DTensor = redistributed(self, target, async_op, backward_dtype)
        return made

    # --- values ------------------------------------------------------------------------------

    @untraced
    @public
    def tolist(self) -> Any:
        """The global value as nested lists."""
        return self.full_tensor().tolist()

    @untraced
    @public
    def numpy(self, *, force: bool = False) -> Any:
        """The global value as a read-only NumPy array: writes would not reach the tensor."""
        array = self.full_tensor().numpy(force=force)
        array.flags.writeable = False
        return array

    @untraced
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        if dtype is not None:
            array = array.astype(dtype, copy=False)
        return array.copy() if copy else array

    share_memory_ = _without_memory("share_memory_", "")
    __dlpack__ = _without_memory("__dlpack__", "")
    # The safetensors library asks for it.
    storage = _without_memory(
        "storage",
        " Files of models: shardwise.save_safetensors(model, folder) and load_safetensors, or give "
        "whole tensors, shardwise.full_state_dict(model), which all ranks call.",
    )
    apply_ = _without_memory("apply_", " Or x.copy_(x.full_tensor().clone().apply_(f)).")

    @public
    def new_tensor(self, *args: Any, **options: Any) -> torch.Tensor:
        """A plain tensor of given data, of this tensor's dtype and device if no other is given."""
        # PyTorch's own looks for the backend among the dispatch keys, and finds that of DTensors.
        return torch.empty(0, dtype=self.dtype, device=self.device).new_tensor(*args, **options)

    def new(self, *args: Any, **options: Any) -> Any:
        """A plain tensor, as `torch.Tensor.new` makes it."""
        like: Any = torch.empty(0, dtype=self.dtype, device=self.device)
        return like.new(*args, **options)

    @public
    def fill_diagonal_(self, fill_value: Any, wrap: bool = False) -> DTensor:
        """PyTorch's own uses the offset in memory, which a view of a DTensor does not have."""
        if self.ndim < 2 or (self.ndim > 2 and len(set(self.shape)) > 1):
            return super().fill_diagonal_(fill_value, wrap)  # type: ignore[return-value]
        rows, columns = self.shape[0], self.shape[1]
        for start in range(0, rows, columns + 1 if wrap and self.ndim == 2 else max(rows, 1)):
            part: torch.Tensor = self[start:]
            while part.ndim > 1:
                part = part.diagonal()
            part.fill_(fill_value)
        return self

    t_ = in_place(torch.Tensor.t)
    transpose_ = in_place(torch.Tensor.transpose)
    swapaxes_ = in_place(torch.Tensor.swapaxes)
    swapdims_ = in_place(torch.Tensor.swapdims)
    squeeze_ = in_place(torch.Tensor.squeeze)
    unsqueeze_ = in_place(torch.Tensor.unsqueeze)
    as_strided_ = in_place(as_strided)

    @untraced
    @public
    def __format__(self, spec: str) -> str:
        if self.ndim == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    @untraced
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The values and the layout, without communication between processes."""
        return text_of(self)

    @untraced
    def _repr_html_(self) -> str:
        """The layout in colours above the values, for notebooks."""
        return html_of(self)

    # --- gradients of leaves -------------------------------------------------------------------

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        super().requires_grad_(requires_grad)
        watch_leaf(self)
        return self

    @property
    def requires_grad(self) -> bool:
        return bool(autograd_requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        autograd_requires_grad.__set__(self, value)
        watch_leaf(self)

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history; assigning to it gives the tensor other values.

        A plain tensor that is assigned counts as replicated. It is sharded by the axes that shard
        this tensor where it has the dims for it, else replicated.
        """
        return autograd_data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    @public
    def data(self, value: torch.Tensor) -> None:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            value = laid_out_like(value, self._spec)
        take_data(self, value)

    # --- copies ------------------------------------------------------------------------------

    @untraced
    def __copy__(self) -> DTensor:
        """A tensor that shares memory with this one, as for a plain tensor."""
        made: DTensor = self.detach()  # type: ignore[assignment]
        made.__dict__.update(plain_attributes(self))
        return made.requires_grad_() if self.requires_grad else made

    @untraced
    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        found = memo.get(id(self))
        if found is None:
            if not self.is_leaf:
                raise RuntimeError("Only leaf DTensors can be deep-copied: detach() it first.")
            found = wrap(self._spec, tuple(part.clone() for part in self._locals))
            memo[id(self)] = found
            found.__dict__.update(plain_attributes(self))
            if self.requires_grad:
                found.requires_grad_()
            if self.grad is not None:
                found.grad = self.grad.__deepcopy__(memo)
        return found  # type: ignore[no-any-return]

    @untraced
    def __reduce_ex__(self, protocol: Any) -> Any:
        return saved(self)


class _Deferred(DeferredView, DTensor):  # type: ignore[override]  # _locals is made on demand
    """A DTensor that is a deferred view."""


class _Pending(AsyncValue, DTensor):  # type: ignore[override]  # _locals waits
    """A DTensor whose move is still running."""


Wrapper.public = DTensor
Wrapper.watch_func_leaves = staticmethod(watch_func_leaves)
Wrapper.pending = _Pending  # type: ignore[attr-defined]
Wrapper.deferred = _Deferred  # type: ignore[attr-defined]
take_lists(DTensor, _Pending, _Deferred)
take_operators(dispatch, DTensor, _Pending, _Deferred)


def _target(
    tensor: DTensor,
    device_mesh: AnyMesh | None,
    placements: Placements | None,
    cuts: Sequence[Sequence[int] | None] | None = None,
) -> DTensorSpec:
    """The spec that a redistribution moves to."""
    mine = tensor._spec.topology
    where = mine if device_mesh is None else topology(device_mesh)
    if where is not mine:
        _check_meshes(mine, where)
    places = checked_placements("redistribute", where, placements, tensor.ndim)
    return DTensorSpec(where, places, tensor._spec.meta, cuts=cuts)


def _served(mesh: Topology) -> str:
    return "virtual" if mesh.virtual else "over processes"


def _need_dtensor(what: str, value: object) -> None:
    if not isinstance(value, DTensor):
        raise LayoutError(
            f"{what}: a DTensor is needed, but got {type(value).__name__}. "
            "Use distribute_tensor for plain tensors."
        )


@public
def redistribute(
    tensor: DTensor,
    device_mesh: AnyMesh | None = None,
    placements: Placements | None = None,
    **options: Any,
) -> DTensor:
    """The same tensor in another layout: `tensor.redistribute(...)` as a function.

    >>> import shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.ones(4, device_mesh=mesh)
    >>> redistribute(x, placements=[shardwise.Shard(0)]).placements
    (S(0),)
    """
    _need_dtensor("redistribute", tensor)
    return tensor.redistribute(device_mesh, placements, **options)


@untraced
@public
def redistribute_all(
    tensors: Sequence[DTensor],
    placements: Placements | Sequence[Placements],
    *,
    device_mesh: AnyMesh | None = None,
    async_op: bool = False,
) -> list[DTensor]:
    """Redistribute many tensors in few collectives: those of one kind and group are joined.

    `placements` are for all tensors, or one list for each. All ranks must give the tensors in the
    same order. With `async_op` the moves overlap with what follows; each result waits when it is
    first used.

    >>> import torch, shardwise
    >>> from shardwise import Replicate, Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> pair = [shardwise.distribute_tensor(torch.ones(n, 4), mesh, [Shard(0)]) for n in (2, 6)]
    >>> [x.placements for x in redistribute_all(pair, [Shard(1)])]
    [(S(1),), (S(1),)]
    """
    need("redistribute_all", tensors, (list, tuple), "a list of DTensors")
    for each in tensors:
        _need_dtensor("redistribute_all", each)
    need("redistribute_all", placements, (list, tuple, Mapping), "a list of placements")
    one_for_all = isinstance(placements, Mapping) or all(
        isinstance(place, Placement) for place in placements
    )
    if not one_for_all and len(placements) != len(tensors):
        raise LayoutError(
            f"redistribute_all: {len(placements)} lists of placements were given for "
            f"{len(tensors)} tensors. Give one for each, or placements for all."
        )
    each_own: Any = [placements] * len(tensors) if one_for_all else placements
    pairs = [(t, _target(t, device_mesh, own)) for t, own in zip(tensors, each_own, strict=True)]
    moving = [(tensor, spec) for tensor, spec in pairs if tensor._spec is not spec]
    sources, goals = [tensor for tensor, _ in moving], [spec for _, spec in moving]
    made: Any = iter(Redistribute.apply(goals, async_op, None, *sources))
    return [_alias(tensor) if tensor._spec is spec else next(made) for tensor, spec in pairs]


def _alias(tensor: DTensor) -> DTensor:
    """A view of the whole tensor that autograd knows of. `view` would unshard dims of size 1."""
    made: DTensor = torch.ops.aten.alias.default(tensor)
    return made


def _check_meshes(mine: Topology, where: Topology) -> None:
    """An error if no tensor can move from one mesh to the other."""
    mine.refuse_destroyed()
    if (where.virtual, where.device_type) != (mine.virtual, mine.device_type):
        raise MeshError(
            f"redistribute: from mesh {mine} ({mine.device_type}, {_served(mine)}) to mesh {where} "
            f"({where.device_type}, {_served(where)}): both must be of one device type, and both "
            "virtual or both over processes."
        )
    if mine.has_siblings_on(where) or where.has_siblings_on(mine):
        raise MeshError(
            f"redistribute: from mesh {mine} to mesh {where}: one is a part of a mesh that has "
            "other such parts. Each rank takes the part that it is in, so the ranks would not "
            "agree on the move. Work on the whole mesh: distribute_tensor(x, mesh, placements); or "
            "go by way of x.full_tensor()."
        )
