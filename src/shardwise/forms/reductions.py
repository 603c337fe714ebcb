"""Reductions that are no single pending reduction: norms, variances, logsumexp."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ..dispatch.operator import register_form
from ..rules import Call
from ..rules.reductions import reduced_dims
from .statistics import cut_along, in_full, settled

__all__ = ["logsumexp", "moments", "std", "std_mean", "var", "var_mean", "vector_norm"]


def _dims(x: Any, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.ndim))
    return [d % max(x.ndim, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


def _cut(call: Call) -> bool:
    """Whether a dim that is reduced is sharded."""
    return cut_along(call, 0, reduced_dims(call))


@register_form("linalg_vector_norm", when=_cut, blocks=True)
def vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Sums of powers, or extremes, of what each rank has."""
    dims = _dims(x, dim)
    size = in_full(x if dtype is None else x.to(dtype)).abs()
    if ord == float("inf"):
        return size.amax(dims, keepdim)
    if ord == float("-inf"):
        return size.amin(dims, keepdim)
    if ord == 0:
        return (size != 0).to(size.dtype).sum(dims, keepdim)
    if ord == 1:
        return size.sum(dims, keepdim)
    if ord == 2:
        return settled((size * size).sum(dims, keepdim)).sqrt()
    return settled(size.pow(ord).sum(dims, keepdim)).pow(1.0 / ord)


def moments(x: Any, dims: list[int], correction: Any = 1, keepdim: bool = False) -> tuple[Any, Any]:
    """Variance and mean, from sums that all shards share; `x` has nothing pending."""
    count = prod(x.shape[d] for d in dims)
    mean = settled(x.mean(dims, True))
    apart = x - mean
    square = (apart * apart.conj()).real if x.is_complex() else apart * apart
    free = max(count - correction, 0)
    total = settled(square.sum(dims, keepdim))
    var = total / free if free else total * float("nan") if count == 0 else total / 0.0
    return var, mean if keepdim else mean.sum(dims)


def _welford(x: Any, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    """As `moments`; next to an infinity PyTorch's kernels, which update a mean element by element,
    have no mean: they subtract one infinity from another. Only if the last element is the
    infinite one do they not, which is not copied here."""
    dims = _dims(x, dim)
    var, mean = moments(in_full(x), dims, 1 if correction is None else correction, keepdim)
    alone = prod(x.shape[d] for d in dims) == 1
    return var, mean if alone else unless_infinite(mean)


def unless_infinite(mean: Any) -> Any:
    """`mean`, with NaN for an infinite one; a negative zero stays one."""
    return mean - (mean - mean)


@register_form("var.correction", when=_cut, blocks=True)
def var(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """The mean first, then the squares of what is apart from it."""
    return _welford(x, dim, correction, keepdim)[0]


@register_form("std.correction", when=_cut, blocks=True)
def std(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """The root of the variance."""
    return _welford(x, dim, correction, keepdim)[0].sqrt()


@register_form("var_mean.correction", when=_cut, blocks=True)
def var_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """Variance and mean."""
    return _welford(x, dim, correction, keepdim)


@register_form("std_mean.correction", when=_cut, blocks=True)
def std_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """Standard deviation and mean."""
    square, mean = _welford(x, dim, correction, keepdim)
    return square.sqrt(), mean


@register_form("logsumexp", when=_cut, blocks=True)
def logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    """The largest element is taken out first, as on one device."""
    dims = _dims(x, dim)
    if not x.dtype.is_floating_point and not x.is_complex():
        x = x.to(torch.get_default_dtype())
    x = in_full(x)
    top = x.real.amax(dims, True) if x.is_complex() else x.amax(dims, True)
    top = settled(top)
    top = torch.where(top.abs() == float("inf"), 0.0, top)
    total = settled((x - top).exp().sum(dims, keepdim))
    return total.log() + (top if keepdim else top.sum(dims))
