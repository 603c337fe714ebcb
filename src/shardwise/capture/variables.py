"""The variables that a step reads: closures, globals, attributes of objects and of modules.

A replay does not run the step's Python, so a graph holds only as long as these variables do:
tensors and functions must be the same objects, numbers and strings must be equal. They are found
in the code of the step, and of the functions, methods and hooks that it names: an attribute counts
if any of these names it, whichever object it is of.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

_DEPTH = 12
"""How many functions, objects and containers deep variables are looked for."""
_MANY = 64
"""A longer container of numbers is one variable."""
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_BY_IDENTITY = (
    torch.Tensor,
    nn.Module,
    Optimizer,
    torch.amp.GradScaler,
    torch.Generator,
    torch.dtype,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    enum.Enum,
    type,
)
_SPACES = (types.ModuleType, type)
_LIBRARIES = frozenset(("torch", "shardwise", *sys.stdlib_module_names)) - {"types", "argparse"}
"""The modules whose code and objects are not looked into: but for namespaces, all of Python's."""
_NOTHING = object()


class Variable(NamedTuple):
    """A variable: its name, the value it had, and the function that reads it.

    `may_grow` is True for the length of a container: if the step itself changes it, as that of a
    list of losses, it is no variable.
    """

    name: str
    value: Any
    get: Callable[[], Any]
    may_grow: bool = False

    def is_same(self) -> bool:
        """True if the variable still has its value."""
        try:
            now = self.get()
        except (LookupError, TypeError, AttributeError, ValueError):  # it is gone
            return False
        return now is self.value or (_is_number(self.value) and _are_equal(now, self.value))


def _is_number(value: Any) -> bool:
    """True for a value that means the same as any that is equal, and for tuples of such."""
    if type(value) is tuple:
        return all(map(_is_number, value))
    numpy = sys.modules.get("numpy")
    return type(value) in _NUMBERS or (numpy is not None and isinstance(value, numpy.generic))


def _are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other) or (one != one and other != other)  # NaN


def variables_of(
    step: Any, modules: Sequence[nn.Module], hooks: Sequence[Any], names: set[str]
) -> list[Variable]:
    """The variables that a function, the modules that it uses and their hooks read. `names` are
    those in the code that was met before, and get those that are new: with none, it takes longer.
    """
    while True:
        search = _Search(frozenset(names))
        found: dict[str, Variable] = {}
        for place, function in enumerate((step, *hooks)):
            for each in search.of_function(function, _DEPTH):
                name = f"{each.name} of hook {place}" if place else each.name
                if each.is_same():  # else Python makes a new object whenever it is read
                    found.setdefault(name, each._replace(name=name))
        held = [each.value for each in found.values() if isinstance(each.value, nn.Module)]
        unique = {id(module): module for module in (*modules, *held)}
        for place, module in enumerate(unique.values()):
            for each in search.of_module(module, f"{type(module).__name__} {place}"):
                if each.is_same():
                    found.setdefault(each.name, each)
        if search.seen <= names:
            return list(found.values())
        names |= search.seen


