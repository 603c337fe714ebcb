"""Losses whose mean divides by something that all shards know only together."""

from __future__ import annotations

from typing import Any

import torch

from ..entry import register_form
from ..plain import full_local
from ..rules import Call

__all__ = [
    "ctc_loss",
    "ctc_loss_backward",
    "linear_cross_entropy",
    "multi_margin_loss",
    "multi_margin_loss_backward",
    "nll_loss",
    "nll_loss2d",
]

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


def _is_mean(call: Call) -> bool:
    return bool(call.get("reduction") == _MEAN)


def _mean(op: Any, x: Any, target: Any, weight: Any, ignored: int) -> tuple[Any, Any]:
    total, count = op(x, target, weight, _SUM, ignored)
    if x.dtype is torch.float16:  # which cannot hold the sum of many losses
        each, _ = op(x, target, weight, _NONE, ignored)
        total = each.sum(dtype=torch.float32)
    return (total / count).to(x.dtype), count


@register_form("nll_loss_forward", when=_is_mean, blocks=True)
def nll_loss(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """The mean is the sum over all shards divided by the weight of all targets that count."""
    return _mean(aten.nll_loss_forward.default, x, target, weight, ignore_index)


@register_form("nll_loss2d_forward", when=_is_mean, blocks=True)
def nll_loss2d(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """As `nll_loss`, for images."""
    return _mean(aten.nll_loss2d_forward.default, x, target, weight, ignore_index)


def _lengths(value: Any) -> list[int]:
    """Lengths as numbers: the shapes of what follows depend on them."""
    return [int(length) for length in full_local(value).flatten()]


@register_form("_ctc_loss.Tensor", always=True)
def ctc_loss(
    log_probs: Any, targets: Any, inputs: Any, lengths: Any, *rest: Any, **kwargs: Any
) -> Any:
    """With lengths in tensors, which may be sharded as the batch is."""
    op = aten._ctc_loss.default
    return op(log_probs, targets, _lengths(inputs), _lengths(lengths), *rest, **kwargs)


@register_form("_ctc_loss_backward.Tensor", always=True)
def ctc_loss_backward(
    grad: Any, log_probs: Any, targets: Any, inputs: Any, lengths: Any, *rest: Any, **kwargs: Any
) -> Any:
    """As `ctc_loss`."""
    op = aten._ctc_loss_backward.default
    return op(grad, log_probs, targets, _lengths(inputs), _lengths(lengths), *rest, **kwargs)


# --- margins to the class of the target -----------------------------------------------------------


def _cuts_classes(call: Call) -> bool:
    spec = call.specs[call.get("self")].reduced
    return spec.ndim > 0 and 0 not in spec.shape and bool(spec.dim_axes[-1])


def _margins(x: Any, target: Any, margin: float) -> tuple[Any, Any]:
    """How far each other class comes nearer than the margin, or nothing; and the targets as a
    column."""
    column = target.reshape(-1, 1)
    rows = x.unsqueeze(0) if x.ndim == 1 else x
    near = margin - rows.gather(1, column) + rows
    near = torch.where(near > 0, near, 0)  # a NaN is no nearer
    return near.scatter(1, column, 0.0), column


@register_form("multi_margin_loss", when=_cuts_classes)
def multi_margin_loss(
    x: Any,
    target: Any,
    p: int = 1,
    margin: float = 1,
    weight: Any = None,
    reduction: int = _MEAN,
) -> Any:
    """Ranks share the score of the target, and what their classes add up to."""
    near, column = _margins(x, target, margin)
    each = (near if p == 1 else near * near).sum(1, keepdim=True)
    if weight is not None:
        each = each * weight[column]
    each = each.squeeze(1) / x.shape[-1]
    if reduction == _NONE:
        return each if x.ndim > 1 else each.squeeze(0)
    return each.sum() if reduction == _SUM else each.mean()


@register_form("multi_margin_loss_backward", when=_cuts_classes)
def multi_margin_loss_backward(
    grad: Any,
    x: Any,
    target: Any,
    p: int,
    margin: float,
    weight: Any = None,
    reduction: int = _MEAN,
) -> Any:
    """What a class gets nearer, the class of the target must go farther."""
    near, column = _margins(x, target, margin)
    rows = column.shape[0] if reduction == _MEAN else 1
    scale = grad.reshape(-1, 1) / (x.shape[-1] * rows)
    if weight is not None:
        scale = scale * weight[column]
    each = torch.where(near > 0, scale if p == 1 else 2 * scale * near, 0)
    made = each.scatter(1, column, -each.sum(1, keepdim=True))
    return made if x.ndim > 1 else made.squeeze(0)


def _is_linear_mean(call: Call) -> bool:
    return bool(call.get("reduction") == "mean")


@register_form("torch_nn::_linear_cross_entropy_batch_chunked", when=_is_linear_mean)
def linear_cross_entropy(
    x: Any,
    matrix: Any,
    target: Any,
    bias: Any,
    weight: Any,
    reduction: str,
    ignore: int,
    *rest: Any,
) -> Any:
    """The sum, and its gradients, over the weight of all targets that count."""
    op = torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default
    made = op(x, matrix, target, bias, weight, "sum", ignore, *rest)
    counts = target != ignore
    if weight is None:
        total = counts.sum()
    else:
        total = torch.where(counts, weight[torch.where(counts, target, 0)], 0).sum()
    return tuple(each / total for each in made)
