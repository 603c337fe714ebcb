"""Autograd functions: ways in, out and between layouts, and the gradients of leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ._torch import is_recorded, recording
from .deferred import DeferredView
from .errors import LayoutError, MeshError
from .mesh import Topology
from .moving import lend, moved, started
from .pending import pending
from .placement import Partial, Placement, Replicate
from .redistribute import relaid
from .spec import DTensorSpec, TensorMeta, default_placements
from .wrapper import Wrapper, exposed_locals, has_inference, share_cell, wrap

__all__ = [
    "FromLocal",
    "Redistribute",
    "Replaced",
    "ToLocal",
    "WholeLocal",
    "as_gradient",
    "keep_partial_grads",
    "keeps_partial_grads",
    "not_partial",
    "redistributed",
    "refuse_recording",
    "take_data",
    "watch_leaf",
]

requires_grad: Any = torch.Tensor.requires_grad
"""The attribute as autograd has it; `DTensor` wraps it to learn of new leaves."""
data: Any = torch.Tensor.data
"""As `requires_grad`: `DTensor` wraps it to take the local tensors too."""
_WATCHED = "_watched"


def not_partial(spec: DTensorSpec) -> tuple[Placement, ...]:
    return tuple(Replicate() if p.is_partial() else p for p in spec.placements)


def refuse_recording(what: str, values: Sequence[Any]) -> None:
    """An error if `make_fx` would record a result as a constant: this is no operator."""
    if not recording._is_fx_tracing_flag:
        return
    # In fake tensors DTensors are taken apart, and what their local tensors do is recorded.
    if any(isinstance(v, Wrapper) or type(v) is torch.Tensor for v in values if is_recorded(v)):
        raise LayoutError(
            f"{what}: make_fx, which torch.func.linearize uses, records operators, and this is "
            "none. Bring tensors into their layout before, or use torch.func.jvp, which records "
            "nothing."
        )


class Redistribute(torch.autograd.Function):
    """Tensors in other layouts, all in few collectives.

    The backward of a redistribution is a redistribution; those of a batch are a batch again.
    """

    @staticmethod
    def forward(ctx: Any, targets: Sequence[DTensorSpec], async_op: bool, *values: Any) -> Any:
        refuse_recording("redistribute", values)
        ctx.set_materialize_grads(False)
        ctx.specs = [value._spec for value in values]
        pairs = list(zip(values, targets, strict=True))
        moving = [(value, spec) for value, spec in pairs if value._spec is not spec]
        sources, goals = [value for value, _ in moving], [spec for _, spec in moving]
        ready = iter(started(sources, goals, later=async_op))
        made: list[Any] = []
        for value, spec in pairs:
            if value._spec is spec:
                made.append(wrap(spec, value._locals, share_cell(value)))
            else:
                made.append(pending(spec, next(ready)))
        if not async_op:
            for each, (value, spec) in zip(made, pairs, strict=True):
                each._locals  # noqa: B018  # waits
                if value._spec is not spec:
                    lend(each, value)
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


def _without_partial(spec: DTensorSpec, meta: TensorMeta) -> DTensorSpec:
    """The layout for a gradient of a tensor with `spec`."""
    return DTensorSpec._intern(spec.topology, not_partial(spec), meta, spec.cuts)


def as_gradient(grad: Any, topology: Topology) -> Any:
    """A gradient as a DTensor. It may be plain and whole: of a result that nobody has used PyTorch
    makes zeros itself."""
    if isinstance(grad, Wrapper):
        return grad
    meta = TensorMeta(tuple(grad.shape), tuple(grad.stride()), grad.dtype)
    whole = DTensorSpec._intern(topology, default_placements(topology), meta, None)
    return FromLocal.apply(whole, *[grad] * len(whole.slots))


class WholeLocal(torch.autograd.Function):
    """From a DTensor to a plain tensor with its whole value; a pending sum keeps what is reduced
    for it."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        refuse_recording("full_tensor", (value,))
        ctx.spec = spec = value._spec
        if not value._locals:
            raise MeshError(f"full_tensor: this rank is not in mesh {spec.topology}.")
        whole = spec.with_placements(default_placements(spec.topology))
        return relaid(spec.reduced, whole, moved(value, spec.reduced))[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        made = as_gradient(grad, ctx.spec.topology)
        back = _without_partial(ctx.spec, made._spec.meta)
        return made if back is made._spec else redistributed(made, back)


class ToLocal(torch.autograd.Function):
    """From a DTensor to its local tensors.

    Backwards here are made of these functions, not of what they do, so that they can be
    differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, value: Any, grad_spec: DTensorSpec) -> Any:
        refuse_recording("to_local", (value,))
        ctx.spec = grad_spec
        return tuple(part.view_as(part) for part in exposed_locals(value))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return FromLocal.apply(ctx.spec, *grads), None


class FromLocal(torch.autograd.Function):
    """From local tensors to a DTensor."""

    @staticmethod
    def forward(ctx: Any, spec: DTensorSpec, *parts: torch.Tensor) -> Any:
        refuse_recording("from_local", parts)
        ctx.set_materialize_grads(False)  # zeros would be no DTensor
        ctx.spec = spec
        made = wrap(spec, tuple(part.view_as(part) for part in parts))
        cell = share_cell(made)
        cell.exposed = True  # who gave them has them still
        cell.given = bool(spec.sums) and has_inference(made._locals)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        spec: DTensorSpec = ctx.spec
        if grad is None:
            return None, *[None for _ in spec.slots]
        grad = as_gradient(grad, spec.topology)
        back = _without_partial(spec, grad._spec.meta)
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
        return None, *parts


class Replaced(torch.autograd.Function):
    """Another value in place of a local tensor, whose gradient it has."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, value: torch.Tensor) -> Any:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Grads:
    keep_partial = False


@contextmanager
def keep_partial_grads() -> Iterator[None]:
    """Leave the gradients of leaves partial, so that they accumulate without communication.

    Redistribute them when they are needed: `p.grad = p.grad.redistribute(placements=p.placements)`.
    """
    before, _Grads.keep_partial = _Grads.keep_partial, True
    try:
        yield
    finally:
        _Grads.keep_partial = before


def keeps_partial_grads() -> bool:
    """Whether gradients of leaves are left partial."""
    return _Grads.keep_partial


def watch_leaf(tensor: Any) -> None:
    """See to it that the gradient of a leaf arrives in the leaf's own layout."""
    if tensor.is_leaf and requires_grad.__get__(tensor) and not hasattr(tensor, _WATCHED):
        like_leaf = _LikeLeaf(tensor._spec)
        setattr(tensor, _WATCHED, like_leaf)
        tensor.register_hook(like_leaf)


def take_data(tensor: Any, value: Any) -> None:
    """Let a tensor take the memory and the layout of another, as `tensor.data = value` does."""
    if isinstance(tensor, DeferredView) or not isinstance(value, Wrapper):
        raise LayoutError(
            f"data: {type(value).__name__} cannot become the data of {tensor._spec}. Give a "
            "DTensor to a tensor that is no view: distribute_tensor makes one of a plain tensor."
        )
    local = value._locals
    data.__set__(tensor, value)
    tensor._spec, tensor._locals = value._spec, local
    tensor._cell, tensor._memo, tensor._picked = share_cell(value), None, None
    tensor._lanes = tensor._views = tensor._origin = None
    watched = getattr(tensor, _WATCHED, None)
    if watched is not None:
        watched.spec = value._spec


class _LikeLeaf:
    __slots__ = ("spec",)

    def __init__(self, spec: DTensorSpec) -> None:
        self.spec = spec

    def __call__(self, grad: Any) -> Any:
        if grad is None or grad.layout is not torch.strided:
            return grad
        if not isinstance(grad, Wrapper):
            mesh = self.spec.topology
            meta = TensorMeta(tuple(grad.shape), tuple(grad.stride()), grad.dtype)
            grad = wrap(DTensorSpec(mesh, default_placements(mesh), meta), (grad,))
        if _Grads.keep_partial and grad._spec.sums:
            return grad
        target = _without_partial(self.spec, grad._spec.meta)
        return grad if grad._spec is target else redistributed(grad, target)
