"""The two ways to make random numbers, and which of them is in force."""

from __future__ import annotations

from collections import OrderedDict
from types import TracebackType

import torch

from .._torch import autograd_node_name
from ..errors import LayoutError
from ..plain import digest

__all__ = ["checks", "mode", "mode_in_force", "mode_of_call"]

_NAMES = ("exact", "counter")
_MOST_CALLS = 1 << 16


class _Setting:
    """What is in force. It is one for the process: backward and checkpoints run in other threads,
    and must find what the forward had."""

    name = "exact"
    check = True
    blocks = 0
    calls: OrderedDict[int, str] = OrderedDict()


class mode:
    """How random numbers are made from now on; as a context manager, inside the block only.

    "exact", which is the default, gives what plain PyTorch gives on one device with the same seed:
    every rank draws the whole tensor and keeps its part. "counter" makes each number from a key per
    call and its global position: a rank makes only what it holds. Both give the same numbers on
    every mesh and in every placement.

    On real processes each call compares the ranks' random states, which is a message of 16 bytes;
    `check=False` trusts that they agree.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> def draw(*placements):
    ...     torch.manual_seed(0)
    ...     return shardwise.rand(4, 6, device_mesh=mesh, placements=placements).full_tensor()
    >>> with mode("counter"):
    ...     torch.equal(draw(shardwise.Shard(0)), draw(shardwise.Shard(1)))
    True
    """

    def __init__(self, name: str, *, check: bool = True) -> None:
        if name not in _NAMES:
            raise LayoutError(f"random.mode: {name!r} is none of {', '.join(map(repr, _NAMES))}.")
        self._before = (_Setting.name, _Setting.check)
        _Setting.name, _Setting.check = name, check

    def __enter__(self) -> None:
        _Setting.blocks += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _Setting.blocks -= 1
        _Setting.name, _Setting.check = self._before


def checks() -> bool:
    """Whether the ranks' random states are compared at each call."""
    return _Setting.check


def mode_in_force() -> str:
    """The mode that was set last."""
    return _Setting.name


def mode_of_call(state: torch.Tensor) -> str:
    """The mode of a call that finds the generator in `state`.

    Activation checkpointing sets the state back and runs the forward again, in the backward and
    perhaps outside the block that the forward was in: it finds the mode by the state.
    """
    calls = _Setting.calls
    if calls and autograd_node_name() is not None:
        return calls.get(digest(state), _Setting.name)
    if _Setting.blocks:
        calls[digest(state)] = _Setting.name
        if len(calls) > _MOST_CALLS:
            calls.popitem(last=False)
    return _Setting.name
