"""Whole modules on a mesh."""

from .context import context_parallel
from .experts import Dispatched, dispatch_tokens
from .follow import follow_layouts
from .fully_shard import FSDPModule, fully_shard
from .local_map import local_map
from .loss import loss_parallel
from .materialize import materialize
from .module import distribute_module
from .parallelize import parallelize_module
from .plan import Plan, make_plan
from .replicate import ReplicateModule, replicate
from .saving import (
    full_state_dict,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
    save_safetensors,
)
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
from .units import MixedPrecisionPolicy

__all__ = [
    "ColwiseParallel",
    "Dispatched",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ParallelStyle",
    "Plan",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicateModule",
    "RowwiseParallel",
    "SequenceParallel",
    "context_parallel",
    "dispatch_tokens",
    "distribute_module",
    "follow_layouts",
    "full_state_dict",
    "fully_shard",
    "load_checkpoint",
    "load_safetensors",
    "local_map",
    "loss_parallel",
    "make_plan",
    "materialize",
    "parallelize_module",
    "replicate",
    "save_checkpoint",
    "save_safetensors",
    "shard_module",
]
