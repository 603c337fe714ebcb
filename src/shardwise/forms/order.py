"""max, min, argmax, argmin, topk along a sharded dim: each shard offers its best elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch

from ..dispatch.infer import infer
from ..dispatch.operator import register_form
from ..layout.geometry import contiguous_stride
from ..layout.placement import Replicate
from ..layout.spec import DTensorSpec, TensorMeta
from ..rules import Call
from ..storage.operands import all_in_layout, announce_moves
from ..storage.ragged import reduce_partial
from ..storage.wrapper import wrap

aten = torch.ops.aten


def _index_dtype(size: int) -> torch.dtype:
    """The dtype in which indices of a dim are sent."""
    return torch.int32 if size < 1 << 31 else torch.int64


def _cost(call: Call) -> tuple[int, ...] | None:
    """The bytes received to reduce a Partial, and to gather at most `k` values and indices of each
    shard in one collective; None if the dim is not sharded."""
    spec, dim = call.specs[0], call.get("dim")
    if dim is None or not spec.ndim or 0 in spec.shape or not spec.dim_axes[dim]:
        return None
    own, local, k = spec.dim_cuts[dim], spec.largest_shape, call.get("k", 1)
    kept = sum(min(k, size) for size in own) * prod(local) // local[dim]
    width = spec.dtype.itemsize + _index_dtype(spec.shape[dim]).itemsize
    counts = [spec.topology.shape[axis] for axis in spec.sums]
    nbytes = 2 * prod(local) * spec.dtype.itemsize
    reductions = [nbytes * (count - 1) // count for count in counts]
    return *reductions, kept * (len(own) - 1) // len(own) * width


def _best(
    op: Any,
    x: Any,
    dim: int,
    k: int,
    args: tuple[Any, ...],
    run: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[Any, Any]:
    """Values and indices of the best elements among the best of each shard. `run(part, k)` finds
    those of a plain tensor; of equal elements the first shard has the first."""
    x = reduce_partial(op, x)
    spec, dim = x._spec, dim % x.ndim
    dtypes = (x.dtype, _index_dtype(spec.shape[dim]))
    found = []
    for coord, part in zip(spec.slots, x._locals, strict=True):
        value = index = part  # an empty shard has no elements to offer
        if part.shape[dim]:
            value, index = run(part, min(k, part.shape[dim]))
            index = index + spec.box(coord)[dim][0]
        found.append((value, index.to(dtypes[1])))
    kept = tuple(min(k, size) for size in spec.dim_cuts[dim])
    others = [None if d == dim else own for d, own in enumerate(spec.cuts or [None] * spec.ndim)]
    cuts = [kept if d == dim else own for d, own in enumerate(others)]
    shape = (*spec.shape[:dim], sum(kept), *spec.shape[dim + 1 :])
    places = [Replicate() if place.is_shard(dim) else place for place in spec.placements]
    moves = []
    for column, dtype in enumerate(dtypes):
        meta = TensorMeta(shape, contiguous_stride(shape), dtype)
        here = DTensorSpec(spec.topology, spec.placements, meta, cuts=cuts)
        offered = wrap(here, tuple(each[column] for each in found))
        moves.append((offered, here.with_placements(places, others), False))
    announce_moves(op, [(i, to) for i, (_, to, _) in enumerate(moves)], [m[0] for m in moves])
    best = []
    for value, index in zip(*all_in_layout(moves), strict=True):
        top, at = run(value, k)
        best.append((top, index.gather(dim, at).to(torch.int64)))
    metas = infer(op, (x, *args), {}, (spec,))[0]
    tops, indices = (
        wrap(moves[0][1].with_meta(meta), tuple(each[column] for each in best))
        for column, meta in enumerate(metas)
    )
    return tops, indices


def _extreme(op: Any, x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """Value and index of the first extreme element."""
    top, place = _best(op, x, dim, 1, (dim, True), lambda part, _: op(part, dim, True))
    return (top, place) if keepdim else (top.squeeze(dim), place.squeeze(dim))


def _place(index: Any, op: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
    """The first index of an extreme element: the second result of `op`."""
    index(torch.zeros(1, dtype=x.dtype))  # raises for dtypes without an order
    return _extreme(op, x, dim, keepdim)[1]


register_form("max.dim", cost=_cost)(partial(_extreme, aten.max.dim))
register_form("min.dim", cost=_cost)(partial(_extreme, aten.min.dim))
register_form("argmax", cost=_cost)(partial(_place, aten.argmax.default, aten.max.dim))
register_form("argmin", cost=_cost)(partial(_place, aten.argmin.default, aten.min.dim))


@register_form("topk", cost=_cost)
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest `k` elements among the largest `k` of each shard."""
    op, args = aten.topk.default, (k, dim, largest, sorted)
    return _best(op, x, dim, k, args, lambda part, k: op(part, k, dim, largest, sorted))
