"""Group norm of groups that are cut: each channel gives its sums, and groups are made of those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import suggest_memory_format
from ..dispatch.operator import register_form
from ..rules import Call
from .reductions import unless_infinite
from .statistics import aligned, cut_along, in_full, settled

__all__ = ["group_norm", "group_norm_backward"]


def _cut(operand: int) -> Any:
    """Whether channels, or what is inside them, are sharded."""

    def when(call: Call) -> bool:
        return cut_along(call, operand, range(1, len(call.shape(operand))))

    return when


def _by_groups(sums: Any, groups: int, count: int) -> Any:
    """The means over groups of `count` elements, from the sums of each channel."""
    return settled(sums.unflatten(-1, (groups, -1)).sum(-1)) / count


def _in_channels(value: Any) -> Any:
    """The sums over each channel."""
    inside = list(range(2, value.ndim))
    return value.sum(inside) if inside else value


def _mean(value: Any, groups: int) -> Any:
    """The mean over each group: [batch, groups]."""
    count = value.numel() // (value.shape[0] * groups)
    return _by_groups(settled(_in_channels(value)), groups, count)


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
    """All is made of the sums of each channel.

    Next to infinities what is NaN depends on the formula: there it is that of PyTorch's kernel.
    """
    grad, x = in_full(aligned(grad, x)), in_full(x)
    middle, scale = _wide(x, in_full(mean)), _wide(x, in_full(rstd))
    normal = (x - middle) * scale
    sums = settled(torch.stack([_in_channels(v) for v in (grad, grad * normal, grad * x)]))
    grads: list[Any] = [None, None, None]
    if output_mask[0]:
        inside = grad if weight is None else grad * _by_channel(x, weight)
        weighted = sums if weight is None else sums * weight
        count = x.numel() // (x.shape[0] * group)
        means = _by_groups(weighted, group, count).unbind()
        total, along, own = [_wide(x, each) for each in means]
        finite = (inside - total - normal * along) * scale
        slope = (total * middle - own) * scale**3
        others = scale * inside + slope * x - (slope * middle + total * scale)
        grads[0] = torch.where((total + along + own).isfinite(), finite, others)
    total, along, own = sums.unbind()
    if output_mask[1]:
        by_kernel = (own - total * middle.view(total.shape)) * scale.view(total.shape)
        grads[1] = torch.where((total + along + own).isfinite(), along, by_kernel).sum(0)
    if output_mask[2]:
        grads[2] = total.sum(0)
    return tuple(grads)
