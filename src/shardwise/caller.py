"""Who calls: some calls of PyTorch's optimizers mean more than the operator says."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["caller"]

_BETWEEN = ("torch._tensor", "torch.functional")


def caller() -> str:
    """The name of the module that calls Shardwise now, be it through a method such as
    `Tensor.norm`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith("shardwise.") and name not in _BETWEEN:
            return name
        frame = frame.f_back
    return ""
