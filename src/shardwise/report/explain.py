"""`explain`: how an operator runs, or what a whole step does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from ..errors import LayoutError, public
from ..tools.explain import explain_call
from .recorder import Recorder
from .step_report import StepReport, report_of


@public
def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """How one operator of PyTorch runs, or what a function of yours, or a module, does.

    The call runs once, on all ranks; its result is dropped.

    For a function of PyTorch it returns the rows by which each operator could run, their prices,
    and the one taken. A row has a placement for each operand and each result, on one mesh axis. A
    row that fits the operands is taken, else the cheapest. Prices are microseconds, by the links of
    the mesh; a result left Partial is charged for its reduction.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    >>> x = shardwise.ones(4, 6, device_mesh=mesh, placements=[Shard(1)])
    >>> explain(torch.softmax, x, dim=0)
    aten._softmax(float32[4, 6@tp]): by its rule
    axis  row            price  taken
    tp    S(1) -> S(1)   0.000  *
    tp    R -> R        10.024

    For any other function, such as a training step, it returns a `StepReport`: every collective
    with its layouts, bytes, price, line and module, and the memory of each rank. `print` it, or
    write it as a page: `report.write_html("step.html")`. A step that runs for the first time also
    plans its calls and compares plain tensors, so call it once before.

    >>> def step(x):
    ...     return (x @ x.t()).relu()
    >>> report = explain(step, x)
    >>> [(one.kind, one.axes, one.bytes, one.cause.op) for one in report.collectives]
    [('all_reduce', ('tp',), 64, 'relu')]
    >>> report.memory().peak
    240
    """
    if not callable(function):
        raise LayoutError(
            "explain: a function and its arguments are needed, but got a "
            f"{type(function).__name__}. Write for example explain(torch.matmul, x, w)."
        )
    if isinstance(getattr(type(function), "explain", None), FunctionType):
        return function.explain(*args, **kwargs)  # type: ignore[attr-defined]  # a captured step
    if _is_pytorchs(function):
        return explain_call(function, *args, **kwargs)
    return explain_step(function, *args, **kwargs)


def explain_step(function: Callable[..., Any], *args: Any, **kwargs: Any) -> StepReport:
    """The report of one call of any function."""
    with Recorder() as recorder:
        function(*args, **kwargs)
    return report_of(_name(function), recorder)


def _is_pytorchs(function: Any) -> bool:
    """True for operators and functions of PyTorch; modules are called as steps."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return False
    if inspect.isbuiltin(function) or inspect.ismethoddescriptor(function):
        return True
    home = getattr(function, "__module__", None) or type(function).__module__
    return home.split(".")[0] == "torch"


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
