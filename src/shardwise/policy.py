"""Policies: what may happen without being written down.

Three settings, each of the calling thread, each a context manager: implicit communication, the
replicate
fallback of operators without a rule, and plain tensors among DTensors.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from .errors import CommunicationError, PlainTensorError

__all__ = ["Policy", "communication", "current", "implicit_replication", "plain_tensors"]

_ACTIONS = ("auto", "warn", "error")
_PLAIN = ("check", "check_always", "trust", "error")


@dataclass(frozen=True)
class Policy:
    """What may happen without being asked for."""

    moves: str = "auto"
    fallback: str = "auto"
    plain: str = "check"

    @property
    def silent(self) -> bool:
        return self.moves == "auto" and self.fallback == "auto"


class _State(threading.local):
    policy = Policy()


_state = _State()


def current() -> Policy:
    """The policy in force in this thread."""
    return _state.policy


@contextmanager
def _set(policy: Policy) -> Iterator[None]:
    before = _state.policy
    _state.policy = policy
    try:
        yield
    finally:
        _state.policy = before


def _checked(what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise CommunicationError(f"{what}: {value!r} is none of {', '.join(map(repr, allowed))}.")
    return value


@contextmanager
def communication(mode: str, *, fallback: str | None = None) -> Iterator[None]:
    """What to do when an operator moves data that the program did not ask to move.

    `mode` is for implicit communication, `fallback` for operators without a rule that run on
    replicated inputs (as it was if not given): "auto" (just do it), "warn", or "error".

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.ones(4, 4), mesh, [shardwise.Shard(0)])
    >>> y = shardwise.distribute_tensor(torch.ones(4, 4), mesh, [shardwise.Shard(1)])
    >>> with communication("error"):
    ...     x + y
    Traceback (most recent call last):
    shardwise.errors.CommunicationError: aten.add.Tensor moves operand 1 from [S(1)] to [S(0)] \
(exchange, 16 B received per rank), and communication("error") forbids implicit communication. ...
    """
    policy = replace(_state.policy, moves=_checked("communication", mode, _ACTIONS))
    if fallback is not None:
        policy = replace(policy, fallback=_checked("communication", fallback, _ACTIONS))
    with _set(policy):
        yield


@contextmanager
def plain_tensors(mode: str) -> Iterator[None]:
    """How plain tensors among DTensors are treated: they count as replicated.

    "check" compares them over the ranks when a call is first seen, "check_always" every time,
    "trust" never,
    and "error" refuses them.
    """
    with _set(replace(_state.policy, plain=_checked("plain_tensors", mode, _PLAIN))):
        yield


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Trust that plain tensors among DTensors are equal on all ranks."""
    with plain_tensors("trust"):
        yield


def _where() -> str:
    """The user's line that led here."""
    for frame in reversed(traceback.extract_stack()):
        name = frame.filename.replace("\\", "/")
        if "/shardwise/" not in name and "/torch/" not in name:
            return f"{frame.filename}:{frame.lineno}"
    return "unknown line"


def on_moves(op: object, moves: list[str]) -> None:
    """Say, or refuse, that `op` moves data that nobody asked it to move."""
    if _state.policy.moves == "auto" or not moves:
        return
    text = f"{op} moves {'; '.join(moves)}"
    if _state.policy.moves == "warn":
        warnings.warn(f"{text}, at {_where()}.", stacklevel=2)
        return
    raise CommunicationError(
        f'{text}, and communication("error") forbids implicit communication. Write it down with '
        f"redistribute(...) before the call, at {_where()}, or allow it with "
        'communication("auto").'
    )


def on_fallback(op: object, seen: set[object]) -> None:
    """Say, once per operator, or refuse, that `op` has no rule and runs on replicated inputs."""
    if _state.policy.fallback == "auto":
        return
    text = f"{op} has no rule: its inputs are replicated and it runs whole on every rank"
    if _state.policy.fallback == "error":
        raise CommunicationError(
            f'{text}, which communication(..., fallback="error") forbids, at {_where()}. '
            "Give it a rule with shardwise.register_rule."
        )
    if op not in seen:
        seen.add(op)
        warnings.warn(f"{text}, at {_where()}.", stacklevel=2)


def on_plain(op: object, shape: tuple[int, ...]) -> None:
    """Refuse a plain tensor among DTensors if the policy says so."""
    if _state.policy.plain == "error":
        raise PlainTensorError(
            f"{op}: a plain tensor of shape {list(shape)} is mixed with DTensors, and "
            'plain_tensors("error") forbids it. Use distribute_tensor or DTensor.from_local.'
        )
