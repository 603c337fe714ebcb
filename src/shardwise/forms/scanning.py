"""Running totals along a sharded dim: a scan of every shard, carried on by the totals before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from ..dispatch.operator import register_differentiable, register_form
from ..layout.geometry import Box
from ..rules import keeps_sums
from ..storage.match_meta import in_memory_order
from ..storage.wrapper import Wrapper, wrap
from .shards import candidates, columns, metas, placed, reduce_partial, relaid, shard_of, sharded_on

__all__ = [
    "Cumsum",
    "FromHereOn",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "logcumsumexp",
    "needs_gradient",
]

aten = torch.ops.aten
_WIDER = {
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
Parts = tuple[torch.Tensor, ...]
Carry = Callable[[Parts, Parts], Parts]
"""What a scan goes on with: from the carried value and the local scan to the result."""


def needs_gradient(x: Any) -> bool:
    """Whether the gradient of `x` will be asked for; forward mode has PyTorch's own formulas."""
    needed = isinstance(x, Wrapper) and torch.is_grad_enabled() and x.requires_grad
    return needed and unpack_dual(x).tangent is None


def _scan(op: Any, x: Any, dim: int, carry: Carry, **kwargs: Any) -> tuple[Any, ...]:
    """The results of `op`; only the last element of every shard's scan moves."""
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
    """The scan of the totals, at its end."""
    made = op(totals[0], dim)
    if isinstance(made, torch.Tensor):
        return (made.narrow(dim, -1, 1).to(totals[0].dtype),)
    value, place = (part.narrow(dim, -1, 1) for part in made)
    return value, totals[1].gather(dim, place)


@register_form("cumsum", when=sharded_on())
def cumsum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Running sums; a pending sum stays pending where no dtype is in the way."""
    op = aten.cumsum.default
    kinds = {x.placements[axis].reduce_op for axis in x._spec.sums}
    passes = keeps_sums(x.dtype, metas(op, x, dim, dtype=dtype)[0].dtype)
    if not (passes and kinds <= {"sum"}):
        x = reduce_partial(op, x)
    (made,) = _scan(op, x, dim, lambda c, p: (p[0] + c[0],), dtype=dtype)
    return made


class FromHereOn(torch.autograd.Function):
    """Sums of each element and all after it; the gradient of running sums, and they its own."""

    @staticmethod
    def forward(ctx: Any, x: Any, dim: int) -> Any:
        ctx.set_materialize_grads(False)  # zeros would be no DTensor
        ctx.dim = dim
        return _from_here_on(x, dim % x.ndim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None if grad is None else Cumsum.apply(grad, ctx.dim), None


class Cumsum(torch.autograd.Function):
    """Running sums along a dim. PyTorch's gradient turns the dim around, twice."""

    @staticmethod
    def forward(ctx: Any, x: Any, dim: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.dim = dim
        return aten.cumsum.default(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None if grad is None else FromHereOn.apply(grad, ctx.dim), None


def _from_here_on(x: Any, dim: int) -> Any:
    op = aten.cumsum.default
    if not {x.placements[axis].reduce_op for axis in x._spec.sums} <= {"sum", "avg"}:
        x = reduce_partial(op, x)
    x = relaid(op, x, x._spec.consecutive)
    spec = x._spec
    if not spec.dim_axes[dim]:
        return x.flip(dim).cumsum(dim).flip(dim)
    scans: list[torch.Tensor] = []

    def local(part: torch.Tensor, box: Box) -> Parts:
        made = part.flip(dim).cumsum(dim).flip(dim)
        scans.append(made)
        return (made.narrow(dim, 0, min(made.shape[dim], 1)),)

    (totals,) = candidates(op, x, [dim], 1, local, [x.dtype])
    at = totals._spec
    filled = [cut > 0 for cut in spec.dim_cuts[dim]]
    found = []
    for coord, scan in zip(spec.slots, scans, strict=True):
        seen = sum(filled[: shard_of(spec, dim, coord) + 1])
        after = totals._locals[at.slot(coord)].narrow(dim, seen, sum(filled) - seen)
        made = scan + after.sum(dim, True) if after.shape[dim] else scan
        found.append(in_memory_order(spec, made))
    return wrap(spec, tuple(found))


def differentiable_cumsum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Running sums; along a sharded dim their gradient moves totals too."""
    if not needs_gradient(x) or not x.ndim or not x._spec.dim_axes[dim]:
        return _below(x, dim, dtype=dtype)
    return Cumsum.apply(x if dtype is None else x.to(dtype), dim)


_below = register_differentiable(aten.cumsum.default, differentiable_cumsum)


@register_form("cumprod", when=sharded_on())
def cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Running products."""
    op = aten.cumprod.default
    (made,) = _scan(op, reduce_partial(op, x), dim, lambda c, p: (p[0] * c[0],), dtype=dtype)
    return made


@register_form("logcumsumexp", when=sharded_on())
def logcumsumexp(x: Any, dim: int) -> Any:
    """Running sums of exponentials, in logarithms.

    The kernel adds in a wider dtype. So must the carrying do: the backward takes differences of
    exponentials of the result, and makes the last bit large.
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


@register_form("cummax", when=sharded_on())
def cummax(x: Any, dim: int) -> Any:
    """Running maxima and where they are."""
    return _running(aten.cummax.default, x, dim, torch.ge)


@register_form("cummin", when=sharded_on())
def cummin(x: Any, dim: int) -> Any:
    """Running minima and where they are."""
    return _running(aten.cummin.default, x, dim, torch.le)
