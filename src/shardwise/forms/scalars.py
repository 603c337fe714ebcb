"""Python values from DTensors: they are the global value, on every rank."""

from __future__ import annotations

from typing import Any

import torch

from ..entry import register_form
from ..plain import full_local

__all__ = ["allclose", "equal", "local_scalar", "nonzero", "same_size"]


@register_form("_local_scalar_dense", always=True)
def local_scalar(x: Any) -> Any:
    """The number in a tensor of one element; what is pending is reduced first."""
    return full_local(x).item()


@register_form("is_nonzero", always=True)
def nonzero(x: Any) -> bool:
    """The truth of a tensor of one element; only inference mode does not ask for the number."""
    return torch.is_nonzero(full_local(x))


@register_form("equal", always=True)
def equal(a: Any, b: Any) -> bool:
    """Whether two tensors have the same shape and values."""
    if a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return bool(full_local(torch.ops.aten.all.default(torch.ops.aten.eq.Tensor(a, b))).item())


@register_form("allclose", always=True)
def allclose(
    a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Whether all elements are close."""
    close = torch.ops.aten.isclose.default(a, b, rtol, atol, equal_nan)
    return bool(full_local(torch.ops.aten.all.default(close)).item())


@register_form("is_same_size", always=True)
def same_size(a: Any, b: Any) -> bool:
    """Whether two tensors have the same shape."""
    return tuple(a.shape) == tuple(b.shape)
