"""Changing layouts: `plan(src, dst)` gives the steps, `run_steps` runs them."""

from .execute import run_steps
from .layout import Layout
from .plan import Step, plan

__all__ = ["Layout", "Step", "plan", "run_steps"]
