"""Losses of the class that a target names: the mean divides by the weight of all targets."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.operator import register_form
from ..rules import Call

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


def _if_mean(call: Call) -> tuple[()] | None:
    return () if call.get("reduction") == _MEAN else None


def _mean_nll(
    op: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int
) -> tuple[Any, Any]:
    """The sum over all shards, divided by the weight of all targets that are not ignored."""
    total, count = op(x, target, weight, _SUM, ignored)
    if x.dtype is torch.float16:  # which cannot hold the sum of many losses
        each, _ = op(x, target, weight, _NONE, ignored)
        total = each.sum(dtype=torch.float32)
    return (total / count).to(x.dtype), count


for _op in (aten.nll_loss_forward, aten.nll_loss2d_forward):
    _name = _op.default._schema.name.removeprefix("aten::")
    register_form(_name, cost=_if_mean, blocks=True)(partial(_mean_nll, _op.default))
