"""Batch norm: the statistics of a batch are those of the whole batch, wherever its parts are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import suggest_memory_format
from ..entry import register_form
from ..ragged import as_dtensor
from ..replicated import fallback_form, mesh_of
from ..wrapper import Wrapper
from .reductions import moments
from .statistics import aligned, in_full, settled

__all__ = ["batch_norm", "batch_norm_backward"]

aten = torch.ops.aten


def _dims(x: Any) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _wide(x: Any, value: Any) -> Any:
    """A value of each channel, beside `x`."""
    return value.reshape([1, -1, *[1] * (x.ndim - 2)])


def _is_whole(*tensors: Any) -> bool:
    return all(t._spec.is_replicated() for t in tensors if isinstance(t, Wrapper))


def _on_mesh(x: Any, *others: Any) -> Any:
    """`x`, a plain tensor too, as a DTensor beside the others."""
    return as_dtensor(x, mesh_of("batch_norm", [x, *others]))


def _scaled(x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, like: Any) -> Any:
    out = (x - _wide(x, mean)) * _wide(x, rstd)
    if weight is not None:
        out = out * _wide(x, weight)
    if bias is not None:
        out = out + _wide(x, bias)
    return out.to(like.dtype).contiguous(memory_format=suggest_memory_format(like))


def _update(running: Any, value: Any, momentum: float) -> None:
    """Running statistics keep their layout; one that is a plain tensor is written in place too."""
    if running is not None:
        running.copy_(momentum * value + (1 - momentum) * running)


def _moments(x: Any) -> tuple[Any, Any]:
    """Variance and mean of each channel; not `var_mean`, which next to an infinity has no mean."""
    dims = _dims(x)
    if any(x._spec.dim_axes[dim] for dim in dims):
        return moments(x, dims, correction=0)
    return aten.var.correction(x, dims, correction=0), x.mean(dims)


def _trained(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """The result, and mean, variance and inverse deviation of the whole batch."""
    full = in_full(x)
    var, mean = _moments(full)
    rstd = (var + eps).rsqrt()
    return _scaled(full, weight, bias, mean, rstd, x), mean, var, rstd


def _kept(x: Any, params: Sequence[Any], *stats: Any) -> list[Any]:
    """Statistics in the dtype in which a kernel keeps them for its backward."""
    narrow = x.device.type == "cpu" and not any(
        p is not None and p.dtype is torch.float32 for p in params
    )
    return [stat.to(x.dtype) for stat in stats] if narrow else list(stats)


def _unbiased(x: Any, var: Any) -> Any:
    count = x.numel() // max(x.shape[1], 1)
    return var * (count / (count - 1) if count > 1 else float("nan"))


@register_form("_native_batch_norm_legit.default", always=True)
def batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """In training the statistics are shared; otherwise every channel is scaled where it is."""
    given = (x, weight, bias, running_mean, running_var)
    if _is_whole(*given):
        return fallback_form(aten._native_batch_norm_legit.default)(*given, training, momentum, eps)
    x = _on_mesh(x, *given)
    if not training:
        rstd = (in_full(running_var) + eps).rsqrt()
        out = _scaled(in_full(x), weight, bias, in_full(running_mean), rstd, x)
        return out, *_nothing(x, running_mean.dtype)
    out, mean, var, rstd = _trained(x, weight, bias, eps)
    _update(running_mean, mean, momentum)
    _update(running_var, _unbiased(x, var), momentum)
    return out, *_kept(x, given[1:], mean, rstd)


def _nothing(x: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The statistics that no training returns: tensors of no elements."""
    return x.new_empty([0], dtype=dtype), x.new_empty([0], dtype=dtype)


