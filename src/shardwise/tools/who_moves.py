"""The cause of a collective: the operator that runs, and the tensors that move.

Both are read from the calls that led to it, so that programs nobody watches pay nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from .._torch import autograd_node
from ..dispatch.dispatch import dispatch
from ..layout.user_line import frames, in_backward
from ..storage.operands import all_in_layout, in_layout, start_moves
from ..tensor.gradients import Bucket


def operator_running() -> str:
    """The operator, or the function of Shardwise, that the user called; in a backward the operator
    of the forward."""
    node = autograd_node()
    if leaves_reduced():
        return "gradients of leaves"
    if node is not None:
        return in_backward().removeprefix(" (in the ").removesuffix(")")
    found = ""
    for frame in frames():
        if frame.f_code is dispatch.__code__:
            found = frame.f_locals["op"]._schema.name.split("::")[1]
        elif frame.f_globals.get("__name__", "").startswith("shardwise."):
            found = frame.f_code.co_name
    return found


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
