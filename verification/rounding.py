"""When a difference is rounding and no mistake.

Results are compared to a fixed tolerance. Where a sample is ill-conditioned, plain PyTorch's own
float32 result is further from the truth than that, and another order of additions gives another
result. So a call whose float32 values differ counts as right if both hold:

1. the same call in float64 is right, to the tolerance of float64: a mistake does not go away there;
2. no float32 value is further from plain PyTorch's than `ROUNDING` times the largest error of plain
   PyTorch's own float32 tensor, measured against its float64 one.

This is for every entry alike. Such calls are counted and reported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["ROUNDING", "Differs", "widened"]

ROUNDING = 10
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Differs(AssertionError):
    """Values differ; shape and dtype are right."""


def widened(tree: Any) -> Any:
    """The same with every tensor in double precision."""

    def wide(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to(_WIDE.get(value.dtype, value.dtype))

    return tree_map(wide, tree)
