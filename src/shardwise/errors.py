"""The errors a user can meet; each is also the built-in class a Python user would catch."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import update_wrapper
from traceback import walk_tb
from types import FunctionType
from typing import Any, TypeVar

__all__ = [
    "ArgumentError",
    "CaptureError",
    "CheckpointError",
    "CommunicationError",
    "LayoutError",
    "MeshError",
    "OutOfRangeError",
    "PlainTensorError",
    "RuleError",
    "ShardwiseError",
]

Public = TypeVar("Public", bound=Callable[..., Any])
_CALLED = frozenset(
    ("__new__", "__init__", "__call__", "__getitem__", "__deepcopy__", "__torch_function__")
)
"""The methods by which Python calls an object for the user."""
_NOT_THE_USERS = frozenset(("shardwise", "torch", "contextlib"))


class ShardwiseError(Exception):
    """Base of every error raised by Shardwise."""


class ArgumentError(ShardwiseError, TypeError):
    """A call with arguments that it does not take, or with an argument of a wrong kind."""


class LayoutError(ShardwiseError, ValueError):
    """A layout that cannot be: a wrong placement, a wrong cut, operands that do not go together."""


class MeshError(ShardwiseError, ValueError):
    """A mesh that cannot be made or used, or two meshes where one is needed."""


class RuleError(ShardwiseError, ValueError):
    """A rule that cannot be read, or that does not fit the operator it is given for."""


class PlainTensorError(ShardwiseError, ValueError):
    """A plain tensor among DTensors that is not allowed, or not equal on all ranks."""


class CommunicationError(ShardwiseError, RuntimeError):
    """Communication that the policy in force forbids, or that failed."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that cannot be written, or cannot be read into a state."""


class CaptureError(ShardwiseError, RuntimeError):
    """A step that cannot be captured, or a captured step that is used as it cannot be."""


class OutOfRangeError(ShardwiseError, IndexError, RuntimeError):
    """An index out of range. PyTorch raises one or the other, depending on the operator."""


def need(
    what: str, value: object, kind: Any, words: str, error: type[ShardwiseError] = LayoutError
) -> None:
    """Raise that an argument is not what it must be: `words` say what that is."""
    if not isinstance(value, kind):
        raise error(f"{what}: {words} is needed, but got {value!r}.")


def public(what: Public) -> Public:
    """A public function, or class: the traceback of an error about a call ends at the call.

    For a class, this holds for the methods that it defines: public ones, and those of `_CALLED`.
    """
    if isinstance(what, type):
        for name, value in list(vars(what).items()):
            if name[0] != "_" or name in _CALLED:
                if isinstance(value, FunctionType):
                    setattr(what, name, public(value))
                elif isinstance(value, (staticmethod, classmethod)):
                    setattr(what, name, type(value)(public(value.__func__)))
        return what
    function: Any = what
    end = end_at_user_line

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            end(error)
            raise

    # The name is for profilers. The code is its own, since the compiler's marks are on code, and
    # the globals are those of the function, by which doctest knows its module.
    code = call.__code__.replace(co_name=function.__name__, co_qualname=function.__qualname__)
    made: Any = FunctionType(code, function.__globals__, None, None, call.__closure__)
    return update_wrapper(made, function)  # type: ignore[return-value]


def end_at_user_line(error: BaseException) -> None:
    """Cut the traceback of an error about a call at the line of the call.

    The frames stay if they include some of the user's own code, and if a line of Shardwise raised
    anything but a ShardwiseError: that is a bug of ours. They also stay, so that a program that
    hangs shows where, if it is interrupted; and if SHARDWISE_FULL_TRACEBACKS=1 is set.
    """
    if not isinstance(error, Exception) or os.environ.get("SHARDWISE_FULL_TRACEBACKS") == "1":
        return
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    is_told = isinstance(error, ShardwiseError) or packages[-1:] == ["torch"]
    if isinstance(error, TypeError) and frames[-1].f_code.co_varnames[:2] == ("args", "kwargs"):
        is_told = True  # what is passed on does not fit, and Python tells it
    if is_told and _NOT_THE_USERS.issuperset(packages):
        error.__traceback__ = None
