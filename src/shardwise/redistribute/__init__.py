"""Changing layouts: `plan(src, dst)` gives the steps, `run_steps` runs them."""

from .execute import run_steps
from .layout import DimMap, Layout
from .plan import Step, move, plan

__all__ = ["DimMap", "Layout", "Step", "move", "plan", "run_steps"]
