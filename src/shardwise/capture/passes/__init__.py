"""Passes: functions that change a graph in place. A replay gives the same bits after each of them,
but for `bucket_reductions` on more than two ranks, where sums may be rounded in another way."""

from collections.abc import Callable

from torch import fx

from .buckets import bucket_reductions
from .clean import (
    drop_dead,
    drop_duplicates,
    fold_views,
    has_effects,
    is_view,
    root_of,
    written_roots,
)
from .overlap import delay_waits, hoist_gathers
from .reuse import reuse_buffers

__all__ = [
    "DEFAULT",
    "Pass",
    "bucket_reductions",
    "delay_waits",
    "drop_dead",
    "drop_duplicates",
    "fold_views",
    "has_effects",
    "hoist_gathers",
    "is_view",
    "reuse_buffers",
    "root_of",
    "written_roots",
]

Pass = Callable[[fx.Graph], None]

DEFAULT: tuple[Pass, ...] = (fold_views, drop_duplicates, drop_dead, delay_waits, hoist_gathers)
"""The passes of `capture(step)`. They give the same bits, and need no more memory."""
