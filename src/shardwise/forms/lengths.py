"""Tensors scaled by the norm of each slice, where the slices are cut: only the norms are shared."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.operator import register_form
from ..rules import Call
from .decomposed import aligned, in_full, is_cut, reduced

__all__ = ["renorm", "weight_norm_backward"]


def _others(x: Any, dim: int) -> list[int]:
    return [d for d in range(x.ndim) if d != dim % x.ndim]


def _cut(call: Call) -> bool:
    ndim, dim = len(call.shape(0)), call.get("dim")
    return is_cut(call, 0, [d for d in range(ndim) if d != dim % ndim])


@register_form("renorm", when=_cut)
def renorm(x: Any, p: float, dim: int, maxnorm: float) -> Any:
    """Slices that are too long are made shorter, as PyTorch's kernel does it."""
    full = in_full(x)
    norm = torch.linalg.vector_norm(full, p, _others(x, dim), True)
    return full * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)


@register_form("_weight_norm_interface_backward")
def weight_norm_backward(grad: Any, v: Any, g: Any, norms: Any, dim: int) -> tuple[Any, Any]:
    """The gradients of direction and length, from one sum over each slice."""
    v_dtype, g_dtype = v.dtype, g.dtype
    grad, v, g, norms = in_full(aligned(grad, v)), in_full(v), in_full(g), in_full(norms)
    along = reduced((grad * v).sum(_others(v, dim), True))
    direction = (g / norms) * (grad - v * (along / (norms * norms)))
    return direction.to(v_dtype), (along / norms).to(g_dtype)
