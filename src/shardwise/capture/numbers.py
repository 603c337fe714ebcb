"""Numbers while a step is recorded: `item()` and hyperparameters give a SymFloat with a node.

Arithmetic on a SymFloat is recorded, in Python's double precision. Where it goes into a function of
PyTorch, a *stand-in* goes instead: a float that no other number has, almost equal to it. The
recorder finds the stand-in among the arguments of the operator that takes it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import fx

from .._torch import pytree


def add_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """A call at the end of a graph. PyTorch's `call_function` also looks for symbols among the
    arguments, which takes longer than all else."""
    node = graph.create_node("call_function", target)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


class Ledger(Protocol):
    """Where numbers are recorded: the graph, and what has been seen of them."""

    graph: fx.Graph

    def refuse(self, reason: str) -> None:
        """Note that the step cannot be captured; it goes on."""

    def guard(self, number: Number) -> None:
        """Note that the step took the branch of this truth value."""


class Number:
    """The node of a SymFloat or SymBool: an fx node, or a constant, and the value it has now.

    `is_known` is True if it is computed from hyperparameters and constants: its value is known
    before a step runs. PyTorch asks for the methods by name.
    """

    def __init__(self, ledger: Ledger, node: Any, hint: Any, is_known: bool) -> None:
        self.ledger, self.fx_node, self.hint, self.is_known = ledger, node, hint, is_known
        self.stand_in: float | None = None

    def is_int(self) -> bool:
        return type(self.hint) is int

    def is_float(self) -> bool:
        return type(self.hint) is float

    def is_bool(self) -> bool:
        return type(self.hint) is bool

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def _constant(self, value: Any) -> Number:
        return Number(self.ledger, value, value, True)

    wrap_int = wrap_float = wrap_bool = _constant

    def _graph_repr(self) -> Any:
        self.ledger.refuse("the step turns a number into text")
        return repr(self.hint)

    def compute(self, function: Callable[..., Any], *others: Number) -> Number:
        """The number that a function gives, recorded."""
        every = (self, *others)
        node = add_call(self.ledger.graph, function, tuple([each.fx_node for each in every]))
        hint = function(*[each.hint for each in every])
        return Number(self.ledger, node, hint, all(each.is_known for each in every))

    def guard_bool(self, file: str = "", line: int = 0) -> bool:
        truth = self if self.is_bool() else self.compute(operator.ne, self._constant(0.0))
        if truth.is_known:
            self.ledger.guard(truth)
        else:
            self.ledger.refuse("the step takes a branch by a value that a tensor holds")
        return bool(truth.hint)

    bool_ = guard_bool

    def expect_true(self, file: str = "", line: int = 0) -> bool:
        return bool(self.hint)  # PyTorch's own check, as of the base of a power

    def guard_float(self, file: str = "", line: int = 0) -> float:
        self.ledger.refuse("the step turns a recorded number into a Python number")
        return float(self.hint)

    def guard_int(self, file: str = "", line: int = 0) -> int:
        self.ledger.refuse("the step turns a recorded number into a Python number")
        return int(self.hint)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "float_truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "float_pow": operator.pow,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "neg": operator.neg,
    "abs": operator.abs,
    "sym_max": max,
    "sym_min": min,
    "sym_sqrt": math.sqrt,
    "sqrt": math.sqrt,
    "and_": operator.and_,
    "or_": operator.or_,
    "sym_not": operator.not_,
}


def _method(function: Callable[..., Any]) -> Callable[..., Number]:
    return lambda self, *others: self.compute(function, *others)


for _name, _function in _FUNCTIONS.items():
    setattr(Number, _name, _method(_function))
setattr(Number, "str", Number._graph_repr)  # noqa: B010  # the name would hide the type


def symbol(number: Number) -> Any:
    """The value that the program gets for a number."""
    return torch.SymFloat(number)


_recordings = itertools.count()
_SALTS = 64


class StandIns:
    """The stand-ins of a recording, by their value.

    Two recordings have different ones. A number that PyTorch computes from a stand-in, such as the
    exponent in the gradient of a power, thus differs between them, and the step is refused.
    """

    def __init__(self) -> None:
        self._numbers: dict[float, Number] = {}
        self._salt = next(_recordings) % _SALTS

    def give(self, number: Number) -> float:
        """The float that goes into PyTorch instead of a number: of the same sign and size."""
        if number.stand_in is None:
            base = float(number.hint) or 1e-20
            place = len(self._numbers) * _SALTS + self._salt
            step = 1 + (place * 127 + 104729) * 2.0**-50
            number.stand_in = base * step
            if not math.isfinite(base) or self._numbers.get(number.stand_in, number) is not number:
                number.ledger.refuse(f"the number {number.hint} cannot be told from others")
            self._numbers[number.stand_in] = number
        return number.stand_in

    def number(self, value: Any) -> Number | None:
        """The number that a value stands for."""
        return self._numbers.get(value) if type(value) is float else None

    def put(self, value: Any) -> tuple[Any, list[Number]]:
        """Arguments with stand-ins instead of symbols, and the numbers of these."""
        found: list[Number] = []
        if not _has_symbols(value):
            return value, found

        def replace(each: Any) -> Any:
            if not isinstance(each, torch.SymFloat) or not isinstance(each.node, Number):
                return each
            found.append(each.node)
            return self.give(each.node)

        return pytree.tree_map(replace, value), found

    def hints(self, value: Any) -> Any:
        """Arguments with the true numbers instead of stand-ins."""
        return _mapped(value, lambda each: each if (n := self.number(each)) is None else n.hint)

    def in_value(self, value: Any) -> Iterator[Number]:
        """The numbers whose stand-ins are in a value."""
        if isinstance(value, (list, tuple)):
            for each in value:
                yield from self.in_value(each)
        elif isinstance(value, dict):
            yield from self.in_value(list(value.values()))
        elif (found := self.number(value)) is not None:
            yield found


def _has_symbols(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_symbols, value))
    if isinstance(value, dict):
        return any(map(_has_symbols, value.values()))
    return isinstance(value, torch.SymFloat)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(each, function) for each in value])
    if isinstance(value, dict):
        return {name: _mapped(each, function) for name, each in value.items()}
    return function(value)
