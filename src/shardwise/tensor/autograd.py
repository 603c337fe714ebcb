"""Autograd functions: ways in, out and between layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import is_recorded, modes_of_thread
from ..errors import LayoutError
from ..layout.mesh import Topology
from ..layout.placement import Partial
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute.execute import redistribute_locals
from ..storage.async_value import pending
from ..storage.match_meta import in_memory_order
from ..storage.operands import in_layout, start_moves
from ..storage.wrapper import Wrapper, exposed_locals, share_cell, wrap

requires_grad: Any = torch.Tensor.requires_grad
"""The attribute of `torch.Tensor`, which `DTensor` overrides to watch new leaves."""
data: Any = torch.Tensor.data
"""The attribute of `torch.Tensor`, which `DTensor` overrides to take local tensors too."""


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
    """Redistribute many tensors in few collectives. So does the backward.

    A tensor is first cast to the dtype of its target. Its gradient moves in `grad_dtype`, by
    default in the dtype of the tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        targets: Sequence[DTensorSpec],
        async_op: bool,
        grad_dtype: torch.dtype | None,
        *values: Any,
    ) -> Any:
        refuse_recording("redistribute", values)
        ctx.set_materialize_grads(False)
        ctx.specs, ctx.grad_dtype = [value._spec for value in values], grad_dtype
        pairs = [_cast(value, spec) for value, spec in zip(values, targets, strict=True)]
        moving = [(value, spec) for value, spec in pairs if value._spec is not spec]
        ready = iter(start_moves(moving, async_op))
        made: list[Any] = []
        for value, spec in pairs:
            if value._spec is spec:
                made.append(torch.ops.aten.alias.default(value))
            elif async_op:
                made.append(pending(spec, next(ready)))
            else:
                made.append(wrap(spec, next(ready)()))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        here: list[Any] = [
            (grad.to(ctx.grad_dtype or spec.dtype), spec)
            for grad, spec in zip(grads, ctx.specs, strict=True)
            if isinstance(grad, Wrapper)
        ]
        backs = [spec.reduced.with_meta(grad._spec.meta) for grad, spec in here]
        moved = Redistribute.apply(backs, False, None, *[grad for grad, _ in here])
        found = iter([made.to(spec.dtype) for made, (_, spec) in zip(moved, here, strict=True)])
        return None, None, None, *[next(found) if isinstance(g, Wrapper) else g for g in grads]


def _cast(value: Any, spec: DTensorSpec) -> tuple[Any, DTensorSpec]:
    """A tensor in the dtype of its target, and the target with its strides."""
    if value.dtype is spec.dtype:
        return value, spec
    made = value.to(spec.dtype)
    return made, spec.with_meta(made._spec.meta)


def redistributed(
    value: Any,
    target: DTensorSpec,
    async_op: bool = False,
    grad_dtype: torch.dtype | None = None,
) -> Any:
    """One tensor in another layout."""
    return Redistribute.apply((target,), async_op, grad_dtype, value)[0]


def as_gradient(grad: Any, topology: Topology) -> Any:
    """A gradient as a DTensor. PyTorch makes plain zeros for a result that is not used."""
    if isinstance(grad, Wrapper):
        return grad
    whole = DTensorSpec.replicated(topology, TensorMeta.of(grad))
    return FromLocal.apply(whole, None, *[grad] * len(whole.slots))


class WholeLocal(torch.autograd.Function):
    """From a DTensor to a plain tensor with its whole value; a Partial caches its reduction."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        refuse_recording("full_tensor", (value,))
        ctx.spec = spec = value._spec
        return redistribute_locals(spec.reduced, spec.whole, in_layout(value, spec.reduced))[
            0
        ].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        made = as_gradient(grad, ctx.spec.topology)
        back = ctx.spec.reduced.with_meta(made._spec.meta)
        return made if back is made._spec else redistributed(made, back)


class ToLocal(torch.autograd.Function):
    """From a DTensor to its local tensors, one for each place on the mesh axes `axes`: those over
    which the tensor or its gradient varies.

    Backwards here call other functions of this file, so that they can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, value: Any, grad_spec: DTensorSpec, axes: Sequence[int]) -> Any:
        ctx.spec, ctx.coords = grad_spec, grad_spec.topology.coords_here(axes)
        # A rank outside the mesh holds nothing.
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        parts = exposed_locals(value)
        found = [parts[value._spec.slot(coord)] for coord in ctx.coords]
        return tuple(part.view_as(part) for part in found) or (empty,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        spec: DTensorSpec = ctx.spec
        parts: dict[int, torch.Tensor] = {}
        for coord, grad in zip(ctx.coords, grads, strict=False):
            first = parts.setdefault(spec.slot(coord), grad)
            if first is not grad and not torch.allclose(first, grad, equal_nan=True):
                raise LayoutError(
                    f"the gradients of local tensors differ between ranks, but are taken to be "
                    f"equal: they make up a gradient with {list(spec.placements)}. If each is a "
                    "part of it, say so with grad_placements=[Partial()]."
                )
        # User code may have given the gradients another order of dims in memory.
        ordered = [in_memory_order(spec, grad) for grad in parts.values()]
        return FromLocal.apply(spec, None, *ordered), None, None


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
        back = spec.reduced.with_meta(grad._spec.meta)
        if ctx.grad_spec is not None:
            back = ctx.grad_spec.with_meta(grad._spec.meta)
        whole = ToLocal.apply(redistributed(grad, back), back, back.slot_axes)
        scale = 1
        for axis, place in enumerate(spec.placements):
            if place.is_partial("avg"):
                scale *= spec.topology.shape[axis]
            elif isinstance(place, Partial) and place.reduce_op not in ("sum", "avg"):
                raise LayoutError(
                    f"the gradient of local tensors that make up a {place!r} is not defined. "
                    "Reduce with redistribute before going on."
                )
        parts = [whole[back.slot(coord)] for coord in spec.slots]
        return None, None, *(parts if scale == 1 else [part / scale for part in parts])
