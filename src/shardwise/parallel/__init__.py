"""Whole modules on a mesh."""

from .fully_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from .module import distribute_module
from .plan import Plan, make_plan
from .shard import shard_module

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Plan",
    "distribute_module",
    "fully_shard",
    "make_plan",
    "shard_module",
]
