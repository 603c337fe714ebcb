"""Matrices and Fourier transforms on dims that are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..entry import register_form
from ..infer import infer
from ..plain import full_local
from ..rules import Call

__all__ = ["c2c", "c2r", "check_errors", "r2c"]

aten = torch.ops.aten


@register_form("_linalg_check_errors", always=True)
def check_errors(info: Any, api_name: str, *, is_matrix: bool) -> None:
    """One number tells whether all went well; only if not are the codes brought together."""
    if full_local(info.any()).item():
        aten._linalg_check_errors(full_local(info), api_name, is_matrix=is_matrix)


def _several(call: Call) -> bool:
    return len(call.get("dim")) > 1


def _whole_first(x: Any, dims: Sequence[int]) -> list[int]:
    """The dims in an order in which those that are sharded come last."""
    return sorted(dims, key=lambda dim: (any(p.is_shard(dim % x.ndim) for p in x.placements), dim))


def _in_order_of(made: Any, op: Any, x: Any, *args: Any) -> Any:
    """A dense tensor with the strides that `op` gives on one device."""
    (meta,), _ = infer(op, (x, *args), {}, (x._spec,))
    if made.stride() == meta.stride:
        return made
    order = sorted(range(made.ndim), key=lambda dim: (-meta.stride[dim], dim))
    back = [order.index(dim) for dim in range(made.ndim)]
    return made.permute(order).contiguous().permute(back)


def _one_by_one(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    """By the time a sharded dim comes, another can be sharded instead."""
    for each in _whole_first(x, dim):
        x = aten._fft_c2c.default(x, [each], normalization, forward)
    return x


@register_form("_fft_c2c", when=_several)
def c2c(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    """One dim after another."""
    made = _one_by_one(x, dim, normalization, forward)
    return _in_order_of(made, aten._fft_c2c.default, x, dim, normalization, forward)


@register_form("_fft_r2c", when=_several)
def r2c(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    """The last dim from real to complex, then the others."""
    half = aten._fft_r2c.default(x, [dim[-1]], normalization, onesided)
    made = _one_by_one(half, dim[:-1], normalization, True)
    return _in_order_of(made, aten._fft_r2c.default, x, dim, normalization, onesided)


@register_form("_fft_c2r", when=_several)
def c2r(x: Any, dim: Sequence[int], normalization: int, last_dim_size: int) -> Any:
    """The other dims, then the last one from complex to real."""
    half = _one_by_one(x, dim[:-1], normalization, False)
    made = aten._fft_c2r.default(half, [dim[-1]], normalization, last_dim_size)
    return _in_order_of(made, aten._fft_c2r.default, x, dim, normalization, last_dim_size)
