"""The collectives that are asked of `torch.distributed`; each returns its `Work`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_reduce", "all_to_all"]


def all_to_all(
    group: Any,
    received: torch.Tensor,
    sent: torch.Tensor,
    incoming: list[int],
    outgoing: list[int],
) -> Any:
    """Start to send parts of `sent` to the members, and to receive from each."""
    return dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True)


def all_reduce(group: Any, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> Any:
    """Start to reduce `value` in place over the members."""
    return dist.all_reduce(value, op, group=group, async_op=True)
