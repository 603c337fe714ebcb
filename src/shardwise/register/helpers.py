"""Functions that rules written for PyTorch's DTensor call, with PyTorch's names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import torch

from ..dispatch.decide import decide
from ..errors import RuleError
from ..layout.geometry import contiguous_stride
from ..layout.mesh import AnyMesh, topology
from ..layout.placement import Partial, Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute.prepare import steps_between
from ..rules import Call, Rule, along
from .checked import checked
from .schema import OpSchema, OpSpec, OpStrategy, OutputSharding

# --- questions about a spec ----------------------------------------------------------------------


@checked
def normalize_dim(dim: int, ndim: int) -> int:
    """A dim counted from the front.

    >>> normalize_dim(-1, 3)
    2
    """
    return dim if dim >= 0 else dim + ndim


@checked
def normalize_dims(dims: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Dims counted from the front.

    >>> normalize_dims([-1, 0], 3)
    (2, 0)
    """
    every = [dims] if isinstance(dims, int) else dims
    return tuple(normalize_dim(dim, ndim) for dim in every)


@checked
def is_tensor_dim_sharded(spec: DTensorSpec, dim: int) -> bool:
    """True if some axis shards a dim."""
    return any(place.is_shard(dim) for place in spec.placements)


@checked
def is_tensor_partial(spec: DTensorSpec) -> bool:
    """True if the tensor is Partial on some axis."""
    return any(place.is_partial() for place in spec.placements)


@checked
def is_tensor_shardable(shape: Sequence[int], spec: DTensorSpec) -> bool:
    """True if every shard of a tensor of this shape has elements."""
    counts = _shards_per_dim(spec).items()
    return all(dim < len(shape) and max(shape[dim], 1) >= count for dim, count in counts)


@checked
def is_tensor_evenly_shardable(shape: Sequence[int], spec: DTensorSpec) -> bool:
    """True if all shards of a tensor of this shape are equal in size."""
    counts = _shards_per_dim(spec).items()
    return all(dim < len(shape) and shape[dim] % count == 0 for dim, count in counts)


def _shards_per_dim(spec: DTensorSpec) -> dict[int, int]:
    """The number of shards of each sharded dim."""
    counts: dict[int, int] = {}
    for size, place in zip(spec.topology.shape, spec.placements, strict=True):
        if isinstance(place, Shard):
            counts[place.dim] = counts.get(place.dim, 1) * size
    return counts


@checked
def unshard_tensor_dim(placements: Sequence[Placement], dim: int) -> tuple[Placement, ...]:
    """The placements with Replicate in place of the shards of a dim.

    >>> unshard_tensor_dim((Shard(0), Shard(1), Partial()), 0)
    (R, S(1), P(sum))
    """
    return tuple(Replicate() if place.is_shard(dim) else place for place in placements)


@checked
def replicate_tensor_dim(placements: Sequence[Placement], dim: int) -> tuple[Placement, ...]:
    """The placements with Replicate in place of the shards of a dim, and of Partial.

    >>> replicate_tensor_dim((Shard(0), Shard(1), Partial()), 0)
    (R, S(1), R)
    """
    unsharded = unshard_tensor_dim(placements, dim)
    return tuple(Replicate() if place.is_partial() else place for place in unsharded)


def redistribute_cost(src: DTensorSpec, dst: DTensorSpec) -> float:
    """The cost of moving a tensor from one layout to another, as the planner prices its steps."""
    if dst.tensor_meta is None:
        dst = DTensorSpec(src.topology, dst.placements, src.meta)
    return float(sum(step.price(src.dtype.itemsize) for step in steps_between(src, dst)))


@checked
def generate_redistribute_costs(src_strategy: OpStrategy, dst_spec: DTensorSpec) -> list[float]:
    """The cost of reaching `dst_spec` from each layout that an operand may have."""
    return [redistribute_cost(each.output_spec, dst_spec) for each in src_strategy.strategies]


# --- strategies --------------------------------------------------------------------------------


