"""Losses of the class that a target names: their mean divides by something that all shards know
only together."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.operator import register_form
from ..rules import Call

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


# --- the class of each target --------------------------------------------------------------------


def _is_mean(call: Call) -> bool:
    return bool(call.get("reduction") == _MEAN)


def _mean(
    op: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int
) -> tuple[Any, Any]:
    """The sum over all shards, divided by the weight of all targets that count."""
    total, count = op(x, target, weight, _SUM, ignored)
    if x.dtype is torch.float16:  # which cannot hold the sum of many losses
        each, _ = op(x, target, weight, _NONE, ignored)
        total = each.sum(dtype=torch.float32)
    return (total / count).to(x.dtype), count


for _name in ("nll_loss", "nll_loss2d"):
    _op = getattr(aten, f"{_name}_forward").default
    register_form(f"{_name}_forward", when=_is_mean, blocks=True)(partial(_mean, _op))


# --- products with classes -----------------------------------------------------------------------


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