class _Search:
    """One search for variables. Of objects, attributes of these names count; `seen` are the names
    in the code that was met."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self.seen: set[str] = set()
        self._visited: set[int] = set()

    def _met(self, function: Any) -> bool:
        """Note the names in a function; False if it was met before."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:
            self.seen |= _names_in(code)
        return self._is_new(function)

    def _is_new(self, value: Any) -> bool:
        """True when an object is met for the first time."""
        new = id(value) not in self._visited
        self._visited.add(id(value))
        return new

    def of_function(self, function: Any, depth: int) -> Iterator[Variable]:
        if isinstance(function, functools.partial):
            yield from self.of_function(function.func, depth)
            for place, value in enumerate((*function.args, *function.keywords.values())):
                label = f"argument {place} of a partial"
                yield from self._of_value(value, functools.partial(_given, value), label, depth)
        elif isinstance(function, types.MethodType):
            get = functools.partial(_given, function.__self__)
            yield from self.of_function(function.__func__, depth)
            yield from self._of_object(function.__self__, get, depth, "self")
        elif isinstance(function, types.FunctionType) and self._met(function):
            yield from self._of_code(function, depth)

    def _of_code(self, function: types.FunctionType, depth: int) -> Iterator[Variable]:
        """Globals, closed-over variables and defaults of a function."""
        space = function.__globals__
        for name in sorted(_names_in(function.__code__).intersection(space)):
            get = functools.partial(space.__getitem__, name)
            yield from self._of_value(space[name], get, name, depth)
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            get = functools.partial(getattr, cell, "cell_contents")
            try:
                yield from self._of_value(cell.cell_contents, get, name, depth)
            except ValueError:  # the cell is empty
                continue
        for place, value in enumerate(function.__defaults__ or ()):
            get = functools.partial(_default, function, place)
            label = f"default {place} of {function.__name__}"
            yield from self._of_value(value, get, label, depth)
        for name, value in (function.__kwdefaults__ or {}).items():
            get = functools.partial(_default_by_name, function, name)
            yield from self._of_value(value, get, name, depth)

    def of_module(self, module: nn.Module, label: str) -> Iterator[Variable]:
        """The attributes of a module. A module that is another one is noticed elsewhere."""
        kind: Any = type(module)
        names, functions = _read_by_forward(kind)
        self.seen |= names
        for function in functions:
            yield from self.of_function(function, _DEPTH - 1)
        own = vars(module)
        for name, value in own.items():
            if name not in _INTERNAL:
                get = functools.partial(own.__getitem__, name)
                yield from self._of_value(value, get, f"{label}.{name}", _DEPTH - 1)

    def _of_object(
        self, owner: Any, get: Callable[[], Any], depth: int, label: str
    ) -> Iterator[Variable]:
        """The attributes of an object, and its methods."""
        own = getattr(owner, "__dict__", {})
        yield Variable(f"the type of {label}", type(owner), functools.partial(_kind, get))
        present = functools.partial(_present, get, self._names)
        here = tuple(sorted(self._names.intersection(own)))
        yield Variable(f"the attributes of {label}", here, present)
        if not self._is_new(owner):
            return
        kinds = [kind for kind in _classes_of(owner) if kind is not object]
        for name in sorted(self._names.intersection(set(own).union(*map(vars, kinds)))):
            found = own.get(name, _NOTHING)
            if found is _NOTHING:
                yield from self._of_methods(owner, name, depth)
                found = inspect.getattr_static(owner, name, _NOTHING)
                found = _NOTHING if _is_method(found) else found
            if isinstance(found, types.MemberDescriptorType):  # of a class with slots
                found = getattr(owner, name, _NOTHING)
            if found is not _NOTHING:
                inner = functools.partial(_attribute, get, name)
                yield from self._of_value(found, inner, f"{label}.{name}", depth)

    def _of_methods(self, owner: Any, name: str, depth: int) -> Iterator[Variable]:
        """The variables that methods of this name read, those of base classes too."""
        for kind in _classes_of(owner) if depth else ():
            function = _function_of(vars(kind).get(name))
            if function is not None and _is_own(function):
                yield from self.of_function(function, depth - 1)
                yield from self.of_function(inspect.unwrap(function), depth - 1)

    def _of_value(
        self, value: Any, get: Callable[[], Any], name: str, depth: int
    ) -> Iterator[Variable]:
        """A variable, or those in it."""
        if isinstance(value, _FUNCTIONS):
            yield Variable(name, value, get)
            if depth and (_is_own(value) or isinstance(value, functools.partial)):
                yield from self.of_function(value, depth - 1)
        elif isinstance(value, _BY_IDENTITY) or _is_number(value):
            yield Variable(name, value, get)
            if depth and isinstance(value, (type, Optimizer)) and _is_own(value):
                yield from self._of_object(value, get, depth - 1, name)
        elif depth:
            if isinstance(value, _CONTAINERS):
                yield from self._of_container(value, get, name, depth - 1)
            module = isinstance(value, types.ModuleType)
            if _is_own(value) if module else is_users(type(value)):
                yield from self._of_object(value, get, depth - 1, name)

    def _of_container(
        self, value: Any, get: Callable[[], Any], name: str, depth: int
    ) -> Iterator[Variable]:
        """The items of a list, tuple, dict or set, and how many there are."""
        many = isinstance(value, (set, frozenset)) or len(value) > _MANY
        if many and _is_number(whole := _copy(functools.partial(_given, value))):
            yield Variable(name, whole, functools.partial(_copy, get))
            return
        length = functools.partial(_length, get)
        yield Variable(f"the length of {name}", len(value), length, may_grow=True)
        if not self._is_new(value) or isinstance(value, (set, frozenset)):
            return
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            inner = functools.partial(_item, get, key)
            yield from self._of_value(each, inner, f"{name}[{key!r}]", depth)


