"""The names of `torch.distributed.tensor.experimental`."""

from .config import implicit_replication
from .parallel import local_map
from .register import register_sharding

__all__ = ["implicit_replication", "local_map", "register_sharding"]
