"""Tensors that calls of one operand made of a pending sum, as `p * 2` and `-p` are.

Each is a pending sum of its own, but all are reduced as one: such a tensor knows of what it was
made, and where it must be whole, the other is reduced and the call made again of that. Until it is
reduced it keeps the other in memory. So it knows of one tensor at the bottom, not of those between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .moving import is_as_made, stamp
from .plans import CallPlan, Plan
from .wrapper import Derived, Wrapper, share_cell

__all__ = ["derive", "is_derived"]

_NAMES = frozenset(["aten::mul", "aten::div", "aten::neg", "aten::clone", "aten::_to_copy"])
_MOST = 4
"""Calls between a tensor and the one at the bottom: each is made again."""


def is_derived(op: Any, plan: Plan, operands: Sequence[Any], args: Sequence[Any]) -> bool:
    """Whether what the plan of a call gives is as large and as pending as its one operand."""
    if op._schema.name not in _NAMES or not isinstance(plan, CallPlan) or not plan.is_local:
        return False
    if len(operands) != 1 or args[0] is not operands[0]:
        return False
    before, after = operands[0]._spec, plan.outs[0]
    # Who divides numbers of float16 before they are added up may do it lest the sum be infinite.
    same = before.dtype is after.dtype and before.dtype is not torch.float16
    return same and before.shape == after.shape and before.placements == after.placements


def derive(made: Any, base: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Let what a call made of a pending sum know of it."""
    if type(base) is not Wrapper.public:
        return
    if any(part.is_inference() for part in (*base._locals, *made._locals)):
        return  # without versions one rank may not see a write that another sees
    cell = base._cell
    before = base._made if cell is None else cell.made
    calls = ((op, args[1:], kwargs),)
    # What `tuple.__new__` makes takes half the time of what the class does.
    if before is not None:
        if base._origin is None and len(before.calls) < _MOST and is_as_made(base, before):
            more = before.twin, before.calls + calls, made._spec, before.seen
            made._made = tuple.__new__(Derived, more)
        return  # no chain of tensors is kept
    cell = cell or share_cell(base)
    if cell.foreign:  # one rank alone may write into what it gave, which is nothing of the result
        return
    memo, lanes = base._memo, base._lanes
    if memo is None:
        memo = base._memo = {}
    if lanes is None:
        lanes = base._lanes = {}
    twin = base._spec, base._locals, cell, memo, lanes, base._picked, base._origin
    made._made = tuple.__new__(Derived, (twin, calls, made._spec, stamp(base)))
