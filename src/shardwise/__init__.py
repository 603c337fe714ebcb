"""Shardwise: a distributed tensor for PyTorch.

Write a program for one device; Shardwise runs it on a mesh of devices and gives the single-device
answer.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._torch import no_garbage_collection

with no_garbage_collection():
    from . import errors, random
    from . import forms as forms  # importing it registers the distributed forms
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
    from .random import manual_seed
    from .redistribute import Explanation, explain_redistribute
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

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # fits both kinds of mesh

    from . import register
    from .capture.captured import Captured, capture
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
    from .register import register_rule
    from .report import StepReport, explain
    from .tools.assert_layout import assert_layout
    from .tools.comm_debug import CommDebugMode
    from .tools.picture import picture
    from .tools.verify import verify
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


_PARALLEL = (
    "Dispatched MixedPrecisionPolicy Plan context_parallel dispatch_tokens distribute_module "
    "follow_layouts full_state_dict fully_shard load_checkpoint load_safetensors make_plan "
    "materialize parallelize_module replicate save_checkpoint save_safetensors shard_module"
)
_LATER = {
    **dict.fromkeys(_PARALLEL.split(), ".parallel"),
    **dict.fromkeys(("Captured", "capture"), ".capture.captured"),
    **dict.fromkeys(("StepReport", "explain"), ".report"),
    "register_rule": ".register",
    "assert_layout": ".tools.assert_layout",
    "CommDebugMode": ".tools.comm_debug",
    "picture": ".tools.picture",
    "verify": ".tools.verify",
}
"""The modules of names that are imported when they are asked for, so that `import shardwise` is
quick."""
_MODULES = ("interop", "parallel", "register", "report", "tools")

# Importing the empty package now keeps a later import from putting it where the function belongs.
import_module(".capture", __name__)
globals().pop("capture", None)  # None if this module is loaded again


def __dir__() -> list[str]:
    """The public names alone: `shardwise.<tab>` shows no internals."""
    return sorted([*__all__, "__version__", "interop"])


def __getattr__(name: str) -> object:
    """Import a name when it is asked for."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name], __name__), name)
    return value
