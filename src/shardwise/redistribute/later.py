"""Redistributions that overlap with what follows: they are waited for at first use.

What is one message goes out at once, and its packed copy with it. The rest takes several, one
after another, and is run in the background; see `engine/flight.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..engine import (
    Ends,
    buffer_size,
    buffer_width,
    can_fly,
    fly,
    in_one_go,
    rehearsing,
    settle,
)
from ..spec import DTensorSpec
from ..trace import is_heard
from .execute import Ready, run_all
from .legs import legs
from .repeated import run_between, steps_between
from .step import Step

__all__ = ["run_later"]

Locals = tuple[torch.Tensor, ...]
Move = tuple[DTensorSpec, DTensorSpec, Locals]
"""The layouts before and after, and the local tensors."""


def run_later(moves: Sequence[Move], held: bool) -> list[Ready]:
    """New local tensors for many moves; they may still be under way.

    What is moved may be written at once: a copy is moved, or who writes through the dispatcher
    waits (`settle`). If somebody else `held` the memory, it has been read when this returns.
    """
    if not _flies(moves):
        return run_all([run_between(*move, fresh=True, later=True) for move in moves])
    if is_heard():
        with rehearsing():
            _run([(src, dst, tuple([t.to("meta") for t in local])) for src, dst, local in moves])
    together: dict[Ends, list[int]] = {}
    for index, (src, dst, _) in enumerate(moves):
        ends = tuple(sorted(src.topology.ranks)), tuple(sorted(dst.topology.ranks))
        together.setdefault(ends, []).append(index)
    ready: dict[int, Ready] = {}
    for ends, places in together.items():
        some = [moves[index] for index in places]
        seats = fly(ends, partial(_run, some), _parts(some), len(some))
        ready |= {index: seat.take for index, seat in zip(places, seats, strict=True)}
    if held:
        settle(_parts(moves))
    return [ready[index] for index in range(len(moves))]


def _parts(moves: Sequence[Move]) -> list[torch.Tensor]:
    return [part for *_, local in moves for part in local]


def _run(moves: Sequence[Move]) -> list[Locals]:
    return [ready() for ready in run_all([run_between(*move, fresh=True) for move in moves])]


def _flies(moves: Sequence[Move]) -> bool:
    """Whether to run moves in the background; all ranks say the same."""
    if not moves or not all(can_fly(spec.topology) for move in moves for spec in move[:2]):
        return False
    steps: list[tuple[Step, torch.dtype]] = []
    for src, dst, _ in moves:
        own = [step for step in steps_between(src, dst) if not step.is_local]
        if len(own) > 1 or (own and len(legs(src, dst)) > 1):
            return True
        steps += [(step, dst.dtype) for step in own]
    if len(steps) == 1 and in_one_go(*steps[0]):
        return False
    return 3 * sum([_packed(step, dtype) for step, dtype in steps]) > buffer_size()


def _packed(step: Step, dtype: torch.dtype) -> int:
    """The most bytes that a rank packs, to send them or as they are received."""
    copies = step.count if step.kind in ("all_gather", "all_reduce") else 1
    most = max(step.src.most * copies, step.dst.most * (step.count if step.op else 1))
    return most * buffer_width(step, dtype)
