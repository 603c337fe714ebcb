"""The names of `torch.distributed.tensor.debug`."""

from .tools.comm_debug import CommDebugMode
from .tools.picture import visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding"]
