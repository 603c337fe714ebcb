"""Whole modules on a mesh."""

from .follow import follow_layouts
from .fully_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from .module import distribute_module
from .plan import Plan, make_plan
from .saving import (
    full_state_dict,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
    save_safetensors,
)
from .shard import shard_module

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Plan",
    "distribute_module",
    "follow_layouts",
    "full_state_dict",
    "fully_shard",
    "load_checkpoint",
    "load_safetensors",
    "make_plan",
    "save_checkpoint",
    "save_safetensors",
    "shard_module",
]
