"""What forms of statistics share: where a dim is sharded, and values that every rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..layout.spec import DTensorSpec
from ..rules import Call
from ..storage import policy
from ..storage.operands import describe_moves, in_layout
from ..storage.wrapper import Wrapper, wrap

__all__ = ["aligned", "cut_along", "in_full", "settled", "widened"]


def cut_along(call: Call, operand: int, dims: Sequence[int]) -> bool:
    """Whether an operand is sharded along one of `dims`; one without elements costs nothing to
    move."""
    spec = call.specs[operand]
    if not spec.ndim or 0 in spec.meta.shape:
        return False
    return any(spec.dim_axes[dim] for dim in dims)


def widened(x: Any) -> Any:
    """Narrow floats as float32, in which PyTorch's kernels compute statistics too."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def in_full(x: Any) -> Any:
    """`x` ready for several uses: pending reductions done once, narrow floats widened."""
    return widened(settled(x))


def settled(x: Any) -> Any:
    """`x` with its pending reductions done: a statistic that all ranks need."""
    if not isinstance(x, Wrapper) or not x._spec.sums:
        return x
    return _moved(x, x._spec.reduced)


def aligned(x: Any, like: Any) -> Any:
    """`x` laid out as `like`, which has the same shape."""
    if not isinstance(x, Wrapper) or not isinstance(like, Wrapper):
        return x
    spec = x._spec.with_placements(like._spec.placements, like._spec.cuts)
    return x if spec is x._spec else _moved(x, spec)


def _moved(x: Wrapper, spec: DTensorSpec) -> Any:
    if not policy.current().silent:
        policy.on_moves(None, describe_moves([(0, spec)], [x._spec]))
    return wrap(spec, in_layout(x, spec))
