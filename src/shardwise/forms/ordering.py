"""Largest and smallest elements along a sharded dim: every shard names its candidates."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ..dispatch.operator import register_form
from ..layout.geometry import Box, contiguous_stride
from ..layout.spec import DTensorSpec
from ..rules import Call
from ..storage.wrapper import wrap
from .exchange import index_dtype
from .shards import candidates, columns, lacking, metas, placed, reduce_partial, sharded_on
from .sorting import price, sorts

__all__ = ["aminmax", "argmax", "argmin", "max_dim", "min_dim", "topk"]

aten = torch.ops.aten


def _few(spec: DTensorSpec, dim: int, k: int) -> int:
    """What it costs to gather so many elements of each shard, and where they are."""
    cuts = spec.dim_cuts[dim]
    others = prod(max(each) for d, each in enumerate(spec.dim_cuts) if d != dim)
    width = spec.dtype.itemsize + index_dtype(spec.shape[dim]).itemsize
    nbytes = others * sum(min(k, size) for size in cuts) * (len(cuts) - 1) // len(cuts) * width
    return max(spec.topology.links[axis].price(nbytes) for axis in spec.dim_axes[dim])


def _moves_less(spec: DTensorSpec, dim: int, k: int) -> bool:
    """Whether candidates are less than what a rule moves."""
    links = [spec.topology.links[axis] for axis in spec.dim_axes[dim]]
    return _few(spec, dim, k) <= max(link.price(lacking(spec, dim)) for link in links)


def _names_one(call: Call) -> bool:
    """As `_moves_less`, for one element along a sharded dim, or of all."""
    dim = call.get("dim")
    if dim is None or not call.specs[0].ndim:
        return sharded_on()(call)
    spec = call.specs[0].reduced
    dim %= spec.ndim
    return bool(spec.dim_axes[dim]) and _moves_less(spec, dim, 1)


def _extreme(op: Any, x: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """Value and index of the first extreme element: that of the first shard that has it."""
    x = reduce_partial(op, x)
    dim %= x.ndim
    narrow = index_dtype(x.shape[dim])

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


@register_form("max.dim", when=_names_one)
def max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The largest element and where it is first."""
    return _extreme(aten.max.dim, x, dim, keepdim)


@register_form("min.dim", when=_names_one)
def min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The smallest element and where it is first."""
    return _extreme(aten.min.dim, x, dim, keepdim)


def _place(op: Any, by_dim: Any, x: Any, dim: int | None, keepdim: bool) -> Any:
    op(torch.zeros(1, dtype=x.dtype))  # PyTorch's own error, where it knows no such order
    if dim is not None:
        return _extreme(by_dim, x, dim, keepdim)[1]
    x = reduce_partial(op, x)
    shape = x.shape

    def local(part: torch.Tensor, box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        if not part.numel():
            few = part[tuple(slice(min(1, size)) for size in part.shape)]
            return few, few.to(torch.int64)
        at = op(part.reshape(-1))
        value = part.reshape(-1)[at].view((1,) * part.ndim)
        where = torch.unravel_index(at, part.shape)
        index = sum(
            (place + start) * stride
            for place, (start, _), stride in zip(where, box, contiguous_stride(shape), strict=True)
        )
        return value, torch.as_tensor(index).view((1,) * part.ndim)

    values, indices = candidates(op, x, range(x.ndim), 1, local, (x.dtype, torch.int64))
    spec = _whole(values._spec, metas(op, x, None, keepdim)[0])
    found = []
    for value, index in zip(values._locals, indices._locals, strict=True):
        first, order = index.reshape(-1).sort()  # of equal ones the first in the whole tensor
        found.append(first[op(value.reshape(-1)[order])].reshape(spec.shape))
    return wrap(spec, tuple(found))


def _whole(spec: DTensorSpec, meta: Any) -> DTensorSpec:
    return DTensorSpec(spec.topology, spec.placements, meta)


@register_form("argmax", when=_names_one)
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Where the largest element is first."""
    return _place(aten.argmax.default, aten.max.dim, x, dim, keepdim)


@register_form("argmin", when=_names_one)
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Where the smallest element is first."""
    return _place(aten.argmin.default, aten.min.dim, x, dim, keepdim)


@register_form("aminmax")
def aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """A pending minimum and a pending maximum."""
    dims = [] if dim is None else [dim]
    return aten.amin.default(x, dims, keepdim), aten.amax.default(x, dims, keepdim)


def _selects(call: Call) -> bool:
    """Whether candidates, or sorting, are less than what a rule moves."""
    spec = call.specs[0].reduced
    dim, k = call.get("dim") % max(spec.ndim, 1), call.get("k")
    if not spec.ndim or not spec.dim_axes[dim]:
        return False
    return _moves_less(spec, dim, k) or sorts(call)


@register_form("topk", when=_selects)
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest k of what every shard has among its largest k, or the first ones in order."""
    op = aten.topk.default
    x = reduce_partial(op, x)
    dim %= x.ndim
    in_order = price(x._spec, dim)
    if in_order is not None and in_order < _few(x._spec, dim, k):
        return tuple(made.narrow(dim, 0, k) for made in aten.sort.default(x, dim, largest))
    narrow = index_dtype(x.shape[dim])

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
