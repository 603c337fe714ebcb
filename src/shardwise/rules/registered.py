"""Rules that users gave: they come before the table, and a later one replaces an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._torch import OpOverload
from .call import Family

__all__ = ["REGISTERED", "Registered", "key_of", "registered"]


@dataclass(frozen=True)
class Registered:
    """A rule for one axis (`family`), or a function that decides for all axes at once (`decide`).

    `decide(call, structure, written)` gives the decision and a local call in place of the
    operator's own, or None. `check(call, rule, decision, structure)` raises if the rule does not
    keep its word. `by_value` are the numbers that the rule reads, None for all: they enter the key
    by value.
    """

    family: Family | None = None
    decide: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None
    by_value: frozenset[str] | None = None

    def reads(self, name: str) -> bool:
        """Whether the rule looks at the value of an argument."""
        return self.by_value is None or name in self.by_value


REGISTERED: dict[str, Registered] = {}


def key_of(op: OpOverload) -> str:
    """The name of an operator with its namespace and overload."""
    return f"{op._schema.name}.{op._overloadname}"


def registered(op: OpOverload) -> Registered | None:
    """The rule that a user gave for an operator; an in-place form follows its base's family."""
    found = REGISTERED.get(key_of(op))
    if found is None and op._schema.name.endswith("_") and not op._schema.name.endswith("__"):
        found = REGISTERED.get(f"{op._schema.name[:-1]}.{op._overloadname}")
        if found is not None and found.family is None:
            return None
    return found
