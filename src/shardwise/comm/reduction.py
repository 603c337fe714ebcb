"""The arithmetic of partial values: reducing a list, and the identity element of each op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import LayoutError

__all__ = [
    "check_reducible",
    "finished",
    "has_room",
    "identity",
    "is_wide",
    "reduce_into",
    "reduce_list",
    "reduced",
    "widened",
]

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
_ROOM = (
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
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


_INTO = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}


def reduce_into(result: torch.Tensor, parts: Sequence[torch.Tensor], op: str, over: int) -> None:
    """Put the reduction of tensors of one shape into `result`, in the order in which they come; an
    average is the total divided by `over`."""
    dtype = result.dtype
    call: Any = _INTO["sum" if op == "avg" else op]
    wide = widened(parts[0], op)
    if wide.dtype is dtype and len(parts) > 1:
        call(parts[0], parts[1], out=result)
        for part in parts[2:]:
            call(result, part, out=result)
        finished(result, dtype, op, over)
        return
    total = wide.clone()
    for part in parts[1:]:
        call(total, widened(part, op), out=total)
    result.copy_(finished(total, dtype, op, over))


def reduced(parts: Sequence[torch.Tensor], op: str, over: int) -> torch.Tensor:
    """As `reduce_into`, in a new tensor, without a write into any of the parts."""
    call: Any = _INTO["sum" if op == "avg" else op]
    total = widened(parts[0], op)
    for part in parts[1:]:
        total = call(total, widened(part, op))
    return finished(total.clone() if total is parts[0] else total, parts[0].dtype, op, over)


def reduce_list(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of tensors of one shape; a new tensor, never one of the parts."""
    result = torch.empty_like(parts[0])
    reduce_into(result, parts, op, len(parts))
    return result


def widened(value: torch.Tensor, op: str) -> torch.Tensor:
    """`value` in a dtype that can be reduced; for averages of integers one that has room."""
    return value.to(_wider(value.dtype, op))


def is_wide(dtype: torch.dtype, op: str) -> bool:
    """Whether values can be reduced in their own dtype."""
    return _wider(dtype, op) is dtype


def _wider(dtype: torch.dtype, op: str) -> torch.dtype:
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return torch.int64
    return _WIDER.get(dtype, dtype)


def finished(total: torch.Tensor, dtype: torch.dtype, op: str, over: int) -> torch.Tensor:
    """The result in its own dtype, from the total of widened values; `total` is used up."""
    if op == "avg":
        exact = total.dtype.is_floating_point or total.dtype.is_complex
        total.div_(over, rounding_mode=None if exact else "trunc")
    return total.to(dtype)


def has_room(dtype: torch.dtype) -> bool:
    """Whether values have room for what averages are added up to before they are divided."""
    return dtype in _ROOM


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
