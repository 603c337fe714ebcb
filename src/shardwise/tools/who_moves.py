"""The cause of a collective: the tensors that move, and the leaves whose gradients are reduced.

They are read from the calls that led to it, so that programs nobody watches pay nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from .._torch import autograd_node
from ..layout.user_line import frames
from ..storage.operands import all_in_layout, in_layout, start_moves
from ..tensor.gradients import Bucket


def leaves_reduced() -> list[torch.Tensor]:
    """The leaves whose gradients a collective reduces: one, or those of a bucket."""
    leaf = getattr(autograd_node(), "variable", None)
    if leaf is not None:
        return [leaf]
    starts = (frame for frame in frames() if frame.f_code is Bucket.start.__code__)
    return [each.leaf for frame in starts for each in frame.f_locals["waiting"]]


def tensors_moving() -> list[torch.Tensor]:
    """The tensors in whose move a collective takes part; of gradients the leaves."""
    if leaves := leaves_reduced():
        return leaves
    for frame in frames():
        take = _MOVERS.get(frame.f_code)
        if take is not None:
            return list(take(frame.f_locals))
    return []


_MOVERS: dict[Any, Any] = {
    in_layout.__code__: lambda values: [values["tensor"]],
    start_moves.__code__: lambda values: values["tensors"],
    all_in_layout.__code__: lambda values: [tensor for tensor, _, _ in values["moves"]],
}
"""The functions that move tensors, with where their arguments are."""
