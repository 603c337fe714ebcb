"""Numbers while a step is recorded: `item()` and hyperparameters give a symbol.

Arithmetic on a symbol is recorded, in Python's double precision. Where it goes into a function of
PyTorch, a *stand-in* goes instead: a float that no other number has, almost equal to it. The
recorder finds the stand-in among the arguments of the operator that takes it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx


class Ledger(Protocol):
    """Where numbers are recorded: `numbers` are all of them."""

    numbers: list[Number]

    def computed(self, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        """Record arithmetic, if it has not been: what is computed again is the same node."""

    def refuse(self, reason: str) -> None:
        """Note that the step cannot be captured; it goes on."""

    def guard(self, node: fx.Node, truth: bool) -> None:
        """Note that the step took the branch of this truth value."""


class Number:
    """The node of a symbol, and the value that it has now. PyTorch asks for the methods by name.

    `is_known` is True if it is computed from hyperparameters and constants: its value is known
    before a step runs. When the recording is over, `ledger` is None.
    """

    def __init__(self, ledger: Ledger, node: fx.Node, hint: float, is_known: bool) -> None:
        self.ledger: Ledger | None = ledger
        self.fx_node, self.hint, self.is_known = node, hint, is_known
        self.stand_in: float | None = None
        node.meta["number"] = True
        ledger.numbers.append(self)

    def is_float(self) -> bool:
        return True

    def is_int(self) -> bool:
        return False

    is_bool = is_constant = is_nested_int = is_int

    def is_symbolic(self) -> bool:
        return True

    def maybe_as_float(self) -> None:
        return None

    def guard_float(self, file: str = "", line: int = 0) -> float:
        if self.ledger is not None:
            self.ledger.refuse(
                "the step turns a recorded number into a Python number (to print a loss, return it "
                "and read it after the call)"
            )
        return self.hint


class Symbol(torch.SymFloat):
    """The value that the program gets for a number.

    The step may keep it, in a list or in an attribute. When the recording is over it is the float:
    arithmetic on it gives floats.
    """

    node: Number

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # PyTorch itself would compute NaN of a tensor and a SymFloat.
        given, named = replaced((tuple(args), kwargs or {}), Symbol, float)
        return func(*given, **named)

    def __bool__(self) -> bool:
        return bool(self != 0.0)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (float(self),)


def _compute(function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """The result of a function, with a node if an operand belongs to a recording."""
    hints: list[Any] = []
    nodes: list[Any] = []
    found, is_known = None, True
    for each in operands:
        number = each.node if type(each) is Symbol else None
        hints.append(each if number is None else number.hint)
        if number is not None and number.ledger is not None:
            found, is_known = number.ledger, is_known and number.is_known
            nodes.append(number.fx_node)
        else:
            nodes.append(hints[-1])
    hint = function(*hints)
    if found is None:
        return hint
    node = found.computed(function, tuple(nodes))
    if type(hint) is float:
        return Symbol(Number(found, node, hint, is_known))
    if type(hint) is not bool:
        found.refuse(f"the step makes a {type(hint).__name__} of a recorded number")
    elif is_known:
        found.guard(node, hint)
    else:
        found.refuse("the step takes a branch by a value that a tensor holds")
    return hint


def _binary(function: Callable[..., Any], is_swapped: bool = False) -> Callable[..., Any]:
    def method(self: Symbol, other: Any) -> Any:
        if not isinstance(other, (int, float, Symbol)):
            return NotImplemented
        return _compute(function, (other, self) if is_swapped else (self, other))

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: _compute(function, (self,))


def _reading(name: str) -> Callable[..., Any]:
    """A method of floats that reads the value."""
    return lambda self, *given: getattr(float(self), name)(*given)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _function = getattr(operator, _name)
    setattr(Symbol, f"__{_name}__", _binary(_function))
    setattr(Symbol, f"__r{_name}__", _binary(_function, is_swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Symbol, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("neg", "pos", "abs"):
    setattr(Symbol, f"__{_name}__", _unary(getattr(operator, _name)))
for _name in ("int", "trunc", "floor", "ceil", "round", "divmod", "rdivmod"):
    setattr(Symbol, f"__{_name}__", _reading(f"__{_name}__"))
for _name in ("__format__", "__repr__", "__hash__", "is_integer", "as_integer_ratio", "hex"):
    setattr(Symbol, _name, _reading(_name))


def settle(values: Any) -> None:
    """Put floats in the place of symbols in lists and dicts."""
    for key, each in list(values.items() if isinstance(values, dict) else enumerate(values)):
        if type(each) is Symbol:
            values[key] = float(each)
        elif isinstance(each, (dict, list)):
            settle(each)


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
                assert number.ledger is not None
                number.ledger.refuse(f"the number {number.hint} cannot be told from others")
            self._numbers[number.stand_in] = number
        return number.stand_in

    def number(self, value: float) -> Number | None:
        """The number that a float stands for."""
        return self._numbers.get(value)

    def put(self, value: Any) -> tuple[Any, Sequence[Number]]:
        """Arguments with stand-ins instead of symbols, and the numbers of these."""
        if not _has(value, Symbol):
            return value, ()
        found: list[Number] = []

        def replace(each: Symbol) -> float:
            if each.node.ledger is None:
                return each.node.hint
            found.append(each.node)
            return self.give(each.node)

        return _replaced(value, Symbol, replace), found

    def hints(self, value: Any) -> Any:
        """Arguments with the true numbers instead of stand-ins."""
        if not self._numbers:
            return value
        return replaced(value, float, self._true)

    def _true(self, value: float) -> float:
        number = self._numbers.get(value)
        return value if number is None else number.hint


def replaced(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Arguments in which a function has replaced what is exactly of a class."""
    return _replaced(value, kind, function) if _has(value, kind) else value


def _has(value: Any, kind: type) -> bool:
    for each in value.values() if type(value) is dict else value:
        own = type(each)
        if own is kind or (own in _NESTED and each and _has(each, kind)):
            return True
    return False


_NESTED = frozenset((list, tuple, dict))


def _replaced(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    own = type(value)
    if own is kind:
        return function(value)
    if own is dict:
        return {name: _replaced(each, kind, function) for name, each in value.items()}
    if own in _NESTED:
        kinds = (kind, list, tuple, dict)
        return own([_replaced(e, kind, function) if type(e) in kinds else e for e in value])
    return value
