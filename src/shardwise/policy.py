"""Notices: what happens without being written down is told, or refused, as the settings say."""

from __future__ import annotations

import os
import re
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ._torch import autograd_node_name
from .config import current
from .errors import CommunicationError, PlainTensorError

__all__ = ["current", "inside", "on_fallback", "on_moves", "on_plain"]

_NOT_THE_USERS = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


class _State(threading.local):
    outer: object = None  # the operator that a form stands for, while it runs


_state = _State()


def _where() -> str:
    """The user's line that led here; in a backward also the operator of the forward."""
    line = "unknown line"
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_NOT_THE_USERS):
            line = f"{frame.filename}:{frame.lineno}"
            break
    node = autograd_node_name()
    if node is None:
        return line
    forward = re.sub(r"Backward\d*$", "", node.split("::")[-1])
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", forward).lower()
    return f"{line} (in the backward of {snake})"


@contextmanager
def inside(op: object) -> Iterator[None]:
    """Notices name `op` too, in place of which other operators run."""
    before = _state.outer
    _state.outer = op if before is None else before
    try:
        yield
    finally:
        _state.outer = before


def on_moves(op: object | None, moves: list[str]) -> None:
    """Say, or refuse, that `op`, or the form that runs, moves data that nobody asked it to move."""
    if current().moves == "auto" or not moves:
        return
    outer = _state.outer
    who = f"{op}, in {outer}," if None not in (op, outer) and op is not outer else op or outer
    text = f"{who} moves {'; '.join(moves)}"
    if current().moves == "warn":
        warnings.warn(f"{text}, at {_where()}.", stacklevel=2)
        return
    raise CommunicationError(
        f'{text}, and communication("error") forbids implicit communication. Write it down with '
        f"redistribute(...) before the call, at {_where()}, or allow it with "
        'communication("auto").'
    )


def on_fallback(op: object, seen: set[object]) -> None:
    """Say, once per operator, or refuse, that `op` has no rule and runs on replicated inputs."""
    if current().fallback == "auto":
        return
    text = f"{op} has no rule: its inputs are replicated and it runs whole on every rank"
    if current().fallback == "error":
        raise CommunicationError(
            f'{text}, which communication(..., fallback="error") forbids, at {_where()}. '
            "Give it a rule with shardwise.register_rule."
        )
    if op not in seen:
        seen.add(op)
        warnings.warn(f"{text}, at {_where()}.", stacklevel=2)


def on_plain(op: object, shape: tuple[int, ...]) -> None:
    """Refuse a plain tensor among DTensors if the policy says so."""
    if current().plain == "error":
        raise PlainTensorError(
            f"{op}: a plain tensor of shape {list(shape)} is mixed with DTensors, and "
            'plain_tensors("error") forbids it. Use distribute_tensor or DTensor.from_local.'
        )
