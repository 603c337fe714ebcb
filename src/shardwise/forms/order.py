"""max, min, argmax, argmin, topk along a sharded dim: each shard offers its best elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..dispatch.operator import register_form
from ..layout.geometry import Box, contiguous_stride
from ..layout.spec import DTensorSpec
from ..rules import Call
from ..storage.wrapper import wrap
from .shards import candidates, columns, metas, placed, reduce_partial

aten = torch.ops.aten


def _index_dtype(size: int) -> torch.dtype:
    """The dtype in which indices of a dim are sent."""
    return torch.int32 if size < 1 << 31 else torch.int64


def _cost(spec: DTensorSpec, dims: Sequence[int], k: int) -> tuple[int, ...] | None:
    """The bytes received to reduce a Partial, and to gather at most `k` values and indices of each
    shard along `dims` in one collective; None if no dim of these is sharded."""
    if not any(spec.dim_axes[dim] for dim in dims):
        return None
    cuts = spec.dim_cuts
    kept = prod(
        sum(min(k, size) for size in own) if dim in dims else max(own)
        for dim, own in enumerate(cuts)
    )
    count = prod(len(cuts[dim]) for dim in dims)
    index = 8 if len(dims) > 1 else _index_dtype(spec.shape[dims[0]]).itemsize
    sizes = [kept * (count - 1) // count * (spec.dtype.itemsize + index)]
    local = prod(spec.largest_shape) * spec.dtype.itemsize
    counts = [spec.topology.shape[axis] for axis in spec.sums]
    return *(2 * local * (count - 1) // count for count in counts), *sizes


def _one_candidate(call: Call) -> tuple[int, ...] | None:
    spec, dim = call.specs[0], call.get("dim")
    if not spec.ndim or 0 in spec.shape:
        return None
    return _cost(spec, range(spec.ndim) if dim is None else [dim % spec.ndim], 1)


def _k_candidates(call: Call) -> tuple[int, ...] | None:
    spec = call.specs[0]
    return _cost(spec, [call.get("dim") % spec.ndim], call.get("k")) if spec.ndim else None


def _extreme(op: Any, x: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """Value and index of the first extreme element: that of the first shard that has it."""
    x = reduce_partial(op, x)
    dim %= x.ndim
    narrow = _index_dtype(x.shape[dim])

    def local(part: torch.Tensor, box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        if not part.shape[dim]:
            return part, part.to(narrow)
        value, index = op(part, dim, True)
        return value, (index + box[dim][0]).to(narrow)

    values, indices = candidates(op, x, [dim], 1, local, (x.dtype, narrow))
    outs = [
        placed(values._spec, meta, {}, None if keepdim else dim)
        for meta in metas(op, x, dim, keepdim)
    ]
    best: list[tuple[torch.Tensor, ...]] = []
    for value, index in zip(values._locals, indices._locals, strict=True):
        top, at = op(value, dim, True)
        pair = (top, index.gather(dim, at).to(torch.int64))
        best.append(pair if keepdim else tuple(part.squeeze(dim) for part in pair))
    tops, places = map(wrap, outs, columns(best, 2))
    return tops, places


@register_form("max.dim", cost=_one_candidate)
def max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The largest element and the first index of it."""
    return _extreme(aten.max.dim, x, dim, keepdim)


@register_form("min.dim", cost=_one_candidate)
def min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The smallest element and the first index of it."""
    return _extreme(aten.min.dim, x, dim, keepdim)


def _index_of_all(op: Any, x: Any, keepdim: bool) -> Any:
    """The index of the extreme element of all, counted through the flat tensor."""
    x = reduce_partial(op, x)
    strides = contiguous_stride(x.shape)

    def local(part: torch.Tensor, box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        if not part.numel():
            few = part[tuple(slice(min(1, size)) for size in part.shape)]
            return few, few.to(torch.int64)
        at = op(part.reshape(-1))
        where = torch.unravel_index(at, part.shape)
        index = sum(
            (place + start) * stride
            for place, (start, _), stride in zip(where, box, strides, strict=True)
        )
        pair = part.reshape(-1)[at], torch.as_tensor(index)
        return pair[0].view((1,) * part.ndim), pair[1].view((1,) * part.ndim)

    values, indices = candidates(op, x, range(x.ndim), 1, local, (x.dtype, torch.int64))
    at = values._spec
    spec = DTensorSpec(at.topology, at.placements, metas(op, x, None, keepdim)[0])
    found = []
    for value, index in zip(values._locals, indices._locals, strict=True):
        first, order = index.reshape(-1).sort()  # of equal elements the first in the whole tensor
        found.append(first[op(value.reshape(-1)[order])].reshape(spec.shape))
    return wrap(spec, tuple(found))


def _index(op: Any, by_dim: Any, x: Any, dim: int | None, keepdim: bool) -> Any:
    op(torch.zeros(1, dtype=x.dtype))  # raises PyTorch's error for dtypes without an order
    if dim is None:
        return _index_of_all(op, x, keepdim)
    return _extreme(by_dim, x, dim, keepdim)[1]


@register_form("argmax", cost=_one_candidate)
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The first index of the largest element."""
    return _index(aten.argmax.default, aten.max.dim, x, dim, keepdim)


@register_form("argmin", cost=_one_candidate)
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The first index of the smallest element."""
    return _index(aten.argmin.default, aten.min.dim, x, dim, keepdim)


@register_form("aminmax")
def aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """A Partial minimum and a Partial maximum."""
    dims = [] if dim is None else [dim]
    return aten.amin.default(x, dims, keepdim), aten.amax.default(x, dims, keepdim)


@register_form("topk", cost=_k_candidates)
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest `k` elements among the largest `k` of each shard."""
    op = aten.topk.default
    x = reduce_partial(op, x)
    dim %= x.ndim
    narrow = _index_dtype(x.shape[dim])

    def local(part: torch.Tensor, box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        value, index = op(part, min(k, part.shape[dim]), dim, largest, sorted)
        return value, (index + box[dim][0]).to(narrow)

    values, indices = candidates(op, x, [dim], k, local, (x.dtype, narrow))
    outs = [placed(values._spec, meta, {}) for meta in metas(op, x, k, dim, largest, sorted)]
    best: list[tuple[torch.Tensor, ...]] = []
    for value, index in zip(values._locals, indices._locals, strict=True):
        top, at = op(value, k, dim, largest, sorted)
        best.append((top, index.gather(dim, at).to(torch.int64)))
    tops, places = map(wrap, outs, columns(best, 2))
    return tops, places