_INTERNAL = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in a function, and in functions inside it. A text may be
    the name that `getattr` is given."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    texts = [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]
    return frozenset(code.co_names).union(texts, *inner)


def _is_method(found: Any) -> bool:
    return isinstance(found, (types.FunctionType, property, staticmethod, classmethod))


def _function_of(method: Any) -> types.FunctionType | None:
    """The function of a method as it is in a class, if it is one."""
    if isinstance(method, property):
        method = method.fget
    found = getattr(method, "__func__", method)
    return found if isinstance(found, types.FunctionType) else None


def _classes_of(owner: Any) -> Sequence[type]:
    return owner.__mro__ if isinstance(owner, type) else type(owner).__mro__


@functools.lru_cache(1024)
def _read_by_forward(kind: type) -> tuple[frozenset[str], list[types.FunctionType]]:
    """The names in `forward` of a class of modules, and in the methods that it calls; and those of
    them that are not from a package."""
    names, done = {"forward"}, set[str]()
    functions: list[types.FunctionType] = []
    classes = [each for each in kind.__mro__ if is_users(each)]
    while left := names - done:
        done |= left
        for method in [vars(each).get(name) for name in sorted(left) for each in classes]:
            function = _function_of(method)
            if function is not None:
                inner = inspect.unwrap(function)
                names |= _names_in(inner.__code__) if hasattr(inner, "__code__") else set()
                functions += [each for each in {function, inner} if _is_own(each)]
    return frozenset(names), functions


# How the values of variables are read.


def _given(value: Any) -> Any:
    return value


def _default(function: Any, place: int) -> Any:
    return function.__defaults__[place]


def _default_by_name(function: Any, name: str) -> Any:
    return function.__kwdefaults__[name]


def _kind(get: Callable[[], Any]) -> type:
    return type(get())


def _present(get: Callable[[], Any], names: frozenset[str]) -> tuple[str, ...]:
    """The names of which an object has attributes of its own."""
    return tuple(sorted(names.intersection(getattr(get(), "__dict__", ()))))


def _attribute(get: Callable[[], Any], name: str) -> Any:
    return getattr(get(), name)


def _item(get: Callable[[], Any], key: Any) -> Any:
    return get()[key]


def _length(get: Callable[[], Any]) -> int:
    return len(get())


def _copy(get: Callable[[], Any]) -> tuple[Any, ...]:
    """All of a container, in an order that depends on nothing else."""
    value = get()
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(value, key=repr))
    return tuple(value.items()) if isinstance(value, dict) else tuple(value)


def is_users(found: Any) -> bool:
    """False for functions, classes and modules of Python, PyTorch and Shardwise."""
    space = isinstance(found, types.ModuleType)
    module = getattr(found, "__name__" if space else "__module__", None) or ""
    return module.partition(".")[0] not in _LIBRARIES


def _is_own(found: Any) -> bool:
    """True for a function, class or module of the program itself: not of an installed package."""
    name = getattr(found, "__name__" if isinstance(found, types.ModuleType) else "__module__", "")
    return is_users(found) and not _is_installed((name or "").partition(".")[0])


@functools.lru_cache(1024)
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


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
    return not by_identity or isinstance(value, watched) or not is_users(type(value))
