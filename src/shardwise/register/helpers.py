"""What rules written for PyTorch's DTensor are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

from ..errors import RuleError
from ..layout.cost import LATENCY_BYTES, move_cost
from ..layout.geometry import contiguous_stride
from ..layout.mesh import AnyMesh, topology
from ..layout.placement import Partial, Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute import steps_between
from .schema import OpSchema, OpSpec, OpStrategy, OutputSharding

__all__ = [
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
    "redistribute_cost",
    "replicate_tensor_dim",
    "unshard_tensor_dim",
]

Row = tuple[Placement | None, ...]


# --- questions about a spec ----------------------------------------------------------------------


def normalize_dim(dim: int, ndim: int) -> int:
    """A dim counted from the front.

    >>> normalize_dim(-1, 3)
    2
    """
    return dim if dim >= 0 else dim + ndim


def normalize_dims(dims: int | Sequence[int], ndim: int) -> Sequence[int]:
    """Dims counted from the front.

    >>> normalize_dims([-1, 0], 3)
    [2, 0]
    """
    if isinstance(dims, int):
        return (normalize_dim(dims, ndim),)
    found = [normalize_dim(dim, ndim) for dim in dims]
    return tuple(found) if isinstance(dims, tuple) else found


def is_tensor_dim_sharded(spec: DTensorSpec, dim: int) -> bool:
    """Whether some axis shards a dim."""
    return any(place.is_shard(dim) for place in spec.placements)


def is_tensor_partial(spec: DTensorSpec) -> bool:
    """Whether a reduction is pending on some axis."""
    return any(place.is_partial() for place in spec.placements)


def _shards_per_dim(shape: Sequence[int], spec: DTensorSpec) -> list[int] | None:
    """Into how many pieces each dim is cut; None if the spec shards a dim that is not there."""
    counts = [1] * len(shape)
    for size, place in zip(spec.topology.shape, spec.placements, strict=True):
        if isinstance(place, Shard):
            if place.dim >= len(shape):
                return None
            counts[place.dim] *= size
    return counts


def is_tensor_shardable(shape: Sequence[int], spec: DTensorSpec) -> bool:
    """Whether every dim that the spec shards has at least as many elements as shards."""
    counts = _shards_per_dim(shape, spec)
    if counts is None:
        return False
    return all(count == 1 or size >= count for size, count in zip(shape, counts, strict=True))


def is_tensor_evenly_shardable(shape: Sequence[int], spec: DTensorSpec) -> bool:
    """Whether all shards of a tensor of this shape are equal in size."""
    counts = _shards_per_dim(shape, spec)
    if counts is None:
        return False
    return all(size % count == 0 for size, count in zip(shape, counts, strict=True))


def unshard_tensor_dim(placements: Sequence[Placement], dim: int) -> tuple[Placement, ...]:
    """The placements with the shards of a dim made whole.

    >>> unshard_tensor_dim((Shard(0), Shard(1), Partial()), 0)
    (R, S(1), P(sum))
    """
    return tuple(Replicate() if place.is_shard(dim) else place for place in placements)


def replicate_tensor_dim(placements: Sequence[Placement], dim: int) -> tuple[Placement, ...]:
    """The placements with the shards of a dim made whole, and pending reductions done.

    >>> replicate_tensor_dim((Shard(0), Shard(1), Partial()), 0)
    (R, S(1), R)
    """
    return tuple(
        Replicate() if place.is_partial() else place
        for place in unshard_tensor_dim(placements, dim)
    )


def redistribute_cost(src: DTensorSpec, dst: DTensorSpec) -> float:
    """What moving a tensor from one layout to another costs, in bytes that a rank receives."""
    if dst.tensor_meta is None:
        dst = DTensorSpec(src.topology, dst.placements, src.meta)
    if src is dst:
        return 0.0
    return float(
        sum(
            LATENCY_BYTES + step.elements_received * src.dtype.itemsize
            for step in steps_between(src, dst)
            if not step.is_local
        )
    )


def generate_redistribute_costs(src_strategy: OpStrategy, dst_spec: DTensorSpec) -> list[float]:
    """The cost of reaching `dst_spec` from each layout that an operand may have."""
    return [redistribute_cost(each.output_spec, dst_spec) for each in src_strategy.strategies]


# --- strategies --------------------------------------------------------------------------------


def expand_to_full_mesh_op_strategy(
    mesh: AnyMesh,
    op_schema: OpSchema,
    single_mesh_dim_strategies: Sequence[Sequence[Placement | None]],
    *,
    input_index: int = 1,
    inplace_op: bool = False,
    is_valid_strategy_cb: Callable[[list[DTensorSpec], Any], bool] | None = None,
) -> OpStrategy:
    """All ways to run on a mesh, from the ways to run on one axis.

    A row has the placements of `input_index` results, then those of the operands; None for a result
    that is no tensor. Ways in which a dim would have fewer elements than shards are left out. With
    `inplace_op` the ways that keep the first operand in its layout are taken if there are any.
    """
    operands = [*op_schema.args_strategy, *op_schema.kwargs_strategy]
    rows = [tuple(row) for row in single_mesh_dim_strategies]
    for row in rows:
        inputs = [place for place in row[input_index:] if place is not None]
        if len(inputs) != len(operands):
            raise RuleError(
                f"{op_schema.op}: the row {list(row)} has {len(inputs)} operands after "
                f"{input_index} results, but the call has {len(operands)}."
            )
    return ExpandedStrategy(mesh, operands, rows, input_index, inplace_op, is_valid_strategy_cb)


class ExpandedStrategy(OpStrategy):
    """Rows for one axis that stand for all their combinations.

    These are as many as rows to the power of axes, so they are written out only for who looks. To
    choose, one row is taken for each axis after another.
    """

    def __init__(
        self,
        mesh: AnyMesh,
        operands: Sequence[OpStrategy],
        rows: Sequence[Row],
        input_index: int,
        inplace_op: bool,
        is_valid: Callable[[list[DTensorSpec], Any], bool] | None,
    ) -> None:
        self._mesh = mesh
        self._operands = operands
        self._rows = rows
        self._input_index = input_index
        self._inplace = inplace_op
        self._is_valid = is_valid

    @cached_property
    def strategies(self) -> list[OpSpec]:  # type: ignore[override]
        """Every combination that is possible."""
        combined = itertools.product(self._rows, repeat=topology(self._mesh).ndim)
        made = [strategy for rows in combined if (strategy := self._combined(rows)) is not None]
        return _in_place(self._operands, made) if self._inplace else made

    @property
    def mesh(self) -> AnyMesh:
        return self._mesh

    def _combined(self, rows: Sequence[Row]) -> OpSpec | None:
        columns = list(zip(*rows, strict=True))
        made = _on_mesh(self._mesh, self._operands, columns, self._input_index)
        if made is None or self._is_valid is None:
            return made
        return made if self._is_valid(list(made.input_specs or ()), made.output_specs) else None

    def choose(self) -> OpStrategy:
        """One strategy, decided axis by axis; all of them if that leads nowhere."""
        if "strategies" in self.__dict__:  # the rule has looked at them, and may have changed them
            return self
        own = [operand.strategies[0].output_spec for operand in self._operands]
        sizes = [prod(spec.shape) * spec.dtype.itemsize for spec in own]
        chosen: list[Row] = []
        for axis, count in enumerate(topology(self._mesh).shape):
            held = [spec.placements[axis] for spec in own]
            row = self._on_axis(chosen, held, count, sizes)
            if row is None:
                return self
            chosen.append(row)
            for index, place in enumerate(self._inputs(row)):
                if place.is_shard():
                    sizes[index] //= count
        made = self._combined(chosen)
        return self if made is None else OpStrategy([made])

    def _inputs(self, row: Row) -> list[Placement]:
        return [place for place in row[self._input_index :] if place is not None]

    def _on_axis(
        self, before: list[Row], held: list[Placement], count: int, sizes: list[int]
    ) -> Row | None:
        """The cheapest row for the next axis; of equals one that moves nothing, then the first."""
        best: tuple[tuple[int, bool], Row] | None = None
        for row in self._allowed(held):
            wanted = self._inputs(row)
            moves = [
                move_cost(have, want, count, size // count if have.is_shard() else size)
                for have, want, size in zip(held, wanted, sizes, strict=True)
            ]
            price = (sum(moves), wanted != held)
            if (best is None or price < best[0]) and self._is_possible([*before, row]):
                best = (price, row)
        return None if best is None else best[1]

    def _allowed(self, held: list[Placement]) -> Sequence[Row]:
        if not self._inplace:
            return self._rows
        staying = [row for row in self._rows if row[0] is None or row[0] is self._inputs(row)[0]]
        return [row for row in staying if self._inputs(row)[0] is held[0]] or staying

    def _is_possible(self, rows: Sequence[Row]) -> bool:
        """Whether rows for the first axes leave elements for every shard."""
        rest = (Replicate(),) * (topology(self._mesh).ndim - len(rows))
        columns = [column + rest for column in zip(*rows, strict=True)]
        return _on_mesh(self._mesh, self._operands, columns, self._input_index) is not None


def _on_mesh(
    mesh: AnyMesh,
    operands: Sequence[OpStrategy],
    columns: Sequence[tuple[Placement | None, ...]],
    input_index: int,
) -> OpSpec | None:
    outputs = [_column_spec(mesh, column) for column in columns[:input_index]]
    columns = [column for column in columns[input_index:] if None not in column]
    inputs = [
        DTensorSpec(mesh, [place for place in column if place is not None], operand.tensor_meta)
        for column, operand in zip(columns, operands, strict=True)
    ]
    if any(map(_is_mixed, [*inputs, *outputs])):
        return None
    for operand, spec in zip(operands, inputs, strict=True):
        if not is_tensor_shardable(operand.shape, spec):
            return None
    made = outputs[0] if input_index == 1 else tuple(outputs)
    return OpSpec(made if input_index else None, inputs)


def _column_spec(mesh: AnyMesh, column: Sequence[Placement | None]) -> DTensorSpec | None:
    places = [place for place in column if place is not None]
    return DTensorSpec(mesh, places) if len(places) == len(column) else None


def _is_mixed(spec: DTensorSpec | None) -> bool:
    """Whether reductions are pending that do not commute."""
    if spec is None:
        return False
    ops = {place.reduce_op for place in spec.placements if isinstance(place, Partial)}
    return len(ops) > 1 and ops != {"sum", "avg"}


def _in_place(operands: Sequence[OpStrategy], found: Sequence[OpSpec]) -> list[OpSpec]:
    """The strategies whose first result is where the first operand is, best where it is now."""
    staying = []
    for strategy in found:
        outputs = strategy.output_specs
        first = outputs if isinstance(outputs, DTensorSpec) or outputs is None else outputs[0]
        if first is None or first.placements == strategy.input_spec(0).placements:
            staying.append(strategy)
    now = operands[0].strategies[0].output_spec.placements
    return [each for each in staying if each.input_spec(0).placements == now] or staying


# --- propagation rules -------------------------------------------------------------------------


def pointwise_rule(op_schema: OpSchema, linearity: bool = False) -> OutputSharding:
    """The layouts of a pointwise operator: operands broadcast, and agree on each axis.

    With `linearity` the operator is linear in its operands together, so that pending sums pass. An
    in-place operator follows its first operand.
    """
    specs = op_schema.args_spec
    shape = _broadcast(op_schema, specs)
    names = [f"i{dim}" for dim in range(len(shape))]
    operands = [
        [
            name if size == whole else None
            for name, size, whole in zip(
                names[len(shape) - spec.ndim :],
                spec.shape,
                shape[len(shape) - spec.ndim :],
                strict=True,
            )
        ]
        for spec in specs
    ]
    follow = specs[0].placements if op_schema.is_inplace_op() else None
    return _agreed(op_schema, operands, names, shape, linearity, follow)


def _broadcast(schema: OpSchema, specs: Sequence[DTensorSpec]) -> tuple[int, ...]:
    if not specs:
        raise RuleError(f"{schema.op}: pointwise_rule: the call has no operand.")
    ndim = max(spec.ndim for spec in specs)
    shape = [1] * ndim
    for spec in specs:
        for dim, size in enumerate(spec.shape, ndim - spec.ndim):
            shape[dim] = size if shape[dim] == 1 else shape[dim]
    return tuple(shape)


def einop_rule(
    equation: str,
    op_schema: OpSchema,
    *,
    linearity: bool = False,
    enforce_sharding: dict[str, int] | None = None,
) -> OutputSharding:
    """The layouts of an operator whose data moves as in an einsum, `"mk,kn->mn"`.

    A sharded letter that the result lacks leaves a pending sum. `1` is a dim of size 1.
    `enforce_sharding` says which axis shards a letter, -1 for none.
    """
    left, arrow, right = equation.partition("->")
    operands = [[None if c == "1" else c for c in part] for part in left.split(",")]
    specs = op_schema.args_spec
    if not arrow or [len(dims) for dims in operands] != [spec.ndim for spec in specs]:
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
    shape = tuple(1 if c == "1" else sizes[c] for c in right)
    follow = None
    if enforce_sharding is not None:
        by_axis = {axis: name for name, axis in enforce_sharding.items() if axis >= 0}
        axes = range(specs[0].topology.ndim)
        follow = tuple(
            Shard(right.index(by_axis[axis])) if axis in by_axis else Replicate() for axis in axes
        )
    return _agreed(op_schema, operands, list(right), shape, linearity, follow)


def _agreed(
    schema: OpSchema,
    operands: Sequence[Sequence[str | None]],
    result: Sequence[str],
    shape: tuple[int, ...],
    linearity: bool,
    follow: Sequence[Placement] | None,
) -> OutputSharding:
    """Let the operands agree on each axis; if one must move for that, ask for it."""
    specs = schema.args_spec
    wanted: list[list[Placement]] = [[] for _ in specs]
    made: list[Placement] = []
    for axis in range(specs[0].topology.ndim):
        name, pending = _on_axis(specs, operands, result, axis, linearity, follow)
        for places, dims in zip(wanted, operands, strict=True):
            places.append(pending or _shard_of(dims, name))
        made.append(pending or _shard_of(result, name, Partial() if name else Replicate()))
    mesh = specs[0].topology
    if any(tuple(new) != spec.placements for new, spec in zip(wanted, specs, strict=True)):
        moved = [DTensorSpec(mesh, new, spec.meta) for new, spec in zip(wanted, specs, strict=True)]
        return OutputSharding(None, redistribute_schema=schema.with_specs(moved))
    meta = TensorMeta(shape, contiguous_stride(shape), specs[0].dtype)
    return OutputSharding(DTensorSpec(mesh, made, meta))


def _shard_of(
    dims: Sequence[str | None], name: str | None, otherwise: Placement | None = None
) -> Placement:
    if name is not None and name in dims:
        return Shard(dims.index(name))
    return otherwise or Replicate()


def _on_axis(
    specs: Sequence[DTensorSpec],
    operands: Sequence[Sequence[str | None]],
    result: Sequence[str],
    axis: int,
    linearity: bool,
    follow: Sequence[Placement] | None,
) -> tuple[str | None, Placement | None]:
    """Which letter is sharded on an axis, or which reduction stays pending there."""
    places = [spec.placements[axis] for spec in specs]
    pending = [place for place in places if place.is_partial()]
    passes = linearity and len(set(pending)) == 1 and pending[0] in (Partial("sum"), Partial("avg"))
    if follow is not None:
        place = follow[axis]
        if isinstance(place, Shard):
            return result[place.dim], None
        return None, pending[0] if passes and place.is_partial() else None
    weight: dict[str, int] = {}
    for place, dims, spec in zip(places, operands, specs, strict=True):
        name = dims[place.dim] if isinstance(place, Shard) else None
        if name is not None:
            weight[name] = weight.get(name, 0) + prod(spec.shape) * spec.dtype.itemsize
    if weight:
        return max(weight, key=lambda name: weight[name]), None
    return None, pending[0] if passes else None
