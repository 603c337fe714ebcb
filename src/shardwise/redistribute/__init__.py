"""Changing layouts: `plan(src, dst)` gives the steps, `relaid` takes them."""

from .execute import ordered, run_steps
from .layout import DimMap, Layout
from .plan import Step, move, plan
from .repeated import relaid, steps_between

__all__ = [
    "DimMap",
    "Layout",
    "Step",
    "move",
    "ordered",
    "plan",
    "relaid",
    "run_steps",
    "steps_between",
]
