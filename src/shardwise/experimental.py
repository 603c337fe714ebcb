"""The names of `torch.distributed.tensor.experimental`."""

from .config import implicit_replication
from .parallel import context_parallel, local_map
from .register import register_sharding

__all__ = ["context_parallel", "implicit_replication", "local_map", "register_sharding"]
