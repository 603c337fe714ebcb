"""Notices: what happens without being written down is told, or refused, as the settings say."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..config import current as current
from ..errors import CommunicationError, PlainTensorError
from ..layout.user_line import in_backward, user_line, user_place


class _State(threading.local):
    outer: object = None  # the operator that a form stands for, while it runs


_state = _State()


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
        _warn(text)
        return
    raise CommunicationError(
        f'{text}, and communication("error") forbids implicit communication. Write it down with '
        f"redistribute(...) before the call, at {user_line()}, or allow it with "
        'communication("auto").'
    )


def on_fallback(op: object, seen: set[object]) -> None:
    """Say, once per operator, or refuse, that `op` has no rule and runs on replicated inputs."""
    if current().fallback == "auto":
        return
    text = f"{op} has no rule: its inputs are replicated and it runs whole on every rank"
    if current().fallback == "error":
        raise CommunicationError(
            f'{text}, which communication(..., fallback="error") forbids, at {user_line()}. '
            "Give it a rule with shardwise.register_rule."
        )
    if op not in seen:
        seen.add(op)
        _warn(text)


_shown: dict[str, dict[Any, Any]] = {}
"""The warnings shown, by file, for Python: it shows one only once for each line."""


def _warn(text: str) -> None:
    """A warning at the user's line, in a backward at that of the forward."""
    file, line = user_place()
    shown = _shown.setdefault(file, {})
    warnings.warn_explicit(f"{text}{in_backward()}.", UserWarning, file, line, registry=shown)


def on_plain(op: object, shape: tuple[int, ...]) -> None:
    """Refuse a plain tensor among DTensors if the policy says so."""
    if current().plain == "error":
        raise PlainTensorError(
            f"{op}: a plain tensor of shape {list(shape)} is mixed with DTensors, and "
            'plain_tensors("error") forbids it. Use distribute_tensor or DTensor.from_local.'
        )
