"""Arguments of the functions that rules call, checked: a mistake in a rule is told by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from ..errors import ArgumentError, RuleError, need, public

Function = TypeVar("Function", bound=Callable[..., Any])
_LISTS = (list, tuple)


def checked(function: Function, **kinds: Any) -> Function:
    """A function that raises if an argument is of another type.

    A type in a list, `[int]`, stands for a list of such values.
    """
    bind, name = signature(function).bind, function.__name__

    @public
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            given = bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ArgumentError(f"{name}: {error}.") from None
        for argument, kind in kinds.items():
            if argument in given:
                _check(f"{name}: {argument}", given[argument], kind)
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def _check(what: str, value: object, kind: Any) -> None:
    if not isinstance(kind, list):
        need(what, value, kind, f"a value of type {_name(kind)}", RuleError)
        return
    need(what, value, _LISTS, f"a list of {_name(kind[0])}", RuleError)
    for each in value:  # type: ignore[attr-defined]
        need(what, each, kind[0], f"a list of {_name(kind[0])}", RuleError)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)