@checked
def expand_to_full_mesh_op_strategy(
    mesh: AnyMesh,
    op_schema: OpSchema,
    single_mesh_dim_strategies: Sequence[Sequence[Placement | None]],
    *,
    input_index: int = 1,
    inplace_op: bool = False,
    is_valid_strategy_cb: Callable[[list[DTensorSpec], Any], bool] | None = None,
) -> OpStrategy:
    """All ways to run on a mesh: each combination of a row for each axis.

    A row has the placements of `input_index` results, then those of the operands; None for a result
    that is no tensor. Combinations are left out in which a dim would have fewer elements than
    shards, or in which reductions that do not commute are pending. `inplace_op` changes nothing: a
    way in which a written operand would get another layout is never taken.
    """
    operands = [*op_schema.args_strategy, *op_schema.kwargs_strategy]
    for row in single_mesh_dim_strategies:
        count = len([place for place in row[input_index:] if place is not None])
        if count != len(operands):
            raise RuleError(
                f"{op_schema.op}: the row {list(row)} has {count} operands after "
                f"{input_index} results, but the call has {len(operands)}."
            )
    made = []
    for rows in itertools.product(single_mesh_dim_strategies, repeat=topology(mesh).ndim):
        columns: list[Any] = [None if None in each else each for each in zip(*rows, strict=True)]
        specs = [each and DTensorSpec(mesh, each) for each in columns]
        outputs = specs[:input_index]
        inputs = [
            DTensorSpec(mesh, spec.placements, operand.strategies[0].output_spec.meta)
            for spec, operand in zip(filter(None, specs[input_index:]), operands, strict=True)
        ]
        results = outputs[0] if input_index == 1 else tuple(outputs) or None
        possible = all(is_tensor_shardable(spec.shape, spec) for spec in inputs) and not any(
            _is_mixed(spec) for spec in specs if spec is not None
        )
        if possible and (is_valid_strategy_cb is None or is_valid_strategy_cb(inputs, results)):
            made.append(OpSpec(results, inputs))
    return OpStrategy(made)


def _is_mixed(spec: DTensorSpec) -> bool:
    """True if pending reductions of the tensor do not commute."""
    ops = {place.reduce_op for place in spec.placements if isinstance(place, Partial)}
    return len(ops) > 1 and ops != {"sum", "avg"}


# --- propagation rules -------------------------------------------------------------------------


@checked
def pointwise_rule(op_schema: OpSchema, linearity: bool = False) -> OutputSharding:
    """The layouts of a pointwise operator: operands broadcast, and agree on each axis.

    With `linearity` the operator is linear in its operands together, so that Partial("sum") and
    Partial("avg") pass. An in-place operator follows its first operand.
    """
    shapes = [spec.shape for spec in op_schema.args_spec]
    whole = torch.broadcast_shapes(*shapes)
    letters = ascii_letters[: len(whole)]
    operands = []
    for shape in shapes:
        skip = len(whole) - len(shape)
        pairs = zip(shape, whole[skip:], letters[skip:], strict=True)
        operands.append("".join(name if size == full else "1" for size, full, name in pairs))
    return einop_rule(f"{','.join(operands)}->{letters}", op_schema, linearity=linearity)


@checked
def einop_rule(equation: str, op_schema: OpSchema, *, linearity: bool = False) -> OutputSharding:
    """The layouts of an operator whose data moves as in an einsum, `"mk,kn->mn"`.

    A sharded letter that the result lacks leaves a Partial("sum"). `1` is a dim of size 1.
    """
    *operands, result = (
        [None if letter == "1" else letter for letter in part]
        for part in equation.replace("->", ",").split(",")
    )
    specs = op_schema.args_spec
    if [len(dims) for dims in operands] != [spec.ndim for spec in specs]:
        raise RuleError(
            f"{op_schema.op}: einop_rule: {equation!r} does not fit operands of "
            f"{[spec.ndim for spec in specs]} dims."
        )
    sizes = {
        name: size
        for dims, spec in zip(operands, specs, strict=True)
        for name, size in zip(dims, spec.shape, strict=True)
        if name is not None
    }
    shape = tuple(1 if name is None else sizes[name] for name in result)
    meta = TensorMeta(shape, contiguous_stride(shape), specs[0].dtype)
    linear = (tuple(range(len(specs))),) if linearity else ()
    rule = Rule(tuple(map(along, operands)), (along(result),), sizes, linear=linear)
    call = Call(op_schema.op, (), {}, specs, (meta,))
    decision = decide(rule, call, 0 if op_schema.is_inplace_op() else None)
    if any(a.placements != b.placements for a, b in zip(specs, decision.inputs, strict=True)):
        return OutputSharding(None, redistribute_schema=op_schema.with_specs(decision.inputs))
    return OutputSharding(decision.outputs[0])
