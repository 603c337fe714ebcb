"""Shardwise: a distributed tensor for PyTorch.

Write a program for one device; Shardwise runs it on a mesh of devices and gives the single-device
answer.
"""

from typing import TYPE_CHECKING

from . import errors, random, register
from . import forms as forms  # importing it registers the distributed forms
from .capture import Captured, capture
from .comm.lockstep import lockstep
from .config import (
    communication,
    exchange_buffer,
    implicit_replication,
    keep_partial_grads,
    plain_tensors,
    ragged_results,
)
from .layout.cost import Link
from .layout.make_mesh import init_device_mesh, is_virtual
from .layout.placement import Partial, Placement, Replicate, Shard
from .layout.spec import DTensorSpec, TensorMeta
from .parallel import (
    Dispatched,
    MixedPrecisionPolicy,
    Plan,
    context_parallel,
    dispatch_tokens,
    distribute_module,
    follow_layouts,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    load_safetensors,
    make_plan,
    materialize,
    parallelize_module,
    replicate,
    save_checkpoint,
    save_safetensors,
    shard_module,
)
from .random import manual_seed
from .redistribute import Explanation, explain_redistribute
from .register import register_rule
from .report import StepReport, explain
from .tensor.dtensor import DTensor, distribute_tensor, redistribute, redistribute_all
from .tensor.factories import (
    arange,
    empty,
    eye,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from .tensor.per_rank import PerRank, is_first_rank, per_rank
from .tools.assert_layout import assert_layout
from .tools.comm_debug import CommDebugMode
from .tools.picture import picture
from .tools.verify import verify

if TYPE_CHECKING:  # an annotation that fits both kinds of mesh
    from torch.distributed.device_mesh import DeviceMesh
else:
    from .layout.make_mesh import DeviceMesh

__version__ = "0.1.0"

__all__ = [
    "Captured",
    "CommDebugMode",
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
    "Dispatched",
    "Explanation",
    "Link",
    "MixedPrecisionPolicy",
    "Partial",
    "PerRank",
    "Placement",
    "Plan",
    "Replicate",
    "Shard",
    "StepReport",
    "TensorMeta",
    "arange",
    "assert_layout",
    "capture",
    "communication",
    "context_parallel",
    "dispatch_tokens",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "errors",
    "exchange_buffer",
    "explain",
    "explain_redistribute",
    "eye",
    "follow_layouts",
    "full",
    "full_state_dict",
    "fully_shard",
    "implicit_replication",
    "init_device_mesh",
    "is_first_rank",
    "is_virtual",
    "keep_partial_grads",
    "linspace",
    "load_checkpoint",
    "load_safetensors",
    "lockstep",
    "logspace",
    "make_plan",
    "manual_seed",
    "materialize",
    "ones",
    "parallelize_module",
    "per_rank",
    "picture",
    "plain_tensors",
    "ragged_results",
    "rand",
    "randint",
    "randn",
    "random",
    "randperm",
    "redistribute",
    "redistribute_all",
    "register",
    "register_rule",
    "replicate",
    "save_checkpoint",
    "save_safetensors",
    "shard_module",
    "verify",
    "zeros",
]


def __dir__() -> list[str]:
    """The public names alone: `shardwise.<tab>` shows no internals."""
    return sorted([*__all__, "__version__", "interop"])


def __getattr__(name: str) -> object:
    """Import `interop` when it is asked for: it imports PyTorch's own DTensor."""
    if name == "interop":
        from importlib import import_module

        return import_module(".interop", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
