"""Policies: what may happen without being written down.

Four settings, each of the calling thread, each a context manager: implicit communication, the
replicate fallback of operators without a rule, plain tensors among DTensors, and pending sums that
are multiplied.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from .errors import CommunicationError, PlainTensorError
from .user_line import user_line

__all__ = [
    "Policy",
    "communication",
    "current",
    "implicit_replication",
    "pending_products",
    "plain_tensors",
]

Module = TypeVar("Module", bound=torch.nn.Module)

_ACTIONS = ("auto", "warn", "error")
_PLAIN = ("check", "check_always", "trust", "error")
_PRODUCTS = ("check", "trust")


@dataclass(frozen=True)
class Policy:
    """What may happen without being asked for."""

    moves: str = "auto"
    fallback: str = "auto"
    plain: str = "check"
    products: str = "check"

    @property
    def silent(self) -> bool:
        return self.moves == "auto" and self.fallback == "auto"


class _State(threading.local):
    policy = Policy()
    outer: object = None  # the operator that a form stands for, while it runs


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


class communication:
    """What to do when an operator moves data that the program did not ask to move.

    `mode` is for implicit communication, `fallback` for operators without a rule that run on
    replicated inputs (as it was if not given): "auto" (just do it), "warn", or "error". Use it as a
    context manager, or give it to a module for good: `communication("error").apply(module)`.

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

    def __init__(self, mode: str, *, fallback: str | None = None) -> None:
        self._changes = {"moves": _checked("communication", mode, _ACTIONS)}
        if fallback is not None:
            self._changes["fallback"] = _checked("communication", fallback, _ACTIONS)
        self._before = _Stack()

    def __enter__(self) -> None:
        self._before.policies.append(_state.policy)
        _state.policy = replace(_state.policy, **self._changes)

    def __exit__(self, *_: object) -> None:
        _state.policy = self._before.policies.pop()

    def apply(self, module: Module) -> Module:
        """Put this in force whenever `module` runs forward; returns the module.

        The backward runs later, under the policy in force where `backward()` is called.
        """
        module.register_forward_pre_hook(lambda *_: self.__enter__(), prepend=True)
        module.register_forward_hook(lambda *_: self.__exit__(), always_call=True)
        return module


class _Stack(threading.local):
    """What was in force before, for each time that a thread entered."""

    def __init__(self) -> None:
        self.policies: list[Policy] = []


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
def pending_products(mode: str) -> Iterator[None]:
    """How a pending sum times a tensor is treated: part by part, which is right for finite numbers.

    "check" looks whether the tensor is finite, and reduces the sum first if it is not. "trust" does
    not look: an infinity may then give NaN where one device has an infinity. To look is to read the
    tensor once; on a GPU the program waits for it. Each rank looks at its own copy, so that copies
    must be equal: ranks that find different things would wait for each other.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.ones(1), mesh, [shardwise.Replicate()])
    >>> x = x.redistribute(placements=[shardwise.Partial()])  # the parts are 1 and 0
    >>> with pending_products("trust"):
    ...     (x * torch.tensor([float("inf")])).full_tensor()
    tensor([nan])
    >>> (x * torch.tensor([float("inf")])).full_tensor()
    tensor([inf])
    """
    with _set(replace(_state.policy, products=_checked("pending_products", mode, _PRODUCTS))):
        yield


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Trust that plain tensors among DTensors are equal on all ranks."""
    with plain_tensors("trust"):
        yield


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
    if _state.policy.moves == "auto" or not moves:
        return
    outer = _state.outer
    who = f"{op}, in {outer}," if None not in (op, outer) and op is not outer else op or outer
    text = f"{who} moves {'; '.join(moves)}"
    if _state.policy.moves == "warn":
        warnings.warn(f"{text}, at {user_line()}.", stacklevel=2)
        return
    raise CommunicationError(
        f'{text}, and communication("error") forbids implicit communication. Write it down with '
        f"redistribute(...) before the call, at {user_line()}, or allow it with "
        'communication("auto").'
    )


def on_fallback(op: object, seen: set[object]) -> None:
    """Say, once per operator, or refuse, that `op` has no rule and runs on replicated inputs."""
    if _state.policy.fallback == "auto":
        return
    text = f"{op} has no rule: its inputs are replicated and it runs whole on every rank"
    if _state.policy.fallback == "error":
        raise CommunicationError(
            f'{text}, which communication(..., fallback="error") forbids, at {user_line()}. '
            "Give it a rule with shardwise.register_rule."
        )
    if op not in seen:
        seen.add(op)
        warnings.warn(f"{text}, at {user_line()}.", stacklevel=2)


def on_plain(op: object, shape: tuple[int, ...]) -> None:
    """Refuse a plain tensor among DTensors if the policy says so."""
    if _state.policy.plain == "error":
        raise PlainTensorError(
            f"{op}: a plain tensor of shape {list(shape)} is mixed with DTensors, and "
            'plain_tensors("error") forbids it. Use distribute_tensor or DTensor.from_local.'
        )
