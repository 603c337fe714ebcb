"""The arithmetic of partial values: reducing a list, and the identity element of each op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["identity", "reduce_list"]


def reduce_list(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of equally shaped tensors; a new tensor, never one of the parts."""
    if op == "avg":
        return reduce_list(parts, "sum").div_(len(parts))
    total = parts[0].clone()
    for part in parts[1:]:
        if op == "sum":
            total.add_(part)
        elif op == "product":
            total.mul_(part)
        elif op == "max":
            torch.maximum(total, part, out=total)
        else:
            torch.minimum(total, part, out=total)
    return total


def identity(op: str, dtype: torch.dtype) -> bool | int | float:
    """The element that changes nothing under `op`."""
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max
