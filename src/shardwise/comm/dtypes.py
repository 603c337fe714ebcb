"""What goes over the wire: bytes that any backend moves, and numbers that any backend reduces."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .protocol import Task
from .reduction import finished, is_wide, widened

__all__ = [
    "as_bytes",
    "backends_reduce",
    "buffer_width",
    "from_wire",
    "is_plain",
    "to_wire",
    "wire_op",
]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _dense(value: torch.Tensor) -> torch.Tensor:
    """`value` contiguous, with no conjugation or change of sign still to be done."""
    return value.resolve_conj().resolve_neg().contiguous()


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, without a copy if it is contiguous."""
    flat = _dense(value).view(-1)
    # A single element may keep any stride, but only a stride of 1 can be read as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def backends_reduce(dtype: torch.dtype, op: str) -> bool:
    """Complex numbers are reduced as pairs of reals, which is no product."""
    return not (dtype.is_complex and op == "product")


def is_plain(dtype: torch.dtype, op: str) -> bool:
    """Whether values are reduced as they are: neither in another dtype nor in another form."""
    if op in ("max", "min") and dtype.is_floating_point:
        return False
    return is_wide(dtype, op)


def buffer_width(task: Task, dtype: torch.dtype) -> int:
    """The bytes that an element takes in a buffer, with copies of it if it is reduced in another
    dtype or form."""
    if task.kind == "all_reduce" and backends_reduce(dtype, task.op):
        return 2 * dtype.itemsize if is_plain(dtype, task.op) else 32
    return dtype.itemsize + (0 if not task.op or is_wide(dtype, task.op) else 24)


def wire_op(dtype: torch.dtype, op: str) -> dist.ReduceOp.RedOpType:
    """The reduction that a backend is asked for."""
    if dtype is torch.bool:
        return _OPS[{"sum": "max", "product": "min"}.get(op, op)]
    return _OPS[op]


def to_wire(value: torch.Tensor, op: str) -> torch.Tensor:
    """`value` in a form that every backend reduces rightly; `from_wire` undoes it."""
    if value.dtype is torch.bool:
        return _dense(value).view(torch.uint8)
    wide = _dense(widened(value, op))
    if op not in ("max", "min") or not wide.dtype.is_floating_point:
        return wide
    # Backends lose NaN in max and min. Integers in the order of the floats keep it, at either end.
    wide = wide if wide.dtype in _BITS else wide.to(torch.float32)
    bits = _flip_negative(wide.view(_BITS[wide.dtype]))
    limits = torch.iinfo(bits.dtype)
    return bits.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def from_wire(total: torch.Tensor, dtype: torch.dtype, op: str, over: int) -> torch.Tensor:
    """The result of a reduction in its own dtype; an average is the total divided by `over`."""
    if dtype is torch.bool:
        return total.view(torch.bool)
    if op in ("max", "min") and dtype.is_floating_point:
        total = _flip_negative(total)
        total = total.view(torch.float64 if total.dtype is torch.int64 else torch.float32)
    return finished(total, dtype, op, over)


def _flip_negative(bits: torch.Tensor) -> torch.Tensor:
    """The bits of floats as integers in the same order, and back: negative floats count down."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
