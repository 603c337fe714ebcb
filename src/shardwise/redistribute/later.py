"""Redistributions that overlap with what follows: they are waited for at first use.

They are run in the background, those between the same ranks one after another, so that there is
one buffer for all of them; see `engine/flight.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..engine import (
    Ends,
    backends_reduce,
    buffer_size,
    buffer_width,
    can_fly,
    fly,
    is_idle,
    is_plain,
    rehearsing,
    settle,
)
from ..engine.flight import Seat
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

    What is moved may be written at once: who writes through the dispatcher waits until it has been
    read (`settle`). If somebody else `held` the memory, it has been read when this returns.
    """
    if not _flies(moves):
        return run_all([run_between(*move, fresh=True, later=True) for move in moves])
    if is_heard():
        with rehearsing():
            bare = [(src, dst, tuple([t.to("meta") for t in local])) for src, dst, local in moves]
            for each in _start(bare):
                each()
    together: dict[Ends, list[int]] = {}
    for index, (src, dst, _) in enumerate(moves):
        ends = tuple(sorted(src.topology.ranks)), tuple(sorted(dst.topology.ranks))
        together.setdefault(ends, []).append(index)
    ready: dict[int, Ready] = {}
    for ends, places in together.items():
        seats = _fly(ends, [moves[index] for index in places], held)
        ready |= {index: seat.take for index, seat in zip(places, seats, strict=True)}
    if held:
        settle(_parts(moves))
    return [ready[index] for index in range(len(moves))]


def _fly(ends: Ends, moves: Sequence[Move], held: bool) -> list[Seat]:
    short = _is_one_message(moves)
    if held and short and is_idle(ends):
        nbytes = sum([part.nbytes for part in _parts(moves)])
        if 3 * nbytes <= buffer_size():  # there is room for a copy, so that the call need not wait
            moves = [(src, dst, tuple([t.clone() for t in local])) for src, dst, local in moves]
    return fly(ends, partial(_start, moves, short), _parts(moves), len(moves), copies=short)


def _parts(moves: Sequence[Move]) -> list[torch.Tensor]:
    return [part for *_, local in moves for part in local]


def _start(moves: Sequence[Move], later: bool = False) -> list[Ready]:
    return run_all([run_between(*move, fresh=True, later=later) for move in moves])


def _flies(moves: Sequence[Move]) -> bool:
    """Whether to run moves in the background; all ranks say the same."""
    if not all(can_fly(spec.topology) for move in moves for spec in move[:2]):
        return False
    return any(not step.is_local for src, dst, _ in moves for step in steps_between(src, dst))


def _is_one_message(moves: Sequence[Move]) -> bool:
    """Whether moves go out as one message, in a third of the buffer: another third is for what
    comes, and one for a copy of what is moved."""
    steps: list[tuple[Step, torch.dtype]] = []
    for src, dst, _ in moves:
        own = [step for step in steps_between(src, dst) if not step.is_local]
        if len(own) > 1 or (own and len(legs(src, dst)) > 1):
            return False
        steps += [(step, dst.dtype) for step in own]
    if len(steps) == 1 and _is_in_place(*steps[0]):
        return True
    return 3 * sum([_packed(step, dtype) for step, dtype in steps]) <= buffer_size()


def _is_in_place(step: Step, dtype: torch.dtype) -> bool:
    """Whether a tensor of any size is reduced in its target."""
    return (
        step.kind == "all_reduce" and backends_reduce(dtype, step.op) and is_plain(dtype, step.op)
    )


def _packed(step: Step, dtype: torch.dtype) -> int:
    """The most bytes that a rank packs, to send them or as they are received."""
    copies = step.count if step.kind in ("all_gather", "all_reduce") else 1
    most = max(step.src.most * copies, step.dst.most * (step.count if step.op else 1))
    return most * buffer_width(step, dtype)
