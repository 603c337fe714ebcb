"""Autograd functions: ways in, out and between layouts, and the gradients of leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import is_recorded, modes_of_thread
from ..config import current
from ..dispatch.views import become
from ..errors import LayoutError, MeshError
from ..layout.mesh import Topology
from ..layout.placement import Partial, Placement, Replicate
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..redistribute import redistribute_locals
from ..storage.async_value import pending
from ..storage.match_meta import in_memory_order
from ..storage.operands import in_layout, start_moves
from ..storage.wrapper import Wrapper, exposed_locals, share_cell, wrap

requires_grad: Any = torch.Tensor.requires_grad
"""The attribute of `torch.Tensor`, which `DTensor` overrides to watch new leaves."""
data: Any = torch.Tensor.data
"""The attribute of `torch.Tensor`, which `DTensor` overrides to take local tensors too."""
_WATCHED = "_watched"


def not_partial(spec: DTensorSpec) -> tuple[Placement, ...]:
    return tuple(Replicate() if p.is_partial() else p for p in spec.placements)


def refuse_recording(what: str, values: Sequence[Any]) -> None:
    """Raise if `make_fx` would record the result of `what`, which is no operator, as a constant."""
    if not modes_of_thread():
        return
    # Under fake tensors DTensors are flattened, and the calls of their local tensors are recorded.
    if any(isinstance(v, Wrapper) or type(v) is torch.Tensor for v in values if is_recorded(v)):
        raise LayoutError(
            f"{what}: make_fx, which torch.func.linearize uses, records operators, and this is "
            "none. Bring tensors into their layout before, or use torch.func.jvp, which records "
            "nothing."
        )


class Redistribute(torch.autograd.Function):
    """Redistribute many tensors in few collectives. So does the backward."""

    @staticmethod
    def forward(ctx: Any, targets: Sequence[DTensorSpec], async_op: bool, *values: Any) -> Any:
        refuse_recording("redistribute", values)
        ctx.set_materialize_grads(False)
        ctx.specs = [value._spec for value in values]
        pairs = list(zip(values, targets, strict=True))
        moving = [(value, spec) for value, spec in pairs if value._spec is not spec]
        sources, goals = [value for value, _ in moving], [spec for _, spec in moving]
        ready = iter(start_moves(sources, goals, async_op))
        made: list[Any] = []
        for value, spec in pairs:
            if value._spec is spec:
                made.append(wrap(spec, value._locals, share_cell(value)))
            elif async_op:
                made.append(pending(spec, next(ready)))
            else:
                made.append(wrap(spec, next(ready)()))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        here = [index for index, grad in enumerate(grads) if isinstance(grad, Wrapper)]
        backs = [_without_partial(ctx.specs[index], grads[index]._spec.meta) for index in here]
        found = iter(Redistribute.apply(backs, False, *[grads[index] for index in here]))
        return None, None, *[next(found) if isinstance(g, Wrapper) else g for g in grads]


def redistributed(value: Any, target: DTensorSpec, async_op: bool = False) -> Any:
    """One tensor in another layout."""
    return Redistribute.apply((target,), async_op, value)[0]


class RedistributeIn(torch.autograd.Function):
    """A tensor in another layout and dtype: it moves in one dtype, its gradient in another."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Any,
        target: DTensorSpec,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
        async_op: bool,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.dtype = value._spec, backward_dtype or value.dtype
        moving = value if forward_dtype is None else value.to(forward_dtype)
        goal = target.with_meta(moving._spec.meta)
        if goal is moving._spec:
            return moving.view_as(moving)
        return redistributed(moving, goal, async_op)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None, None, None
        moving = as_gradient(grad, ctx.spec.topology).to(ctx.dtype)
        made = redistributed(moving, _without_partial(ctx.spec, moving._spec.meta))
        return made.to(ctx.spec.dtype), None, None, None, None


def _without_partial(spec: DTensorSpec, meta: TensorMeta) -> DTensorSpec:
    """The layout for a gradient of a tensor with `spec`."""
    return DTensorSpec._intern(spec.topology, not_partial(spec), meta, spec.cuts)


def as_gradient(grad: Any, topology: Topology) -> Any:
    """A gradient as a DTensor. PyTorch makes plain zeros for a result that is not used."""
    if isinstance(grad, Wrapper):
        return grad
    meta = TensorMeta(tuple(grad.shape), tuple(grad.stride()), grad.dtype)
    whole = DTensorSpec._intern(topology, default_placements(topology), meta, None)
    return FromLocal.apply(whole, None, *[grad] * len(whole.slots))


