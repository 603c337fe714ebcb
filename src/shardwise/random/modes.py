"""Which of the two ways to make random numbers serves a call."""

from __future__ import annotations

from collections import OrderedDict

import torch

from .._torch import autograd_node_name
from ..config import current
from ..storage.plain import digest

__all__ = ["checks", "mode_in_force", "mode_of_call"]

_MOST_CALLS = 1 << 16
_calls: OrderedDict[int, str] = OrderedDict()
"""The mode of each call inside a block, by the state of the generator that it found."""


def checks() -> bool:
    """Whether the ranks' random states are compared at each call."""
    return current().random_check


def mode_in_force() -> str:
    """The mode that is in force."""
    return current().random or "exact"


def mode_of_call(state: torch.Tensor) -> str:
    """The mode of a call that finds the generator in `state`.

    Activation checkpointing sets the state back and runs the forward again, in the backward and
    perhaps outside the block that the forward was in: it finds the mode by the state.
    """
    given = current().random
    name = given or "exact"
    if _calls and autograd_node_name() is not None:
        return _calls.get(digest(state), name)
    if given is not None:
        _calls[digest(state)] = name
        if len(_calls) > _MOST_CALLS:
            _calls.popitem(last=False)
    return name
