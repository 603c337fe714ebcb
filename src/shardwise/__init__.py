"""Shardwise: a distributed tensor for PyTorch.

Write a program for one device; Shardwise runs it on a mesh of devices and gives the single-device
answer.
"""

from . import forms, random, register
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
from .layout.make_mesh import DeviceMesh, init_device_mesh
from .layout.placement import Partial, Placement, Replicate, Shard
from .layout.spec import DTensorSpec, TensorMeta
from .parallel import Plan, distribute_module, make_plan, materialize, shard_module
from .random import manual_seed
from .redistribute import Explanation, explain_redistribute
from .register import register_rule
from .tensor.dtensor import DTensor, distribute_tensor, redistribute_all
from .tensor.factories import (
    arange,
    empty,
    eye,
    full,
    linspace,
    logspace,
    normal,
    ones,
    rand,
    randint,
    randn,
    randperm,
    tril_indices,
    triu_indices,
    zeros,
)
from .tensor.per_rank import PerRank, is_first_rank, per_rank
from .tools.comm_debug import CommDebugMode
from .tools.picture import picture
from .tools.verify import verify

__all__ = [
    "CommDebugMode",
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
    "Explanation",
    "Link",
    "Partial",
    "PerRank",
    "Placement",
    "Plan",
    "Replicate",
    "Shard",
    "TensorMeta",
    "arange",
    "communication",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "exchange_buffer",
    "explain_redistribute",
    "eye",
    "forms",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "is_first_rank",
    "keep_partial_grads",
    "linspace",
    "lockstep",
    "logspace",
    "make_plan",
    "manual_seed",
    "materialize",
    "normal",
    "ones",
    "per_rank",
    "picture",
    "plain_tensors",
    "ragged_results",
    "rand",
    "randint",
    "randn",
    "random",
    "randperm",
    "redistribute_all",
    "register",
    "register_rule",
    "shard_module",
    "tril_indices",
    "triu_indices",
    "verify",
    "zeros",
]
