"""Moving boxes on one mesh: one gather or exchange over just the axes that must talk."""

from __future__ import annotations

from .layout import Layout
from .routes import dim_moves
from .step import Step

__all__ = ["move"]


def move(now: Layout, goal: Layout) -> Step:
    """The step between two layouts with the same pending reductions; targets may overlap."""
    if any(all(a == b for a, b in want.table) for want in goal.dims):
        return Step("slice", now, goal)  # nobody needs anything
    moves = dim_moves(now, goal)
    axes = tuple(sorted({axis for each in moves for axis in each.group}))
    if not axes:
        return Step("slice", now, goal)
    kind = "all_gather" if all(each.gathers for each in moves) else "exchange"
    return Step(kind, now, goal, axes)
