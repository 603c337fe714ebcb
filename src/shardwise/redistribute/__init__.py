"""Changing layouts: `plan(src, dst)` gives the steps, `relaid` takes them."""

from .execute import in_order, ordered, run_steps
from .layout import DimMap, Layout
from .plan import Step, move, plan
from .repeated import relaid, steps_between
from .together import bytes_received, run_together

__all__ = [
    "DimMap",
    "Layout",
    "Step",
    "bytes_received",
    "in_order",
    "move",
    "ordered",
    "plan",
    "relaid",
    "run_steps",
    "run_together",
    "steps_between",
]
