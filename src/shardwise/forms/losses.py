"""Losses whose mean divides by something that all shards know only together."""

from __future__ import annotations

from typing import Any

import torch

from ..build import register_form
from ..rules import Call

__all__ = ["nll_loss", "nll_loss2d"]

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def _is_mean(call: Call) -> bool:
    return bool(call.get("reduction") == _MEAN)


def _mean(op: Any, *args: Any) -> tuple[Any, Any]:
    total, weight = op(*args[:3], _SUM, args[4])
    return total / weight, weight


@register_form("nll_loss_forward", when=_is_mean)
def nll_loss(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """The mean is the sum over all shards divided by the weight of all targets that count."""
    return _mean(aten.nll_loss_forward.default, x, target, weight, reduction, ignore_index)


@register_form("nll_loss2d_forward", when=_is_mean)
def nll_loss2d(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """As `nll_loss`, for images."""
    return _mean(aten.nll_loss2d_forward.default, x, target, weight, reduction, ignore_index)
