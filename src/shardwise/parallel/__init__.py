"""Whole modules on a mesh."""

from .fully_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from .local_map import local_map
from .loss import loss_parallel
from .materialize import materialize
from .module import distribute_module
from .parallelize import parallelize_module
from .plan import Plan, make_plan
from .shard import shard_module
from .style import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColwiseParallel",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ParallelStyle",
    "Plan",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "distribute_module",
    "fully_shard",
    "local_map",
    "loss_parallel",
    "make_plan",
    "materialize",
    "parallelize_module",
    "shard_module",
]
