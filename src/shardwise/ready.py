"""Calls with a pending operand whose reduced value is there already: they take that.

What was reduced for one call is kept with the tensor (`moving.py`). A later call may do without: a
product with a number passes a pending sum on. But then its result would be reduced in its turn, so
it takes the reduced value, unless nothing is won by it. And a tensor that is several operands of
one call, of which one must be reduced, is reduced for all of them. One that grew (`grown.py`) is
reduced before other tensors have a part in it: what it was made of is less.

Whether a value is there follows from what the program did before, so that all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from . import policy
from .grown import grown, grows, remember
from .moving import describe_moves, known, moved, same_source, source, stamp
from .plans import Plan, filled, tensors_in
from .spec import DTensorSpec
from .wrapper import Locals, Twin, wrap

__all__ = ["ReadyPlan"]

Known = tuple[DTensorSpec, Locals] | None
_MOST = 64
_PLACE = torch.empty(0)
"""Stands where an operand was."""


class ReadyPlan(Plan):
    """The plan of a call with pending operands, and those of the same call with some reduced.

    `plan` takes the operands as they are, laid out as `specs` (of a list none are given); `build`
    makes another for other layouts of them.
    """

    __slots__ = (
        "_alone",
        "_build",
        "_fast",
        "_grows",
        "_joins",
        "_op",
        "_others",
        "_pending",
        "_plan",
        "_reducing",
        "_shares",
    )

    def __init__(
        self,
        op: Any,
        plan: Plan,
        specs: Sequence[DTensorSpec],
        pending: Sequence[int],
        build: Callable[..., Plan],
        fast: bool,
    ) -> None:
        super().__init__(plan.tier)
        self._op = op
        self._plan = plan
        self._pending = tuple(pending)
        self._build = build
        self._fast = fast
        self._reducing = tuple([index for index in plan.reducing if index in self._pending])
        self._shares = len(pending) > 1 and bool(self._reducing)
        passes = plan.left_pending > 0 and not self._reducing
        self._alone = passes and plan.is_local and len(specs) == len(plan.outs) == 1
        self._grows = self._alone and grows(specs[0].meta, plan.outs[0].meta)
        self._joins = passes and len(specs) > 1
        self._others: dict[tuple[DTensorSpec | None, ...], tuple[Plan | None, tuple[int, ...]]] = {}
        if plan.quick is not None:
            self.quick = self._run_quick

    def run(self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._run_by(self._plan.run, operands, args, kwargs)

    def _run_quick(
        self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        quick = self._plan.quick
        assert quick is not None
        return self._run_by(quick, operands, args, kwargs)

    def _run_by(
        self,
        as_it_is: Callable[..., Any],
        operands: Sequence[Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        values = self._values(operands)
        if values is not None:
            return self._run_with(values, as_it_is, operands, args, kwargs)
        made = as_it_is(operands, args, kwargs)
        if self._alone:
            tensor = operands[0]
            if self._grows or tensor._picked is not None or tensor._origin is not None:
                remember(made, tensor, self._again(args, kwargs))
        return made

    def _again(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
        """The call on another value of its one operand, which it does not hold: that has a
        history."""
        rest, others = filled(args, kwargs, iter((_PLACE,)))

        def call(value: Any) -> Any:
            given, named = filled(rest, others, iter((value,)))
            return self._op(*given, **named)

        return call

    def _values(self, operands: Sequence[Any]) -> list[Known] | None:
        """What is reduced of the pending operands; None if nothing is."""
        if self._shares:
            self._reduce_shared(operands)
        elif self._joins:
            self._reduce_grown(operands)
        for index in self._pending:
            tensor = operands[index]
            if tensor._memo or tensor._origin is not None:
                break
        else:
            return None
        values = [known(operands[index]) for index in self._pending]
        return values if any(values) else None

    def _reduce_shared(self, operands: Sequence[Any]) -> None:
        """Reduce a tensor of which one operand would be reduced, and another would stay; and that
        of which several are views, if they have as many elements."""
        for index in self._reducing:
            alike = [i for i in self._pending if same_source(operands[i], operands[index])]
            if len(alike) < 2:
                continue
            largest = max(alike, key=lambda i: operands[i].numel())
            tensor = operands[largest]
            needed = {id(operands[i]._memo): operands[i] for i in alike if i in self._reducing}
            base = source(tensor)
            if sum(each.numel() for each in needed.values()) >= prod(base._spec.meta.shape):
                tensor = base
            if stamp(tensor) != stamp(tensor):
                continue  # nothing is kept of what a user may write into unseen
            target = tensor._spec.reduced
            if not policy.current().silent and known(tensor) is None:
                specs = [operand._spec for operand in operands]
                specs[largest] = tensor._spec
                policy.on_moves(self._op, describe_moves([(largest, target)], specs))
            moved(tensor, target)

    def _reduce_grown(self, operands: Sequence[Any]) -> None:
        """Reduce what all pending operands grew from, unless nothing may move."""
        found = [(index, grown(operands[index])) for index in self._pending]
        if not all(each for _, each in found) or policy.current().moves == "error":
            return
        for index, each in found:
            tensor = operands[index]
            if each is None or known(tensor) is not None:
                continue
            specs = [operand._spec for operand in operands]
            specs[index] = each.spec
            policy.on_moves(self._op, describe_moves([(index, each.spec.reduced)], specs))
            moved(tensor, tensor._spec.reduced)

    def _run_with(
        self,
        values: Sequence[Known],
        as_it_is: Callable[..., Any],
        operands: Sequence[Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        key = tuple([None if value is None else value[0] for value in values])
        found = self._others.get(key)
        if found is None:
            given = self._with(values, operands, args, kwargs)
            whole = [operands[index]._spec.reduced for index in self._pending]
            plan = self._better(self._build(*given), key == tuple(whole))
            if len(self._others) >= _MOST:
                self._others.clear()
            found = self._others[key] = plan, () if plan is None else plan.moving
        plan, moving = found
        if plan is None:
            return as_it_is(operands, args, kwargs)
        if not plan.by_operands:
            return plan.run(*self._with(values, operands, args, kwargs))
        mine = list(operands)
        for index, value in zip(self._pending, values, strict=True):
            # What has to move still is moved for the tensor itself, which keeps it.
            if value is not None and index not in moving:
                mine[index] = Twin(*value)
        run = plan.quick if self._fast and plan.quick is not None else plan.run
        return run(mine, args, kwargs)

    def _better(self, other: Plan, whole: bool) -> Plan | None:
        """The other plan, unless it may move or leave pending what this one does not.

        Of a form nothing is known: it may pass on what is pending together with the rest, and what
        it moves of a value is lost. So it is taken only if the values are `whole`.
        """
        here = self._plan
        if here.is_local:
            return other if other.is_local and other.left_pending < here.left_pending else None
        return other if whole or (here.by_operands and other.by_operands) else None

    def _with(
        self,
        values: Sequence[Known],
        operands: Sequence[Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """The call with what is reduced in place of the pending operands."""
        made = list(operands)
        tensors: list[Any] = list(tensors_in(args, kwargs))
        for index, value in zip(self._pending, values, strict=True):
            if value is not None:
                made[index] = tensors[index] = wrap(*value)
        return made, *filled(args, kwargs, iter(tensors))
