"""Shardwise: a distributed tensor for PyTorch.

Write a program for one device; Shardwise runs it on a mesh of devices and gives the single-device
answer.
"""

from . import (
    forms,  # registers the distributed forms
    random,
    register,
)
from .config import (
    communication,
    exchange_buffer,
    implicit_replication,
    keep_partial_grads,
    plain_tensors,
    ragged_results,
)
from .cost import Link
from .debug import CommDebugMode
from .engine import lockstep
from .factories import (
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
from .mesh import DeviceMesh, init_device_mesh
from .parallel import distribute_module
from .per_rank import PerRank, is_first_rank, per_rank
from .picture import picture
from .placement import Partial, Placement, Replicate, Shard
from .random import manual_seed
from .redistribute import Explanation, explain_redistribute
from .register import register_rule
from .spec import DTensorSpec, TensorMeta
from .tensor import DTensor, distribute_tensor, redistribute_all
from .verify import verify

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
    "manual_seed",
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
    "tril_indices",
    "triu_indices",
    "verify",
    "zeros",
]
