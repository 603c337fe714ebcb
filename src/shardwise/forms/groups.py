"""Group norm of groups that are cut: each channel gives its sums, and groups are made of those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from ..entry import register_form
from ..rules import Call
from .reductions import unless_infinite
from .statistics import aligned, cut_along, in_full, settled

__all__ = ["group_norm", "group_norm_backward"]


def _cut(operand: int) -> Any:
    """Whether channels, or what is inside them, are sharded."""

    def when(call: Call) -> bool:
        return cut_along(call, operand, range(1, len(call.shape(operand))))

    return when


def _mean(value: Any, groups: int) -> Any:
    """The mean over each group, from the sums of each channel: [batch, groups]."""
    inside = list(range(2, value.ndim))
    sums = settled(value.sum(inside) if inside else value)
    count = value.numel() // (value.shape[0] * groups)
    return settled(sums.view(value.shape[0], groups, -1).sum(-1)) / count


def _wide(x: Any, stat: Any) -> Any:
    """A statistic of each group, beside the channels of `x`."""
    batch, channels = x.shape[:2]
    each = stat.unsqueeze(-1).expand(batch, stat.shape[1], channels // stat.shape[1])
    return each.reshape(batch, channels, *[1] * (x.ndim - 2))


def _by_channel(x: Any, value: Any) -> Any:
    return value.view(1, -1, *[1] * (x.ndim - 2))


@register_form("native_group_norm", when=_cut(0))
def group_norm(
    x: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    """Mean and variance are those of all shards."""
    x = in_full(x)
    mean = _mean(x, group)
    if suggest_memory_format(x) is torch.contiguous_format:
        mean = unless_infinite(mean)  # kernels of other formats add up first, and divide then
    apart = x - _wide(x, mean)
    rstd = (_mean(apart * apart, group) + eps).rsqrt()
    out = apart * _wide(x, rstd)
    if weight is not None:
        out = out * _by_channel(x, weight)
    return out if bias is None else out + _by_channel(x, bias), mean, rstd


@register_form("native_group_norm_backward", when=_cut(1))
def group_norm_backward(
    grad: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    """Two means over each group, and the sums of the parameters' gradients."""
    grad, x = in_full(aligned(grad, x)), in_full(x)
    scale = _wide(x, in_full(rstd))
    normal = (x - _wide(x, in_full(mean))) * scale
    grads: list[Any] = [None, None, None]
    if output_mask[0]:
        inside = grad if weight is None else grad * _by_channel(x, weight)
        apart = inside - _wide(x, _mean(inside, group))
        grads[0] = (apart - normal * _wide(x, _mean(inside * normal, group))) * scale
    others = [dim for dim in range(x.ndim) if dim != 1]
    for place, value in ((1, grad * normal), (2, grad)):
        if output_mask[place]:
            grads[place] = value.sum(others)
    return tuple(grads)
