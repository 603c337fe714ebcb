"""The variables that a step reads: closures, globals, attributes of objects and of modules.

A replay does not run the step's Python, so a graph holds only as long as these variables do:
tensors and functions must be the same objects, numbers and strings must be equal.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

_DEPTH = 4
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
    """The variables that a function and the modules that it uses read."""
    found: dict[str, Variable] = {}
    for each in _of_function(step, _DEPTH):
        found.setdefault(each.name, each)
    held = [each.value for each in found.values() if isinstance(each.value, nn.Module)]
    for each in _of_modules(list({id(module): module for module in (*modules, *held)}.values())):
        found.setdefault(each.name, each)
    return list(found.values())


_INTERNAL = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


def _of_modules(modules: Sequence[nn.Module]) -> Iterator[Variable]:
    for place, module in enumerate(modules):
        own, forward = vars(module), getattr(type(module).forward, "__code__", None)
        names = _names(forward) if forward and _is_users(type(module)) else []
        for name, value in own.items():
            if name not in _INTERNAL:
                label = f"{type(module).__name__} {place}.{name}"
                get = functools.partial(own.__getitem__, name)
                yield from _of_value(value, get, label, 1, names)


def _of_function(function: Any, depth: int) -> Iterator[Variable]:
    if isinstance(function, functools.partial):
        yield from _of_function(function.func, depth)
        for place, value in enumerate((*function.args, *function.keywords.values())):
            label = f"argument {place} of a partial"
            yield from _of_value(value, functools.partial(_given, value), label, depth)
    elif isinstance(function, types.MethodType):
        yield from _of_object(function.__self__, _names(function.__func__.__code__), depth, "self")
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
    space, names = function.__globals__, _names(function.__code__)
    for name in names:
        if name in space:
            get = functools.partial(space.__getitem__, name)
            yield from _of_value(space[name], get, name, depth, names)
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        get = functools.partial(getattr, cell, "cell_contents")
        try:
            yield from _of_value(cell.cell_contents, get, name, depth, names)
        except ValueError:  # the cell is empty
            continue


def _of_object(owner: Any, names: Sequence[str], depth: int, label: str) -> Iterator[Variable]:
    """The attributes of an object that a function names, and those that its methods name."""
    own = getattr(owner, "__dict__", {})
    for name in names:
        found = own[name] if name in own else inspect.getattr_static(owner, name, None)
        method = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if name not in own and isinstance(method, types.FunctionType):
            if depth and _is_users(method):
                yield from _of_object(owner, _names(method.__code__), depth - 1, label)
                yield from _of_function(method, depth - 1)
            continue
        if isinstance(found, types.MemberDescriptorType):  # of a class with slots
            found = getattr(owner, name, None)
        get = functools.partial(getattr, owner, name)
        yield from _of_value(found, get, f"{label}.{name}", depth, names)


def _of_value(
    value: Any, get: Callable[[], Any], name: str, depth: int, names: Sequence[str] = ()
) -> Iterator[Variable]:
    """A variable, or those in it. `names` are the attributes that the function names."""
    held = (torch.Tensor, nn.Module, Optimizer, torch.amp.GradScaler)
    if isinstance(value, held) or type(value) in _NUMBERS:
        yield Variable(name, value, get)
    elif isinstance(value, _FUNCTIONS):
        if depth and _is_users(value):
            yield Variable(name, value, get)
            yield from _of_function(value, depth - 1)
    elif depth and type(value) in (list, tuple, dict):
        items = value.items() if type(value) is dict else enumerate(value)
        for key, each in list(items):
            inner = functools.partial(_item, get, key)
            yield from _of_value(each, inner, f"{name}[{key!r}]", depth - 1, names)
    elif depth and _is_users(value if isinstance(value, _SPACES) else type(value)):
        yield from _of_object(value, names, depth - 1, name)


_SPACES = (types.ModuleType, type)


def _item(get: Callable[[], Any], key: Any) -> Any:
    return get()[key]


def _is_users(found: Any) -> bool:
    """False for functions, classes and modules of Python, PyTorch and Shardwise."""
    space = isinstance(found, types.ModuleType)
    module = getattr(found, "__name__" if space else "__module__", None) or ""
    return module.partition(".")[0] not in ("builtins", "torch", "shardwise")


def is_told_by_value(value: Any) -> bool:
    """True if an argument that is no tensor is equal to another one only if it means the same: not
    an object of a user's class whose attributes may change."""
    try:
        hash(value)
    except TypeError:
        return False
    own: Any = type(value).__hash__
    by_identity = own is object.__hash__ and hasattr(value, "__dict__")
    watched = (nn.Module, Optimizer, *_FUNCTIONS, *_SPACES)
    return not by_identity or isinstance(value, watched) or not _is_users(type(value))
