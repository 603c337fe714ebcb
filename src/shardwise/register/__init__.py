"""Adding rules: the native form, and adapters for rules written for PyTorch's own DTensor.

`register_rule` takes a rule in index notation. `register_prop_rule` and `register_op_strategy` take
functions as `torch.distributed.tensor` knows them: only their imports change. So does
`register_sharding`.
"""

from ..layout.spec import DTensorSpec, TensorMeta
from .adapters import register_op_strategy, register_prop_rule
from .helpers import (
    einop_rule,
    expand_to_full_mesh_op_strategy,
    generate_redistribute_costs,
    is_tensor_dim_sharded,
    is_tensor_evenly_shardable,
    is_tensor_partial,
    is_tensor_shardable,
    normalize_dim,
    normalize_dims,
    pointwise_rule,
    replicate_tensor_dim,
    unshard_tensor_dim,
)
from .native import register_rule
from .schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    OutputSharding,
    PlacementStrategy,
    RuntimeSchemaInfo,
    StrategyType,
    TupleStrategy,
)
from .sharding import register_sharding

__all__ = [
    "DTensorSpec",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "OutputSharding",
    "PlacementStrategy",
    "RuntimeSchemaInfo",
    "StrategyType",
    "TensorMeta",
    "TupleStrategy",
    "einop_rule",
    "expand_to_full_mesh_op_strategy",
    "generate_redistribute_costs",
    "is_tensor_dim_sharded",
    "is_tensor_evenly_shardable",
    "is_tensor_partial",
    "is_tensor_shardable",
    "normalize_dim",
    "normalize_dims",
    "pointwise_rule",
    "register_op_strategy",
    "register_prop_rule",
    "register_rule",
    "register_sharding",
    "replicate_tensor_dim",
    "unshard_tensor_dim",
]
