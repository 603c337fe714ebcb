"""Changing layouts: `plan(src, dst)` gives the steps, `redistribute_locals` takes them."""

from .execute import Ready, Run, bytes_received, in_order, ordered, run_all, run_steps, run_together
from .explain import Explanation, explain_redistribute
from .layout import DimMap, Layout
from .moves import move
from .plan import plan
from .repeated import redistribute_locals, run_between, steps_between
from .step import Step

__all__ = [
    "DimMap",
    "Explanation",
    "Layout",
    "Ready",
    "Run",
    "Step",
    "bytes_received",
    "explain_redistribute",
    "in_order",
    "move",
    "ordered",
    "plan",
    "redistribute_locals",
    "run_all",
    "run_between",
    "run_steps",
    "run_together",
    "steps_between",
]
