"""The user's line that led to where the program is now."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from types import FrameType

import torch

from .._torch import autograd_node_name

_NOT_THE_USERS = (
    *[str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)],
    contextlib.__file__,  # it enters and leaves contexts
)


def user_line() -> str:
    """File and line of the innermost frame outside Shardwise and PyTorch; in a backward also the
    operator of the forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    line = "unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    node = autograd_node_name()
    if node is None:
        return line
    forward = re.sub(r"Backward\d*$", "", node.split("::")[-1])
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", forward).lower()
    return f"{line} (in the backward of {snake})"
