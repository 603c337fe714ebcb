"""Writes into tensors that repeat themselves: PyTorch refuses some of them, on every rank alike.

A local tensor does not always show that the whole one repeats itself: an empty one has no two
elements, and of a repeated dim that is sharded a rank may hold one place. So PyTorch is asked with
tensors that show it, when a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..layout.spec import DTensorSpec
from ..storage.wrapper import Wrapper
from .plans import filled, tensors_in

__all__ = ["ask_about_repeats", "has_empty_shards", "overlapping", "repeating"]


def overlapping(written: Iterable[Any]) -> list[Any]:
    """The DTensors among `written` of which several elements are one memory."""
    return [t for t in written if isinstance(t, Wrapper) and t._spec.meta.overlaps]


def repeating(written: Iterable[Any]) -> list[Any]:
    """The DTensors among `written` that repeat themselves along a dim, as `expand` makes them."""
    return [
        t
        for t in written
        if isinstance(t, Wrapper) and t._spec.meta.repeated and 0 not in t._spec.meta.shape
    ]


def has_empty_shards(spec: DTensorSpec) -> bool:
    """Whether some rank holds nothing of a tensor that is not empty."""
    return any(0 in cuts for cuts in (spec.fine or spec).dim_cuts)


def ask_about_repeats(
    op: Any, written: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """PyTorch's own error if a pointwise operator may not write into a tensor that repeats itself.

    It is asked with two elements that are one memory: meta kernels do not look at that.
    """
    targets = {id(tensor) for tensor in repeating(written)}
    if not targets:
        return
    small: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(args, kwargs):
        one = torch.ones((), dtype=tensor.dtype, device=tensor.device)
        several = one.expand(2) if id(tensor) in targets else one.repeat(2)
        small[id(tensor)] = several if tensor.ndim else one
    given, named = filled(args, kwargs, iter([small[id(t)] for t in tensors_in(args, kwargs)]))
    op(*given, **named)
