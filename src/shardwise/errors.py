"""The errors a user can meet; each is also the built-in class a Python user would catch."""

from __future__ import annotations

from traceback import walk_tb
from typing import Any

__all__ = [
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


class ShardwiseError(Exception):
    """Base of every error raised by Shardwise."""


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


def end_at_user_line(error: BaseException) -> None:
    """Cut the traceback of an error about a call at the line of the call.

    The frames stay if they include some of the user's own code, and if a line of Shardwise raised
    anything but a ShardwiseError: that is a bug of ours.
    """
    packages = [
        frame.f_globals.get("__name__", "").partition(".")[0]
        for frame, _ in walk_tb(error.__traceback__)
    ]
    is_told = isinstance(error, ShardwiseError) or packages[-1:] == ["torch"]
    if is_told and set(packages) <= {"shardwise", "torch"}:
        error.__traceback__ = None
