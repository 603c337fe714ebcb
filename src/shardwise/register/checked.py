"""Arguments of the functions that rules call, checked: a mistake in a rule is told by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..errors import ArgumentError, RuleError, need, public

Function = TypeVar("Function", bound=Callable[..., Any])


def checked(function: Function) -> Function:
    """A function that raises if an argument is not of its annotated type."""
    bind, hints = signature(function).bind, get_type_hints(function)

    @public
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            given = bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ArgumentError(f"{function.__name__}: {error}.") from None
        for argument, value in given.items():
            _check(f"{function.__name__}: {argument}", value, hints[argument])
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def _check(what: str, value: object, kind: Any) -> None:
    if get_origin(kind) is Sequence:
        need(what, value, (list, tuple), "a list", RuleError)
        for each in value:  # type: ignore[attr-defined]
            _check(what, each, *get_args(kind))
    else:
        kinds = tuple(get_origin(each) or each for each in get_args(kind) or [kind])
        names = " or ".join(each.__name__ for each in kinds)
        need(what, value, kinds, f"a value of type {names}", RuleError)
