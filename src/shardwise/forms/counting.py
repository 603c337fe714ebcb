"""Counting: histograms, bincount and unique. Each rank counts what it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..build import register_form
from ..placement import Partial, Placement, Replicate
from ..ragged import as_dtensor, laid, settled
from ..replicated import fallback_form
from ..spec import DTensorSpec, TensorMeta
from ..wrapper import wrap

__all__ = ["bincount", "histc"]

aten = torch.ops.aten


def _summed(x: Any, count: Callable[..., torch.Tensor], *others: Any) -> Any:
    """The sum, left pending, of what `count` gives for the local tensors of DTensors cut alike."""
    spec = x._spec
    parts = [count(*local) for local in zip(x._locals, *(o._locals for o in others), strict=True)]
    places: list[Placement] = [
        Partial() if place.is_shard() else Replicate() for place in spec.placements
    ]
    first = parts[0]
    meta = TensorMeta(tuple(first.shape), first.stride(), first.dtype)
    return wrap(DTensorSpec(spec.topology, places, meta), tuple(parts))


def _like(op: object, value: Any, x: Any) -> Any:
    """A tensor of the shape of `x` in the layout of `x`; None stays None."""
    own = as_dtensor(value, x._spec.topology)
    return laid(op, own, own._spec.with_placements(x._spec.placements, x._spec.cuts))


@register_form("bincount")
def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """The largest value tells the size of the result; then each rank counts."""
    op = aten.bincount.default
    mesh = (x if hasattr(x, "_spec") else weights)._spec.topology
    x = settled(op, as_dtensor(x, mesh))
    if x.ndim != 1 or x.numel() == 0 or (weights is not None and weights.shape != x.shape):
        return fallback_form(op)(x, weights, minlength)
    if weights is not None and x._spec.is_replicated():
        own = settled(op, as_dtensor(weights, mesh))._spec
        x = laid(op, x, x._spec.with_placements(own.placements, own.cuts))
    low, high = int(x.min()), int(x.max())
    if low < 0 or minlength < 0:
        return fallback_form(op)(x, weights, minlength)
    size = max(high + 1, minlength)
    if weights is None:
        return _summed(x, lambda part: op(part, None, size))
    dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    weights = _like(op, weights, x)
    return _summed(x, lambda part, own: op(part, own, size).to(dtype), weights)


def _ends(op: object, x: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The range of a histogram: that of all values, if none is given."""
    if low == high and x.numel():
        low, high = x.min().item(), x.max().item()
    if low == high:
        low, high = low - 1, high + 1
    return low, high


@register_form("histc", always=True)
def histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """The range is that of all values; then each rank counts."""
    op = aten.histc.default
    x = settled(op, x)
    low, high = _ends(op, x, min, max)
    return _summed(x, lambda part: op(part, bins, low, high))
