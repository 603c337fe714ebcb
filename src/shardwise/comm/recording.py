"""The recorder of a captured step: it sees what operators do not tell, each as one call.

Collectives, counter-mode draws and checks of indices are functions that are marked `recordable`: a
recorder gets the call as a whole, and nothing inside it. What a replay does not repeat, such as the
comparison of random states, is marked `unrecorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from ..capture.recorder import Recorder

Function = TypeVar("Function", bound=Callable[..., Any])


class _State:
    recorder: ClassVar[Recorder | None] = None


def recorder() -> Recorder | None:
    """The recorder that is at work, if there is one."""
    return _State.recorder


def set_recorder(value: Recorder | None) -> None:
    """Start or end a recording."""
    _State.recorder = value


def recordable(
    *, writes: Sequence[int] = (), draws: bool = False
) -> Callable[[Function], Function]:
    """Mark a function of positional arguments that is recorded as one call.

    `writes` are the arguments that it writes; `draws` says that it draws random numbers.
    """

    def mark(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any) -> Any:
            found = _State.recorder
            return function(*args) if found is None else found.call(function, args)

        function.writes, function.draws = tuple(writes), draws  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return mark


def unrecorded(function: Function) -> Function:
    """Mark a function that a replay does not repeat."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = _State.recorder
        if found is None:
            return function(*args, **kwargs)
        with found.paused():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]
