"""Changing layouts: `steps_between(src, dst)` gives the steps, `redistribute_locals` takes them."""

from .execute import (
    Ready,
    Run,
    in_order,
    redistribute_locals,
    run_all,
    run_between,
    start_together,
    waited_once,
)
from .explain import Explanation, explain_redistribute
from .prepare import once, ordered, prepared, steps_between
from .routes import move

__all__ = [
    "Explanation",
    "Ready",
    "Run",
    "explain_redistribute",
    "in_order",
    "move",
    "once",
    "ordered",
    "prepared",
    "redistribute_locals",
    "run_all",
    "run_between",
    "start_together",
    "steps_between",
    "waited_once",
]
