"""Whole modules on a mesh."""

from .materialize import materialize
from .module import distribute_module
from .plan import Plan, make_plan
from .shard import shard_module

__all__ = ["Plan", "distribute_module", "make_plan", "materialize", "shard_module"]
