"""Fourier transforms of several dims, one after another: sharded dims come last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch.operator import register_form
from ..rules import Call

aten = torch.ops.aten


def _has_several(call: Call) -> bool:
    return len(call.get("dim")) > 1


def _one_by_one(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Any:
    """By the time a sharded dim comes, another dim can be sharded instead."""
    sharded = {dim for dim in dims if any(p.is_shard(dim % x.ndim) for p in x.placements)}
    for dim in sorted(dims, key=lambda dim: (dim in sharded, dim)):
        x = aten._fft_c2c.default(x, [dim], normalization, forward)
    return x


@register_form("_fft_c2c", when=_has_several)
def c2c(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    """Complex to complex."""
    return _one_by_one(x, dim, normalization, forward)


@register_form("_fft_r2c", when=_has_several)
def r2c(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    """The last dim from real to complex, then the others."""
    half = aten._fft_r2c.default(x, [dim[-1]], normalization, onesided)
    return _one_by_one(half, dim[:-1], normalization, True)


@register_form("_fft_c2r", when=_has_several)
def c2r(x: Any, dim: Sequence[int], normalization: int, last_dim_size: int) -> Any:
    """The other dims, then the last one from complex to real."""
    half = _one_by_one(x, dim[:-1], normalization, False)
    return aten._fft_c2r.default(half, [dim[-1]], normalization, last_dim_size)