@register_form("_native_batch_norm_legit.no_stats", always=True)
def batch_norm_alone(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Without running statistics those of the batch always serve."""
    if _is_whole(x, weight, bias):
        return fallback_form(aten._native_batch_norm_legit.no_stats)(
            x, weight, bias, training, momentum, eps
        )
    x = _on_mesh(x, weight, bias)
    out, mean, _, rstd = _trained(x, weight, bias, eps)
    return out, *_kept(x, (weight, bias), mean, rstd)


@register_form("native_batch_norm", "miopen_batch_norm", always=True)
def native_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """As `batch_norm`: it writes into the running statistics too, though its schema is silent."""
    if running_mean is None or running_var is None:
        return batch_norm_alone(x, weight, bias, training, momentum, eps)
    return batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


@register_form("cudnn_batch_norm", always=True)
def cudnn_batch_norm(x: Any, *args: Any) -> Any:
    """With the reserve of cuDNN, which its backward has no use for here."""
    return *native_batch_norm(x, *args), x.new_empty([0], dtype=torch.uint8)


def _with(training: bool, form: Any) -> Any:
    """A batch norm that is not told whether it trains: its name says it."""

    def run(x: Any, *args: Any) -> Any:
        *given, momentum, eps = args
        return form(x, *given, training, momentum, eps)

    return run


for _name, _run in {
    "_batch_norm_with_update": _with(True, cudnn_batch_norm),
    "_batch_norm_no_update": _with(False, cudnn_batch_norm),
    "_native_batch_norm_legit_no_training": _with(False, native_batch_norm),
}.items():
    register_form(_name, always=True)(_run)


@register_form("_native_batch_norm_legit_functional", always=True)
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
    """With new running statistics in place of a write."""
    mean, var = running_mean.clone(), running_var.clone()
    return *batch_norm(x, weight, bias, mean, var, training, momentum, eps), mean, var


@register_form("_batch_norm_with_update_functional", always=True)
def batch_norm_with_update_functional(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    """Training, with a reserve and new running statistics in place of a write."""
    out, *saved, mean, var = batch_norm_functional(x, weight, bias, mean, var, True, momentum, eps)
    return out, *saved, x.new_empty([0], dtype=torch.uint8), mean, var


@register_form("native_batch_norm_backward", always=True)
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
    """Two sums of each channel, which are also the gradients of the parameters."""
    given = (grad, x, weight, running_mean, running_var, save_mean, save_invstd)
    if _is_whole(*given):
        return fallback_form(aten.native_batch_norm_backward.default)(
            *given, train, eps, output_mask
        )
    x = _on_mesh(x, *given)
    like, dtype = x, x.dtype if weight is None else weight.dtype
    grad, x = in_full(aligned(grad, x)), in_full(x)
    mean = in_full(save_mean if train else running_mean)
    rstd = in_full(save_invstd) if train else (in_full(running_var) + eps).rsqrt()
    normal = (x - _wide(x, mean)) * _wide(x, rstd)
    bias_grad = settled(grad.sum(_dims(x)))
    weight_grad = settled((grad * normal).sum(_dims(x)))
    out = None
    if output_mask[0]:
        inside = grad
        if train:
            count = x.numel() // max(x.shape[1], 1)
            inside = grad - (_wide(x, bias_grad) + normal * _wide(x, weight_grad)) / count
        scale = rstd if weight is None else rstd * weight
        out = (inside * _wide(x, scale)).to(like.dtype)
        out = out.contiguous(memory_format=suggest_memory_format(like))
    return (
        out,
        weight_grad.to(dtype) if output_mask[1] else None,
        bias_grad.to(dtype) if output_mask[2] else None,
    )


@register_form("cudnn_batch_norm_backward", always=True)
def cudnn_batch_norm_backward(
    x: Any,
    grad: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    rstd: Any,
    eps: float,
    reserve: Any = None,
) -> Any:
    """As `batch_norm_backward`, of cuDNN's results."""
    return batch_norm_backward(
        grad, x, weight, running_mean, running_var, mean, rstd, True, eps, [True] * 3
    )


register_form("miopen_batch_norm_backward", always=True)(cudnn_batch_norm_backward)


@register_form("batch_norm_backward", always=True)
def any_batch_norm_backward(
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    rstd: Any,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Any,
) -> Any:
    """As `batch_norm_backward`, whatever the backend."""
    return batch_norm_backward(
        grad, x, weight, running_mean, running_var, mean, rstd, update, eps, output_mask
    )
