"""`explain_call`: the layouts in which a call could run, their prices, and the one taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm.events import choosers, watchers
from ..dispatch import dispatch
from ..dispatch.plans import tensors_in
from ..errors import LayoutError
from ..layout.spec import DTensorSpec
from ..storage.wrapper import Wrapper
from ..tensor.printing import notation_of
from .text_table import Table

_MICROSECOND = 10**9  # of prices
_SERVED = {
    "rows": "by its rule",
    "form": "by a form of its own, a function of DTensors",
    "random": "by a form for random numbers",
    "decomposition": "by PyTorch's decomposition into other operators",
    "fallback": "without a rule: it runs on replicated operands",
}


@dataclass(frozen=True, repr=False)
class OperatorChoice:
    """How one operator of a call runs: what serves it, and the rows of its rule with prices.

    `table` has no rows if there was nothing to choose.
    """

    op: str
    served: str
    operands: tuple[DTensorSpec, ...]
    table: Table

    def __str__(self) -> str:
        given = ", ".join(map(_layout, self.operands))
        head = f"{self.op}({given}): {self.served}"
        return f"{head}\n{self.table}" if len(self.table) else head

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class CallExplanation:
    """How the operators of a call run, in the order in which they were planned."""

    operators: tuple[OperatorChoice, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.operators))

    __repr__ = __str__


def explain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> CallExplanation:
    """The rows by which each operator of a call could run, their prices, and the one taken."""
    if not any(isinstance(value, Wrapper) for value in tensors_in(args, kwargs)):
        raise LayoutError("explain: no argument is a DTensor, so there are no layouts to choose.")
    made: list[OperatorChoice] = []
    rows: list[tuple[int, str, int, bool]] = []

    def choose(axis: int, given: Sequence[object], prices: Sequence[int], taken: object) -> None:
        texts = zip(given, prices, strict=True)
        rows.extend((axis, repr(row), price, row is taken) for row, price in texts)

    def plan(op: Any, tier: str, operands: Sequence[Any]) -> None:
        specs = tuple(operand._spec for operand in operands)
        made.append(_choice(op, tier, specs, rows))
        rows.clear()

    dispatch.clear()  # a call that was planned before chooses nothing
    choosers.append(choose)
    watchers.append(plan)
    try:
        function(*args, **kwargs)
    finally:
        watchers.remove(plan)
        choosers.remove(choose)
    return CallExplanation(tuple(made))


def _layout(spec: DTensorSpec) -> str:
    """A layout without its mesh: `float32[8@dp, 4]`, or `float32[8, 4] (sum over tp)`."""
    values, waits = notation_of(spec)
    return f"{values} ({waits})" if waits else values


def _choice(
    op: Any, tier: str, specs: tuple[DTensorSpec, ...], rows: Sequence[tuple[int, str, int, bool]]
) -> OperatorChoice:
    names = specs[0].topology.names
    by_rule = tier == "rows"
    table = Table(
        ("axis", "row", "price", "taken"),
        tuple(
            (names[axis], row, price / _MICROSECOND, "*" if by_rule and taken else "")
            for axis, row, price, taken in rows
        ),
    )
    served = _SERVED[tier]
    if by_rule and not rows:
        whole = all(spec.is_replicated() for spec in specs)
        served = "all operands are replicated" if whole else "in the layout of its operands"
    elif rows and not by_rule:
        served += ", in place of its rule"
    return OperatorChoice(op._schema.name.replace("::", "."), served, specs, table)
