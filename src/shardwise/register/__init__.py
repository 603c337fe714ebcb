"""Adding rules: the native form, and adapters for rules written for PyTorch's own DTensor.

`register_rule` takes a rule in index notation. `register_prop_rule` and `register_op_strategy` take
functions as `torch.distributed.tensor` knows them: only their imports change. So does
`register_sharding`.
"""

from ..layout.placement import Placement
from ..layout.spec import DTensorSpec, TensorMeta
from . import helpers
from .adapters import register_op_strategy, register_prop_rule
from .checked import checked
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

einop_rule = checked(helpers.einop_rule, equation=str, op_schema=OpSchema)
expand_to_full_mesh_op_strategy = checked(
    helpers.expand_to_full_mesh_op_strategy,
    op_schema=OpSchema,
    single_mesh_dim_strategies=[list | tuple],
    input_index=int,
)
generate_redistribute_costs = checked(
    helpers.generate_redistribute_costs, src_strategy=OpStrategy, dst_spec=DTensorSpec
)
is_tensor_dim_sharded = checked(helpers.is_tensor_dim_sharded, spec=DTensorSpec, dim=int)
is_tensor_evenly_shardable = checked(
    helpers.is_tensor_evenly_shardable, shape=[int], spec=DTensorSpec
)
is_tensor_partial = checked(helpers.is_tensor_partial, spec=DTensorSpec)
is_tensor_shardable = checked(helpers.is_tensor_shardable, shape=[int], spec=DTensorSpec)
normalize_dim = checked(helpers.normalize_dim, dim=int, ndim=int)
normalize_dims = checked(helpers.normalize_dims, dims=int | list | tuple, ndim=int)
pointwise_rule = checked(helpers.pointwise_rule, op_schema=OpSchema)
replicate_tensor_dim = checked(helpers.replicate_tensor_dim, placements=[Placement], dim=int)
unshard_tensor_dim = checked(helpers.unshard_tensor_dim, placements=[Placement], dim=int)

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
