"""The place where a program is (the user's line, the module, the operator and the pass), and the
tensors that a collective moves.

All of it is read from the calls that led here, so that programs nobody watches pay nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from .._torch import autograd_node, keep_forward_lines, next_node_number
from ..dispatch.dispatch import dispatch
from ..layout.user_line import RUNS_BACKWARD, forward_operator, forward_place, frames, is_users
from ..storage.operands import all_in_layout, in_layout, start_moves
from ..tensor.gradients import Bucket
from .running_module import Chain, RunningModule

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_USERS, _OURS, _DISPATCH, _BACKWARD, _OTHERS = range(5)


class Cause(NamedTuple):
    """Where something comes from: `file:line`, the module with those around it, the operator or
    function, and the pass, "forward" or "backward"."""

    line: str
    modules: Chain
    op: str
    phase: str

    @property
    def module(self) -> str:
        """The innermost module; nothing outside of all modules."""
        return self.modules[-1] if self.modules else ""


class Causes:
    """The cause of what happens now, from `watch` to `unwatch`.

    What happens in a backward has the line of the forward. Autograd can keep lines, which takes
    time for each of its nodes; with `own_lines` they are the lines of the calls that `begin` was
    told of.
    """

    def __init__(self, own_lines: bool = False) -> None:
        self.modules = RunningModule()
        self._lines: dict[int, str] | None = {} if own_lines else None
        self._kinds: dict[int, tuple[int, CodeType]] = {}  # by id: a hash of code takes long
        self._call = Cause("unknown", (), "", "forward")

    def watch(self) -> None:
        self.modules.watch()
        if self._lines is None:
            self._kept = keep_forward_lines()

    def unwatch(self) -> None:
        if self._lines is None:
            self._kept.__exit__(None, None, None)
        self.modules.unwatch()

    def of_collective(self) -> Cause:
        """The cause of a collective. Gradients of leaves count for the module that has all of the
        leaves."""
        line, op, dispatched = self._read(sys._getframe(1), to_dispatch=False)
        phase, names = self.modules.now()
        if leaves := leaves_reduced():
            return Cause(line, self.modules.around(leaves), "gradients of leaves", "backward")
        if phase == "backward":
            op = f"backward of {forward_operator()}"
        elif dispatched is not None:
            op = dispatched.f_locals["op"]._schema.name.split("::")[1]
        return Cause(line, names, op, phase)

    def begin(self, op: str) -> None:
        """Tell of a call of DTensors, which may be part of another one."""
        line, _, dispatched = self._read(sys._getframe(1))
        if dispatched is None:
            self._call = self._of(line, op)
            if self._lines is not None and self._call.phase == "forward":
                # The node of this call is the last one that was made.
                self._lines.setdefault(next_node_number() - 1, line)

    def of_local_call(self, op: str) -> Cause:
        """The cause of a call of plain tensors: if it is part of a call of DTensors, that of the
        latter."""
        line, ours, dispatched = self._read(sys._getframe(1))
        return self._of(line, ours or op) if dispatched is None else self._call

    def _of(self, line: str, op: str) -> Cause:
        phase, names = self.modules.now()
        if phase == "forward":
            return Cause(line, names, op, phase)
        leaf = getattr(autograd_node(), "variable", None)
        if leaf is not None:
            return Cause(line, self.modules.around([leaf]), "gradients of leaves", phase)
        return Cause(line, names, f"backward of {forward_operator()}", phase)

    def _read(
        self, frame: FrameType | None, to_dispatch: bool = True
    ) -> tuple[str, str, FrameType | None]:
        """The user's line, the outermost function of ours called there, and the outermost frame of
        the dispatcher. With `to_dispatch` the first frame of the dispatcher ends the search."""
        ours, dispatched = "", None
        while frame is not None:
            code = frame.f_code
            known = self._kinds.get(id(code))
            kind = (known or self._kinds.setdefault(id(code), (_kind(code), code)))[0]
            if kind == _USERS:
                return f"{code.co_filename}:{frame.f_lineno}", ours, dispatched
            if kind == _DISPATCH:
                dispatched = frame
                if to_dispatch:
                    return "", "", frame
            elif kind == _OURS:
                ours, dispatched = code.co_name, None
            elif kind == _BACKWARD and (found := self._forward_line()):
                return found, ours, dispatched
            frame = frame.f_back
        return self._forward_line() or "unknown", ours, dispatched  # a thread of the backward

    def _forward_line(self) -> str:
        """The line whose backward runs, if it was kept."""
        if self._lines is None:
            place = forward_place()
            return "" if place is None else "{}:{}".format(*place)
        node = autograd_node()
        return "" if node is None else self._lines.get(node._sequence_nr(), "")


def _kind(code: CodeType) -> int:
    if is_users(code.co_filename):
        return _USERS
    if code is dispatch.__code__:
        return _DISPATCH
    if code.co_name == RUNS_BACKWARD:
        return _BACKWARD
    return _OURS if code.co_filename.startswith(_PACKAGE) else _OTHERS


# --- what moves ----------------------------------------------------------------------------------


def leaves_reduced() -> list[torch.Tensor]:
    """The leaves whose gradients a collective reduces: one, or those of a bucket."""
    leaf = getattr(autograd_node(), "variable", None)
    if leaf is not None:
        return [leaf]
    starts = (frame for frame in frames() if frame.f_code is Bucket.start.__code__)
    return [each.leaf for frame in starts for each in frame.f_locals["waiting"]]


def tensors_moving() -> list[torch.Tensor]:
    """The tensors in whose move a collective takes part; of gradients the leaves."""
    if leaves := leaves_reduced():
        return leaves
    for frame in frames():
        take = _MOVERS.get(frame.f_code)
        if take is not None:
            return list(take(frame.f_locals))
    return []


_MOVERS: dict[Any, Any] = {
    in_layout.__code__: lambda values: [values["tensor"]],
    start_moves.__code__: lambda values: [tensor for tensor, _ in values["pairs"]],
    all_in_layout.__code__: lambda values: [tensor for tensor, _, _ in values["moves"]],
}
"""The functions that move tensors, with where their arguments are."""