class WholeLocal(torch.autograd.Function):
    """From a DTensor to a plain tensor with its whole value; a Partial caches its reduction."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        refuse_recording("full_tensor", (value,))
        ctx.spec = spec = value._spec
        if not value._locals:
            raise MeshError(f"full_tensor: this rank is not in mesh {spec.topology}.")
        whole = spec.with_placements(default_placements(spec.topology))
        return redistribute_locals(spec.reduced, whole, in_layout(value, spec.reduced))[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        made = as_gradient(grad, ctx.spec.topology)
        back = _without_partial(ctx.spec, made._spec.meta)
        return made if back is made._spec else redistributed(made, back)


class ToLocal(torch.autograd.Function):
    """From a DTensor to its local tensors.

    Backwards here call other functions of this file, so that they can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, value: Any, grad_spec: DTensorSpec) -> Any:
        refuse_recording("to_local", (value,))
        ctx.spec = grad_spec
        # A rank outside the mesh holds nothing.
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return tuple(part.view_as(part) for part in exposed_locals(value)) or (empty,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # User code may have given the gradients another order of dims in memory.
        parts = [in_memory_order(ctx.spec, grad) for grad in grads[: len(ctx.spec.slots)]]
        return FromLocal.apply(ctx.spec, None, *parts), None


class FromLocal(torch.autograd.Function):
    """From local tensors to a DTensor. Their gradients are the parts of a gradient with
    `grad_spec`, by default the layout of the DTensor without Partial."""

    @staticmethod
    def forward(
        ctx: Any, spec: DTensorSpec, grad_spec: DTensorSpec | None, *parts: torch.Tensor
    ) -> Any:
        refuse_recording("from_local", parts)
        ctx.set_materialize_grads(False)  # zeros would be no DTensor
        ctx.spec, ctx.grad_spec = spec, grad_spec
        made = wrap(spec, tuple(part.view_as(part) for part in parts))
        share_cell(made).exposed = True  # the caller still holds them
        return made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        spec: DTensorSpec = ctx.spec
        if grad is None:
            return None, None, *[None for _ in spec.slots]
        grad = as_gradient(grad, spec.topology)
        back = _without_partial(spec, grad._spec.meta)
        if ctx.grad_spec is not None:
            back = ctx.grad_spec.with_meta(grad._spec.meta)
        whole = ToLocal.apply(redistributed(grad, back), back)
        scale = 1
        for axis, place in enumerate(spec.placements):
            if place.is_partial("avg"):
                scale *= spec.topology.shape[axis]
            elif isinstance(place, Partial) and place.reduce_op not in ("sum", "avg"):
                raise LayoutError(
                    f"the gradient of local tensors that make up a {place!r} is not defined. "
                    "Reduce with redistribute before going on."
                )
        parts = [whole[back.slot(coord)] / scale for coord in spec.slots]
        return None, None, *parts


class Replaced(torch.autograd.Function):
    """A local tensor with another value; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, value: torch.Tensor) -> Any:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def keeps_partial_grads() -> bool:
    """True if gradients of leaves stay Partial."""
    return current().partial_grads


def watch_leaf(tensor: Any) -> None:
    """Register the hooks that bring the gradient of a leaf into the leaf's layout."""
    if tensor.is_leaf and requires_grad.__get__(tensor) and not hasattr(tensor, _WATCHED):
        like_leaf = _LikeLeaf(tensor._spec)
        setattr(tensor, _WATCHED, like_leaf)
        tensor.register_hook(like_leaf)
        tensor.register_post_accumulate_grad_hook(_reduce_kept)


def is_leaf_hook(hook: object) -> bool:
    """True if `watch_leaf` registered this hook."""
    return isinstance(hook, _LikeLeaf) or hook is _reduce_kept


def take_data(tensor: Any, value: Any) -> None:
    """Let a tensor take the memory and the layout of another, as `tensor.data = value` does."""
    if not isinstance(value, Wrapper):
        raise LayoutError(
            f"data: {type(value).__name__} cannot become the data of {tensor._spec}. Give a "
            "DTensor: distribute_tensor makes one of a plain tensor."
        )
    data.__set__(tensor, value)
    become(tensor, value)
    watched = getattr(tensor, _WATCHED, None)
    if watched is not None:
        watched.spec = tensor._spec


def _reduce_kept(leaf: Any) -> None:
    """Bring a `.grad` that `keep_partial_grads` left Partial into the leaf's layout."""
    grad = leaf.grad
    if current().partial_grads or not isinstance(grad, Wrapper) or not grad._spec.sums:
        return
    leaf.grad = redistributed(grad, _without_partial(leaf._spec, grad._spec.meta))


class _LikeLeaf:
    __slots__ = ("spec",)

    def __init__(self, spec: DTensorSpec) -> None:
        self.spec = spec

    def __call__(self, grad: Any) -> Any:
        if grad is None or grad.layout is not torch.strided:
            return grad
        grad = as_gradient(grad, self.spec.topology)
        if current().partial_grads and grad._spec.sums:
            return grad
        # After `unsqueeze_` the leaf has another shape, and no layout for this gradient.
        like = self.spec if grad.shape == self.spec.meta.shape else grad._spec
        target = _without_partial(like, grad._spec.meta)
        return grad if grad._spec is target else redistributed(grad, target)
