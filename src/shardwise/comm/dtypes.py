"""The arithmetic of reductions, and the forms in which backends move and reduce values.

Every backend moves bytes, so any dtype can be moved. For a reduction `to_backend` gives values that
every backend reduces rightly, and `from_backend` undoes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LayoutError
from .step import Step

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
_CALLS: dict[str, Any] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


# --- reductions ----------------------------------------------------------------------------------


def check_reducible(op: str, dtype: torch.dtype) -> None:
    """Raise if tensors of `dtype` cannot be Partial(op)."""
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


def identity(op: str, dtype: torch.dtype) -> bool | int | float:
    """The identity element of `op`."""
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


def reduce_list(
    parts: Sequence[torch.Tensor], op: str, over: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduce tensors of one shape in the order given, into `out` or a new tensor.

    An average is the total divided by `over`.
    """
    dtype, call = parts[0].dtype, _CALLS[op]
    total = _widened(parts[0], op)
    if len(parts) == 1:
        total = total.clone()
    else:
        room = out if total.dtype is dtype else None
        total = call(total, _widened(parts[1], op), out=room)
    for part in parts[2:]:
        call(total, _widened(part, op), out=total)
    total = _finished(total, dtype, op, over)
    return total if out is None or total is out else out.copy_(total)


def _widened(value: torch.Tensor, op: str) -> torch.Tensor:
    return value.to(_wider(value.dtype, op))


def _wider(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype to reduce in; an average of integers is added up in int64."""
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return torch.int64
    return _WIDER.get(dtype, dtype)


def _finished(total: torch.Tensor, dtype: torch.dtype, op: str, over: int) -> torch.Tensor:
    """The result in its own dtype; `total` is overwritten."""
    if op == "avg":
        exact = total.dtype.is_floating_point or total.dtype.is_complex
        total.div_(over, rounding_mode=None if exact else "trunc")
    return total.to(dtype)


# --- what backends get ---------------------------------------------------------------------------


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, without a copy if it is contiguous."""
    flat = value.resolve_conj().resolve_neg().contiguous().view(-1)
    # A single element may keep any stride, but only a stride of 1 can be read as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def backends_reduce(dtype: torch.dtype, op: str) -> bool:
    """False for products of complex numbers: backends reduce these as pairs of reals."""
    return not (dtype.is_complex and op == "product")


def is_plain(dtype: torch.dtype, op: str) -> bool:
    """True if backends reduce the values as they are, in their own dtype."""
    if op in ("max", "min") and dtype.is_floating_point:
        return False
    return _wider(dtype, op) is dtype


def buffer_width(step: Step, dtype: torch.dtype) -> int:
    """The bytes per element in a buffer, with the copies that a reduction in another form makes."""
    if step.kind == "all_reduce" and backends_reduce(dtype, step.op):
        return dtype.itemsize if is_plain(dtype, step.op) else 32
    return dtype.itemsize + (0 if not step.op or _wider(dtype, step.op) is dtype else 24)


def backend_op(dtype: torch.dtype, op: str) -> dist.ReduceOp.RedOpType:
    """The reduction that a backend is asked for."""
    if dtype is torch.bool:
        return _OPS[{"sum": "max", "product": "min"}.get(op, op)]
    return _OPS[op]


def to_backend(value: torch.Tensor, op: str) -> torch.Tensor:
    """A contiguous `value` in a form that every backend reduces rightly."""
    if value.dtype is torch.bool:
        return value.view(torch.uint8)
    wide = _widened(value, op)
    if op not in ("max", "min") or not wide.dtype.is_floating_point:
        return wide
    # Backends lose NaN in max and min. Integers in the order of the floats keep it, at either end.
    wide = wide if wide.dtype in _BITS else wide.to(torch.float32)
    bits = _flip_negative(wide.view(_BITS[wide.dtype]))
    limits = torch.iinfo(bits.dtype)
    return bits.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def from_backend(total: torch.Tensor, dtype: torch.dtype, op: str, over: int) -> torch.Tensor:
    """The result in its own dtype; an average is the total divided by `over`."""
    if dtype is torch.bool:
        return total.view(torch.bool)
    if op in ("max", "min") and dtype.is_floating_point:
        total = _flip_negative(total)
        total = total.view(torch.float64 if total.dtype is torch.int64 else torch.float32)
    return _finished(total, dtype, op, over)


def _flip_negative(bits: torch.Tensor) -> torch.Tensor:
    """The bits of floats as integers in the same order, and back: negative floats count down."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
