"""The report of a script: of all that it does, or of one call of a function in it."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import LayoutError
from .recorder import Recorder
from .step_report import StepReport, report_of

_MARK = "__explained__"


def explain_script(
    file: Path, arguments: Sequence[str] = (), step: str | None = None, call: int = 2
) -> StepReport:
    """Run a script to its end, and report all of it, or call number `call` of its function `step`.

    The first call of a step also plans and compares plain tensors, so that the second is the
    default.
    """
    if not file.is_file():
        raise LayoutError(f"explain: there is no file {str(file)!r}.")
    tree = ast.parse(file.read_bytes(), str(file))
    found: list[StepReport] = []
    calls = [0]
    if step is None:
        with Recorder() as recorder:
            _run(tree, file, arguments, {})
        return report_of(file.name, recorder)
    if not _mark(tree, step):
        raise LayoutError(f"explain: {file} defines no function {step!r}.")

    def explained(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] != call:
                return function(*args, **kwargs)
            with Recorder() as recorder:
                made = function(*args, **kwargs)
            found.append(report_of(step, recorder))
            return made

        return run

    _run(tree, file, arguments, {_MARK: explained})
    if not found:
        raise LayoutError(
            f"explain: {file} called {step!r} {calls[0]} times, so there is no call {call}. "
            "Choose another with --call."
        )
    return found[0]


def _mark(tree: ast.Module, name: str) -> bool:
    """Decorate the functions of this name; False if there is none."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    for node in functions:
        node.decorator_list.append(ast.copy_location(ast.Name(_MARK, ast.Load()), node))
    return bool(functions)


def _run(tree: ast.Module, file: Path, arguments: Sequence[str], names: dict[str, Any]) -> None:
    """Run a script as Python does: as `__main__`, with its arguments and its folder."""
    main = ModuleType("__main__")
    main.__dict__.update(names, __file__=str(file))
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules["__main__"] = main
    try:
        exec(compile(tree, str(file.resolve()), "exec"), main.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before
