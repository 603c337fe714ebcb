"""cumsum and cumprod along a sharded dim: each shard is scanned by itself, and the last element of
each scan is carried into the shards after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dispatch.operator import register_form
from ..layout.geometry import Box, flat_index
from ..rules import Call, keeps_sums
from ..rules.reductions import reduced_dims
from ..storage.ragged import reduce_partial
from ..storage.wrapper import wrap
from .shards import candidates, metas

aten = torch.ops.aten


def _cost(call: Call) -> tuple[()] | None:
    spec = call.specs[0]
    return () if any(spec.dim_axes[dim] for dim in reduced_dims(call)) else None


def _scan(op: Any, x: Any, dim: int, dtype: Any, carry: Callable[..., torch.Tensor]) -> Any:
    """The result of `op`; only the last element of each shard's scan moves."""
    dim %= x.ndim
    spec = x._spec
    scans: list[torch.Tensor] = []

    def local(part: torch.Tensor, box: Box) -> tuple[torch.Tensor]:
        scans.append(op(part, dim, dtype=dtype))
        return (scans[-1][(slice(None),) * dim + (slice(-1, None),)],)

    (result,) = metas(op, x, dim, dtype=dtype)
    (totals,) = candidates(op, x, dim, 1, local, [result.dtype])
    filled = [cut > 0 for cut in spec.dim_cuts[dim]]
    found = []
    for coord, scan in zip(spec.slots, scans, strict=True):
        shard = flat_index(coord, spec.topology.shape, spec.dim_axes[dim])
        before = sum(filled[:shard])
        if before and scan.shape[dim]:
            held = totals._locals[totals._spec.slot(coord)].narrow(dim, 0, before)
            scan = carry(scan, op(held, dim, dtype=held.dtype).narrow(dim, -1, 1))
        found.append(scan)
    return wrap(spec.with_meta(result), tuple(found))


@register_form("cumsum", cost=_cost)
def cumsum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Running sums; a Partial sum stays Partial unless it is cast to a narrower dtype."""
    op = aten.cumsum.default
    kinds = {x.placements[axis].reduce_op for axis in x._spec.sums}
    passes = keeps_sums(x.dtype, metas(op, x, dim, dtype=dtype)[0].dtype)
    if not (passes and kinds <= {"sum"}):
        x = reduce_partial(op, x)
    return _scan(op, x, dim, dtype, torch.add)


@register_form("cumprod", cost=_cost)
def cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Running products."""
    op = aten.cumprod.default
    return _scan(op, reduce_partial(op, x), dim, dtype, torch.mul)
