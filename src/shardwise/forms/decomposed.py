"""Softmax, norms, variances: PyTorch's decompositions, run on DTensors when a reduced dim is
sharded. Only the statistics of each row move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from .._torch import OpOverload, decomposition
from ..dispatch.operator import register_form
from ..rules import Call
from ..rules.reductions import reduced_dims
from ..storage.ragged import move_to, reduce_partial
from ..storage.wrapper import Wrapper

aten = torch.ops.aten


def aligned(x: Any, like: Any) -> Any:
    """`x` in the layout of `like`, which has the same shape and is not Partial."""
    if not isinstance(x, Wrapper) or not isinstance(like, Wrapper):
        return x
    return move_to(None, x, x._spec.with_placements(like._spec.placements, like._spec.cuts))


def reduced(x: Any) -> Any:
    """`x` with its Partial placements reduced."""
    return reduce_partial(None, x) if isinstance(x, Wrapper) else x


def in_full(x: Any) -> Any:
    """`x` reduced, and in float32 if it is narrower: PyTorch computes statistics in float32."""
    x = reduced(x)
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _if_cut(call: Call, operand: int, dims: Sequence[int]) -> tuple[()] | None:
    """The cost of a form for an operand that is sharded along one of `dims`, and has elements."""
    spec = call.specs[operand]
    if not spec.ndim or 0 in spec.shape or not any(spec.dim_axes[dim] for dim in dims):
        return None
    return ()


def _decompose(op: OpOverload, like: int, dims: Callable[[Call], Sequence[int]]) -> None:
    """Register PyTorch's decomposition of `op` for calls whose operand `like` is sharded along
    `dims`. Tensors of the shape of that operand are brought into its layout first."""

    def run(*args: Any, **kwargs: Any) -> Any:
        x = reduced(args[like])
        given = [_prepared(value, x) if value is not args[like] else x for value in args]
        decomposed: Any = decomposition(op)
        made = decomposed(*given, **kwargs)
        return tuple(made) if isinstance(made, tuple) else made  # some are named tuples

    def cost(call: Call) -> tuple[()] | None:
        kind = call.specs[like].dtype
        floats = kind.is_floating_point or kind.is_complex  # kernels refuse integers
        return _if_cut(call, like, dims(call)) if floats else None

    name = f"{op._schema.name.removeprefix('aten::')}.{op._overloadname or 'default'}"
    register_form(name, cost=cost, blocks=True)(run)


def _prepared(value: Any, x: Any) -> Any:
    if not isinstance(value, Wrapper):
        return value
    return aligned(value, x) if value._spec.shape == x.shape else reduced(value)


def _dim(call: Call) -> list[int]:
    return [call.get("dim")]


def _normalized(call: Call) -> range:
    return range(-len(call.get("normalized_shape")), 0)


def _of_samples(call: Call) -> range:
    return range(1, call.specs[call.get("input")].ndim)


for _op, _like, _dims in (
    (aten._softmax.default, 0, _dim),
    (aten._safe_softmax.default, 0, _dim),
    (aten._log_softmax.default, 0, _dim),
    (aten._softmax_backward_data.default, 1, _dim),
    (aten._log_softmax_backward_data.default, 1, _dim),
    (aten.native_layer_norm.default, 0, _normalized),
    (aten.native_layer_norm_backward.default, 1, _normalized),
    (aten._fused_rms_norm.default, 0, _normalized),
    (aten._fused_rms_norm_backward.default, 1, _normalized),
    (aten.logsumexp.default, 0, reduced_dims),
    (aten.linalg_vector_norm.default, 0, reduced_dims),
    (aten.std.correction, 0, reduced_dims),
    (aten.std_mean.correction, 0, reduced_dims),
    (aten.native_group_norm.default, 0, _of_samples),
    (aten.native_group_norm_backward.default, 1, _of_samples),
):
    _decompose(_op, _like, _dims)


# --- variance ------------------------------------------------------------------------------------


def moments(x: Any, dims: Sequence[int], correction: Any = 1, keepdim: bool = False) -> Any:
    """Variance and mean: first the mean of all shards, then the squares of the distances to it.
    `x` is not Partial."""
    count = prod(x.shape[d] for d in dims)
    mean = reduced(x.mean(dims, True))
    apart = x - mean
    square = (apart * apart.conj()).real if x.is_complex() else apart * apart
    free = max(count - correction, 0)
    total = reduced(square.sum(dims, keepdim))
    var = total / free if free else total * float("nan") if count == 0 else total / 0.0
    return var, mean if keepdim else mean.sum(dims)


def _reduces_shards(call: Call) -> tuple[()] | None:
    return _if_cut(call, 0, reduced_dims(call))


@register_form("var_mean.correction", cost=_reduces_shards, blocks=True)
def var_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """Variance and mean."""
    dims = [d % x.ndim for d in dim] if dim else list(range(x.ndim))
    return moments(in_full(x), dims, 1 if correction is None else correction, keepdim)


@register_form("var_mean.dim", cost=_reduces_shards, blocks=True)
def var_mean_unbiased(x: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    """As `var_mean`; the decompositions of norms call this overload."""
    return var_mean(x, dim, correction=int(unbiased), keepdim=keepdim)


@register_form("var.correction", cost=_reduces_shards, blocks=True)
def var(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """Variance."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]
