"""Shardwise: a distributed tensor for PyTorch."""

from .mesh import DeviceMesh, VirtualMesh, init_device_mesh
from .per_rank import PerRank, is_first_rank, per_rank
from .placement import Partial, Placement, Replicate, Shard
from .policy import communication, implicit_replication, plain_tensors
from .random import manual_seed
from .spec import DTensorSpec, TensorMeta
from .tensor import DTensor, distribute_tensor, keep_partial_grads
