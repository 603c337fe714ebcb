"""Collectives of a group: one that `torch.distributed` knows, or one of the background."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .channel import is_behind

__all__ = ["all_reduce", "all_to_all"]


def all_to_all(
    group: Any,
    received: torch.Tensor,
    sent: torch.Tensor,
    incoming: list[int],
    outgoing: list[int],
) -> Any:
    """Start to send parts of `sent` to the members, and to receive from each; returns the work."""
    if is_behind(group):
        return group.alltoall_base(received, sent, incoming, outgoing)
    return dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True)


def all_reduce(group: Any, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> Any:
    """Start to reduce `value` in place over the members; returns the work."""
    if is_behind(group):
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        return group.allreduce(
            [torch.view_as_real(value) if value.is_complex() else value], options
        )
    return dist.all_reduce(value, op, group=group, async_op=True)
