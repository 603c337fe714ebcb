"""The arithmetic of partial values: reducing a list, and the identity element of each op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import LayoutError

__all__ = ["check_reducible", "finished", "identity", "reduce_list", "widened"]

_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
"""dtypes that kernels or backends refuse to reduce, and what they are reduced in."""
_WITHOUT_INF = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def check_reducible(op: str, dtype: torch.dtype) -> None:
    """Raise if values of `dtype` cannot be pending under `op`: complex numbers have no order."""
    if op in ("max", "min") and dtype.is_complex:
        raise LayoutError(
            f"Partial({op!r}) of {dtype}: complex numbers have no order. "
            "Use Partial('sum'), 'avg' or 'product'."
        )
    if op == "avg" and dtype is torch.bool:
        raise LayoutError(
            "Partial('avg') of torch.bool: the average of truth values is not a truth value. "
            "Use Partial('max') for any, Partial('min') for all."
        )
    if dtype is torch.uint64:
        raise LayoutError(f"Partial({op!r}) of torch.uint64: PyTorch cannot reduce it. Use int64.")


def reduce_list(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of equally shaped tensors; a new tensor, never one of the parts."""
    total = widened(parts[0], op).clone()
    for part in parts[1:]:
        other = widened(part, op)
        if op in ("sum", "avg"):
            total.add_(other)
        elif op == "product":
            total.mul_(other)
        elif op == "max":
            torch.maximum(total, other, out=total)
        else:
            torch.minimum(total, other, out=total)
    return finished(total, parts[0].dtype, op, len(parts))


def widened(value: torch.Tensor, op: str) -> torch.Tensor:
    """`value` in a dtype that can be reduced; for averages of integers one that has room."""
    dtype = value.dtype
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return value.to(torch.int64)
    return value.to(_WIDER.get(dtype, dtype))


def finished(total: torch.Tensor, dtype: torch.dtype, op: str, count: int) -> torch.Tensor:
    """The result in its own dtype, from the total of `count` widened values; `total` is used up."""
    if op == "avg":
        exact = total.dtype.is_floating_point or total.dtype.is_complex
        total.div_(count, rounding_mode=None if exact else "trunc")
    return total.to(dtype)


def identity(op: str, dtype: torch.dtype) -> bool | int | float:
    """The element that changes nothing under `op`."""
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op == "min"
    if dtype in _WITHOUT_INF:
        return torch.finfo(dtype).min if op == "max" else torch.finfo(dtype).max
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max
