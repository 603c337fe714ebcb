"""The user's line that led to where the program is now."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

from .._torch import autograd_node, autograd_node_name

_NOT_THE_USERS = (
    *[str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)],
    contextlib.__file__,  # it enters and leaves contexts
    "<frozen ",
)
RUNS_BACKWARD = "_engine_run_backward"
"""The function of PyTorch in which a backward runs."""
_IN_TRACEBACK = re.compile(r'  File "(.*)", line (\d+)')


def is_users(file: str) -> bool:
    """True if code of this file is neither Shardwise's nor PyTorch's."""
    return not file.startswith(_NOT_THE_USERS)


def frames() -> Iterator[FrameType]:
    """The frames of the calls that led here, innermost first, up to the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        if is_users(frame.f_code.co_filename):
            return
        frame = frame.f_back


def forward_place() -> tuple[str, int] | None:
    """The user's line that made the autograd node whose backward runs, if it was kept."""
    node = autograd_node()
    kept = [] if node is None else node.metadata.get("traceback_", [])
    for entry in reversed(kept):
        found = _IN_TRACEBACK.match(entry)
        if found is not None and is_users(found[1]):
            return found[1], int(found[2])
    return None


def user_place(
    in_forward: Callable[[], tuple[str, int] | None] = forward_place,
) -> tuple[str, int]:
    """File and line of the innermost frame outside Shardwise and PyTorch.

    In a backward it is the line of the forward, if `in_forward` knows it: by default where autograd
    nodes keep it (`keep_forward_lines`).
    """
    for frame in frames():
        if frame.f_code.co_name == RUNS_BACKWARD and (found := in_forward()):
            return found
    if not is_users(frame.f_code.co_filename):  # a thread of the backward
        return in_forward() or ("unknown", 0)
    return frame.f_code.co_filename, frame.f_lineno


def user_line() -> str:
    """File and line of the user's code, in a backward with the operator of the forward."""
    file, line = user_place()
    text = f"{file}:{line}" if line else "unknown line"
    return f"{text}{in_backward()}"


def warn_user(text: str) -> None:
    """Warn at the user's line."""
    warnings.warn_explicit(text, UserWarning, *user_place())


def in_backward() -> str:
    """The operator whose backward runs, in words; nothing in a forward."""
    name = forward_operator()
    return f" (in the backward of {name})" if name else ""


def forward_operator() -> str:
    """The operator of the forward whose backward runs; nothing in a forward."""
    name = autograd_node_name()
    return "" if name is None else _operator_of(name)


@lru_cache(maxsize=1024)
def _operator_of(node: str) -> str:
    """The operator that made an autograd node.

    >>> _operator_of("NativeLayerNormBackward0")
    'native_layer_norm'
    """
    forward = re.sub(r"Backward\d*$", "", node.split("::")[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", forward).lower()
