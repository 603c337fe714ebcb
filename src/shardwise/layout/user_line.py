"""The user's line that led to where the program is now."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from .._torch import autograd_node, autograd_node_name

_NOT_THE_USERS = (
    *[str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)],
    contextlib.__file__,  # it enters and leaves contexts
    "<frozen ",
)
_RUNS_BACKWARD = "_engine_run_backward"
"""The function of PyTorch in which a backward runs."""
_IN_TRACEBACK = re.compile(r'  File "(.*)", line (\d+)')


def frames() -> Iterator[FrameType]:
    """The frames of the calls that led here, innermost first, up to the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return
        frame = frame.f_back


def user_place() -> tuple[str, int]:
    """File and line of the innermost frame outside Shardwise and PyTorch.

    In a backward it is the line of the forward, where nodes keep it (`keep_forward_lines`).
    """
    for frame in frames():
        if frame.f_code.co_name == _RUNS_BACKWARD and (found := _forward_place()):
            return found
    if frame.f_code.co_filename.startswith(_NOT_THE_USERS):  # a thread of the backward
        return _forward_place() or ("unknown", 0)
    return frame.f_code.co_filename, frame.f_lineno


def user_line() -> str:
    """File and line of the user's code, in a backward with the operator of the forward."""
    file, line = user_place()
    text = f"{file}:{line}" if line else "unknown line"
    return f"{text}{in_backward()}"


def in_backward() -> str:
    """The operator whose backward runs, in words; nothing in a forward."""
    name = autograd_node_name()
    if name is None:
        return ""
    forward = re.sub(r"Backward\d*$", "", name.split("::")[-1])
    return f" (in the backward of {re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', forward).lower()})"


def _forward_place() -> tuple[str, int] | None:
    """The user's line that made the autograd node whose backward runs, if it was kept."""
    node = autograd_node()
    kept = [] if node is None else node.metadata.get("traceback_", [])
    for entry in reversed(kept):
        found = _IN_TRACEBACK.match(entry)
        if found is not None and not found[1].startswith(_NOT_THE_USERS):
            return found[1], int(found[2])
    return None
