"""The variables that a step reads: closures, globals, attributes of `self` and of modules.

A replay does not run the step's Python, so a graph holds only as long as these variables do:
tensors and functions must be the same objects, numbers and strings must be equal.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

_DEPTH = 3
"""How many functions and containers deep variables are looked for."""
_NUMBERS = (bool, int, float, complex, str)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class Variable(NamedTuple):
    """A variable: its name, the value it had, and the function that reads it."""

    name: str
    value: Any
    get: Callable[[], Any]

    def is_same(self) -> bool:
        """True if the variable still has its value."""
        try:
            now = self.get()
        except (LookupError, TypeError, AttributeError, ValueError):  # it is gone
            return False
        own = self.value
        return now is own or (type(now) is type(own) and type(own) in _NUMBERS and now == own)


def variables_of(step: Any, modules: Sequence[nn.Module]) -> list[Variable]:
    """The variables that a function and the modules that it calls read."""
    found: dict[str, Variable] = {}
    for each in (*_of_function(step, _DEPTH), *_of_modules(modules)):
        found.setdefault(each.name, each)
    return list(found.values())


def _of_modules(modules: Sequence[nn.Module]) -> Iterator[Variable]:
    for place, module in enumerate(modules):
        own = vars(module)
        for name, value in own.items():
            if not name.startswith("_") and name != "training":
                label = f"{type(module).__name__} {place}.{name}"
                yield from _of_value(value, functools.partial(own.__getitem__, name), label, 1)


def _of_function(function: Any, depth: int) -> Iterator[Variable]:
    if isinstance(function, functools.partial):
        yield from _of_function(function.func, depth)
        for place, value in enumerate((*function.args, *function.keywords.values())):
            label = f"argument {place} of a partial"
            yield from _of_value(value, functools.partial(_given, value), label, depth)
    elif isinstance(function, types.MethodType):
        yield from _of_object(function.__self__, function.__func__.__code__, depth)
        yield from _of_function(function.__func__, depth)
    elif isinstance(function, types.FunctionType):
        yield from _of_code(function, depth)


def _given(value: Any) -> Any:
    return value


def _names(code: types.CodeType) -> list[str]:
    """The names of globals and attributes in a function, and in functions inside it."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *[n for each in inner for n in _names(each)]]))


def _of_code(function: types.FunctionType, depth: int) -> Iterator[Variable]:
    """Globals, closed-over variables and defaults of a function."""
    space = function.__globals__
    for name in _names(function.__code__):
        if name in space:
            get = functools.partial(space.__getitem__, name)
            yield from _of_value(space[name], get, name, depth)
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        get = functools.partial(getattr, cell, "cell_contents")
        try:
            yield from _of_value(cell.cell_contents, get, name, depth)
        except ValueError:  # the cell is empty
            continue


def _of_object(owner: Any, code: types.CodeType, depth: int) -> Iterator[Variable]:
    """The attributes of `self` that a method names, and those that its other methods name."""
    own = getattr(owner, "__dict__", {})
    for name in _names(code):
        if name in own:
            get = functools.partial(own.__getitem__, name)
            yield from _of_value(own[name], get, f"self.{name}", depth)
        else:
            method = getattr(type(owner), name, None)
            if depth and isinstance(method, types.FunctionType) and _is_users(method):
                yield from _of_object(owner, method.__code__, depth - 1)
                yield from _of_function(method, depth - 1)


def _of_value(value: Any, get: Callable[[], Any], name: str, depth: int) -> Iterator[Variable]:
    if isinstance(value, (torch.Tensor, nn.Module, Optimizer)) or type(value) in _NUMBERS:
        yield Variable(name, value, get)
    elif isinstance(value, _FUNCTIONS):
        if depth and _is_users(value):
            yield Variable(name, value, get)
            yield from _of_function(value, depth - 1)
    elif depth and type(value) in (list, tuple):
        for place, each in enumerate(value):
            if isinstance(each, torch.Tensor):
                inner = functools.partial(_item, get, place)
                yield Variable(f"{name}[{place}]", each, inner)
    elif depth and type(value) is dict:
        for key, each in value.items():
            if isinstance(each, torch.Tensor):
                yield Variable(f"{name}[{key!r}]", each, functools.partial(_item, get, key))


def _item(get: Callable[[], Any], key: Any) -> Any:
    return get()[key]


def _is_users(function: Any) -> bool:
    """False for functions of PyTorch and of Shardwise."""
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] not in ("torch", "shardwise")
