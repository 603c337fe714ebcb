"""Softmax and layer norm of dims that are sharded: only their statistics are shared."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..dispatch.operator import register_form
from ..rules import Call
from .reductions import moments, unless_infinite
from .statistics import aligned, cut_along, in_full, settled

__all__ = [
    "layer_norm",
    "layer_norm_backward",
    "log_softmax",
    "log_softmax_backward",
    "rms_norm",
    "rms_norm_backward",
    "safe_softmax",
    "softmax",
    "softmax_backward",
]


def _of(operand: int) -> Any:
    """Whether the dim that is normalised is the one that is sharded."""
    return lambda call: cut_along(call, operand, [call.get("dim")])


def _shifted(x: Any, dim: int) -> tuple[Any, Any, Any]:
    """The elements below the largest one, their exponentials, and the largest one."""
    top = settled(x.amax(dim, True))
    below = x - top
    return below, below.exp(), top


@register_form("_softmax", when=_of(0), blocks=True)
def softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    """The largest element and the sum of exponentials are those of all shards."""
    _, exps, _ = _shifted(in_full(x), dim)
    return exps / settled(exps.sum(dim, True))


@register_form("_safe_softmax", when=_of(0), blocks=True)
def safe_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    """As `softmax`, with zeros where everything is masked."""
    _, exps, top = _shifted(in_full(x if dtype is None else x.to(dtype)), dim)
    return torch.where(top == float("-inf"), 0.0, exps / settled(exps.sum(dim, True)))


@register_form("_log_softmax", when=_of(0), blocks=True)
def log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    """As `softmax`, in logarithms."""
    below, exps, _ = _shifted(in_full(x), dim)
    return below - settled(exps.sum(dim, True)).log()


@register_form("_softmax_backward_data", when=_of(1), blocks=True)
def softmax_backward(grad: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    """The sum over the sharded dim is the only thing that ranks share."""
    grad, output = in_full(aligned(grad, output)), in_full(output)
    product = grad * output
    return product - output * settled(product.sum(dim, True))


@register_form("_log_softmax_backward_data", when=_of(1), blocks=True)
def log_softmax_backward(grad: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    """As `softmax_backward`, for logarithms."""
    grad, output = in_full(aligned(grad, output)), in_full(output)
    return grad - output.exp() * settled(grad.sum(dim, True))


# --- layer norm ------------------------------------------------------------------------------


def _inner(operand: int) -> Any:
    """Whether one of the dims that are normalised is sharded."""

    def when(call: Call) -> bool:
        return cut_along(call, operand, range(-len(call.get("normalized_shape")), 0))

    return when


@register_form("native_layer_norm", when=_inner(0), blocks=True)
def layer_norm(x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """Mean and variance are those of all shards."""
    x = in_full(x)
    var, mean = moments(x, list(range(-len(normalized_shape), 0)), correction=0, keepdim=True)
    mean = unless_infinite(mean)
    rstd = (var + eps).rsqrt()
    out = (x - mean) * rstd
    if weight is not None:
        out = out * weight
    return out if bias is None else out + bias, mean, rstd


@register_form("native_layer_norm_backward", when=_inner(1), blocks=True)
def layer_norm_backward(
    grad: Any,
    x: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> Any:
    """Sums over the normalised dims, and those of the parameters' gradients."""
    grad, x, mean, rstd = in_full(aligned(grad, x)), in_full(x), in_full(mean), in_full(rstd)
    inner = list(range(-len(normalized_shape), 0))
    lead = list(range(x.ndim - len(inner)))
    normal = (x - mean) * rstd
    grads: list[Any] = [None, None, None]
    if output_mask[0]:
        inside = grad if weight is None else grad * weight
        each = [inside, inside * normal, inside * x]
        sums = settled(torch.stack([value.sum(inner, True) for value in each]))
        total, along, own = sums.div(prod(normalized_shape)).unbind()
        finite = (inside - total - normal * along) * rstd
        # Next to infinities what is NaN depends on the formula: this is that of PyTorch's kernel.
        slope = (total * mean - own) * rstd**3
        others = rstd * inside + slope * x - (slope * mean + total * rstd)
        grads[0] = torch.where(sums.sum(0).isfinite(), finite, others)
    for place, value in ((1, grad * normal), (2, grad)):
        if output_mask[place]:
            grads[place] = value.sum(lead) if lead else value
    return tuple(grads)


# --- the norm of GPUs that has no mean ----------------------------------------------------------


@register_form("_fused_rms_norm", when=_inner(0), blocks=True)
def rms_norm(x: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> Any:
    """The mean of the squares is that of all shards."""
    full = in_full(x)
    inner = list(range(-len(normalized_shape), 0))
    small = torch.finfo(full.dtype).eps if eps is None else eps
    rstd = (settled((full * full).mean(inner, True)) + small).rsqrt()
    out = full * rstd
    return (out if weight is None else out * weight).to(x.dtype), rstd


@register_form("_fused_rms_norm_backward", when=_inner(1), blocks=True)
def rms_norm_backward(
    grad: Any,
    x: Any,
    normalized_shape: Sequence[int],
    rstd: Any,
    weight: Any,
    output_mask: Sequence[bool],
) -> Any:
    """One mean over the normalised dims, and the sum of the weight's gradient."""
    grad, x, rstd = in_full(aligned(grad, x)), in_full(x), in_full(rstd)
    inner = list(range(-len(normalized_shape), 0))
    lead = list(range(x.ndim - len(inner)))
    normal = x * rstd
    grads: list[Any] = [None, None]
    if output_mask[0]:
        inside = grad if weight is None else grad * weight
        grads[0] = (inside - normal * settled((inside * normal).mean(inner, True))) * rstd
    if output_mask[1]:
        grads[1] = (grad * normal).sum(lead) if lead else grad * normal
    return tuple(grads)
