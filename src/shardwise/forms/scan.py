"""cumsum, cumprod, logcumsumexp, cummax, cummin along a sharded dim: each shard is scanned by
itself, and the last element of each scan is carried into the shards after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dispatch.operator import register_form
from ..layout.geometry import Box
from ..rules import keeps_sums
from ..storage.wrapper import wrap
from .shards import candidates, columns, if_sharded, metas, placed, reduce_partial, shard_of

aten = torch.ops.aten
_WIDER = {
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
Parts = tuple[torch.Tensor, ...]
Carry = Callable[[Parts, Parts], Parts]
"""From the carried value and the scan of a shard to the result."""


def _scan(op: Any, x: Any, dim: int, carry: Carry, **kwargs: Any) -> tuple[Any, ...]:
    """The results of `op`; only the last element of each shard's scan moves."""
    dim %= x.ndim
    spec = x._spec
    scans: list[Parts] = []

    def local(part: torch.Tensor, box: Box) -> Parts:
        made = op(part, dim, **kwargs)
        parts = (made,) if isinstance(made, torch.Tensor) else (made[0], made[1] + box[dim][0])
        scans.append(parts)
        return tuple(p.narrow(dim, max(p.shape[dim] - 1, 0), min(p.shape[dim], 1)) for p in parts)

    results = metas(op, x, dim, **kwargs)
    totals = candidates(op, x, [dim], 1, local, [meta.dtype for meta in results])
    at = totals[0]._spec
    filled = [cut > 0 for cut in spec.dim_cuts[dim]]
    found = []
    for slot, coord in enumerate(spec.slots):
        before = sum(filled[: shard_of(spec, dim, coord)])
        parts = scans[slot]
        if before and parts[0].shape[dim]:
            held = [t._locals[at.slot(coord)].narrow(dim, 0, before) for t in totals]
            parts = carry(_last(op, held, dim), parts)
        found.append(parts)
    outs = [placed(spec, meta, {}) for meta in results]
    return tuple(map(wrap, outs, columns(found, len(outs))))


def _last(op: Any, totals: list[torch.Tensor], dim: int) -> Parts:
    """The last element of the scan of the totals."""
    made = op(totals[0], dim)
    if isinstance(made, torch.Tensor):
        return (made.narrow(dim, -1, 1).to(totals[0].dtype),)
    value, place = (part.narrow(dim, -1, 1) for part in made)
    return value, totals[1].gather(dim, place)


@register_form("cumsum", cost=if_sharded)
def cumsum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Running sums; a Partial sum stays Partial unless it is cast to a narrower dtype."""
    op = aten.cumsum.default
    kinds = {x.placements[axis].reduce_op for axis in x._spec.sums}
    passes = keeps_sums(x.dtype, metas(op, x, dim, dtype=dtype)[0].dtype)
    if not (passes and kinds <= {"sum"}):
        x = reduce_partial(op, x)
    (made,) = _scan(op, x, dim, lambda c, p: (p[0] + c[0],), dtype=dtype)
    return made


@register_form("cumprod", cost=if_sharded)
def cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Running products."""
    op = aten.cumprod.default
    (made,) = _scan(op, reduce_partial(op, x), dim, lambda c, p: (p[0] * c[0],), dtype=dtype)
    return made


@register_form("logcumsumexp", cost=if_sharded)
def logcumsumexp(x: Any, dim: int) -> Any:
    """Running sums of exponentials, in logarithms.

    The kernel adds in a wider dtype, and so does the carry: the backward takes differences of
    exponentials of the result, which enlarges rounding errors.
    """
    op = aten.logcumsumexp.default
    wide = reduce_partial(op, x).to(_WIDER.get(x.dtype, x.dtype))
    (made,) = _scan(op, wide, dim, lambda c, p: (torch.logaddexp(p[0], c[0]),))
    return made.to(x.dtype)


def _running(op: Any, x: Any, dim: int, beats: Callable[..., torch.Tensor]) -> Any:
    """Running extremes: of equal ones the last, and NaN from where it first is, as in PyTorch."""

    def carry(carried: Parts, parts: Parts) -> Parts:
        old, new = carried[0], parts[0]
        mine = beats(new, old)
        if new.is_floating_point():
            mine = new.isnan() | (mine & ~old.isnan())
        return tuple(torch.where(mine, p, c) for p, c in zip(parts, carried, strict=True))

    return _scan(op, reduce_partial(op, x), dim, carry)


@register_form("cummax", cost=if_sharded)
def cummax(x: Any, dim: int) -> Any:
    """Running maxima and where they are."""
    return _running(aten.cummax.default, x, dim, torch.ge)


@register_form("cummin", cost=if_sharded)
def cummin(x: Any, dim: int) -> Any:
    """Running minima and where they are."""
    return _running(aten.cummin.default, x, dim, torch.le)
