"""Batch norm in training: the statistics are those of the whole batch, over all shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import suggest_memory_format
from ..dispatch.fallback import mesh_of
from ..dispatch.operator import register_form
from ..rules import Call
from ..storage.ragged import as_dtensor
from .decomposed import aligned, in_full, moments, reduced

aten = torch.ops.aten


def _dims(x: Any) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _wide(x: Any, value: Any) -> Any:
    """A value for each channel, shaped to broadcast with `x`."""
    return value.reshape([1, -1, *[1] * (x.ndim - 2)])


def _on_mesh(x: Any, *others: Any) -> Any:
    """`x` as a DTensor on the mesh of the others."""
    return as_dtensor(x, mesh_of("batch_norm", [x, *others]))


def _as(value: Any, dtype: torch.dtype) -> Any:
    return None if value is None else value.to(dtype)


def _if_training(call: Call) -> tuple[()] | None:
    return () if call.get("training", call.get("train")) else None


@register_form("_native_batch_norm_legit_functional", cost=_if_training)
def batch_norm_functional(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """The result, mean and reciprocal deviation of the whole batch, and new running statistics, if
    there are some."""
    x = _on_mesh(x, weight, bias, running_mean, running_var)
    var, mean = moments(in_full(x), _dims(x), correction=0)
    params = (_as(weight, mean.dtype), _as(bias, mean.dtype))
    out = aten._native_batch_norm_legit_no_training.default(x, *params, mean, var, 0.0, eps)[0]
    count = x.numel() // max(x.shape[1], 1)
    made = [out, mean, (var + eps).rsqrt()]
    if running_mean is not None:
        unbiased = var * (count / (count - 1) if count > 1 else float("nan"))
        for old, stat in ((running_mean, mean), (running_var, unbiased)):
            made.append((momentum * stat + (1 - momentum) * old).to(old.dtype))
    return tuple(made)


@register_form("_native_batch_norm_legit.no_stats", cost=_if_training)
def batch_norm_alone(x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    """As `batch_norm_functional`, without running statistics."""
    return batch_norm_functional(x, weight, bias, None, None, *options)


@register_form(
    "_native_batch_norm_legit.default", "native_batch_norm", "miopen_batch_norm", always=True
)
def batch_norm(x: Any, *args: Any) -> Any:
    """Writes the running statistics, which keep their layout; plain ones are written too.

    The schemas of some names do not say so.
    """
    *given, training, momentum, eps = args
    x = _on_mesh(x, *given)
    if given[2] is None or given[3] is None:
        op = aten._native_batch_norm_legit.no_stats
        return op(x, *given[:2], True, momentum, eps)
    if not training:
        return aten._native_batch_norm_legit_no_training.default(x, *given, momentum, eps)
    *made, mean, var = aten._native_batch_norm_legit_functional.default(x, *given, *args[4:])
    given[2].copy_(mean)
    given[3].copy_(var)
    return tuple(made)


@register_form("_batch_norm_no_update", always=True)
def batch_norm_no_update(x: Any, *args: Any) -> Any:
    """Evaluation, with an empty reserve: the backward here does not use it."""
    reserve = x.new_empty([0], dtype=torch.uint8)
    return *batch_norm(x, *args[:-2], False, *args[-2:]), reserve


@register_form("native_batch_norm_backward", cost=_if_training)
def batch_norm_backward(
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    """The gradient with fixed statistics, minus what flows through the statistics: two sums of each
    channel, which are also the gradients of the parameters."""
    given = (grad, x, weight, running_mean, running_var, save_mean, save_invstd)
    x = _on_mesh(x, *given)
    like, dtype = x, x.dtype if weight is None else weight.dtype
    x, mean, rstd = in_full(x), in_full(save_mean), in_full(save_invstd)
    grad = in_full(aligned(grad, x))
    scale = None if weight is None else weight.to(rstd.dtype)
    # The kernel with fixed statistics returns both sums, and the first part of the gradient.
    fixed = (grad, x, scale, mean, rstd**-2, None, None, False, 0.0)
    made = aten.native_batch_norm_backward.default(*fixed, [output_mask[0], True, True])
    out, of_weight, of_bias = made[0], reduced(made[1]), reduced(made[2])
    if output_mask[0]:
        share = rstd if scale is None else rstd * scale
        share = share / (x.numel() // max(x.shape[1], 1))
        apart = (x - _wide(x, mean)).mul_(_wide(x, share * rstd * of_weight))
        out = out.sub_(apart).sub_(_wide(x, share * of_bias)).to(like.dtype)
        out = out.contiguous(memory_format=suggest_memory_format(like))
    return (
        out,
        of_weight.to(dtype) if output_mask[1] else None,
        of_bias.to(dtype) if output_mask[2] else None,
    )
