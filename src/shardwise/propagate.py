"""From a rule and the operands' specs to the layouts in which a call runs.

Axes are decided one after another, outer to inner. On each axis a row that fits the operands as
they are is
taken; otherwise every row is priced and the cheapest wins. No rank, clock or set order enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .cost import debt, move_cost, recut_cost
from .geometry import Cuts, chunk_cuts
from .mesh import Topology
from .placement import Placement, Replicate, Shard
from .rules import Along, Call, Dims, Row, Rule
from .spec import DTensorSpec, TensorMeta

__all__ = ["Decision", "decide", "spec_for"]


@dataclass(frozen=True)
class Decision:
    """The layouts in which a call runs: one spec per operand, one per result."""

    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[DTensorSpec, ...]

    def fits(self, specs: tuple[DTensorSpec, ...]) -> bool:
        """Whether the operands can stay as they are."""
        return self.inputs == specs


@dataclass(frozen=True)
class _Leader:
    """The operand whose cuts of a factor the others follow."""

    axes: tuple[int, ...]
    cuts: Cuts


def decide(rule: Rule, call: Call, written: int | None = None) -> Decision:
    """Choose the layouts for a call. Operand `written` keeps its layout if any row allows it."""
    topology = call.specs[0].topology
    if rule.ignores:
        return _by_example(rule, call)
    leaders = _leaders(rule, call.specs, written)
    chosen: list[Row] = []
    sizes = [prod(spec.meta.shape) * spec.dtype.itemsize for spec in call.specs]
    results = [prod(meta.shape) * meta.dtype.itemsize for meta in call.results]
    for axis, count in enumerate(topology.shape):
        row = _choose(rule, call.specs, leaders, axis, count, written, sizes, results)
        chosen.append(row)
        for values, places in ((sizes, row.inputs), (results, row.outputs)):
            for index, place in enumerate(places):
                if place.is_shard():
                    values[index] //= count
    cuts = _factor_cuts(rule, topology, chosen, leaders)
    inputs = tuple(
        spec_for(topology, [row.inputs[i] for row in chosen], rule.inputs[i], spec.meta, cuts)
        for i, spec in enumerate(call.specs)
    )
    outputs = tuple(
        spec_for(topology, [row.outputs[i] for row in chosen], rule.outputs[i], meta, cuts)
        for i, meta in enumerate(call.results)
    )
    return Decision(inputs, outputs)


def _by_example(rule: Rule, call: Call) -> Decision:
    """Operands that are not read stay; the results take the first one's shards."""
    example = call.specs[0]
    same = tuple(call.results[0].shape) == tuple(example.meta.shape)
    places: list[Placement] = []
    for place in example.placements:
        places.append(place if same and place.is_shard() else Replicate())
    cuts = example.cuts if same and example.is_sharded() else None
    outputs = tuple(DTensorSpec(example.topology, places, meta, cuts=cuts) for meta in call.results)
    return Decision(call.specs, outputs)


def _leaders(rule: Rule, specs: tuple[DTensorSpec, ...], written: int | None) -> dict[str, _Leader]:
    """For each factor the layout of the largest operand that shards it; a written one comes
    first."""
    order = sorted(range(len(specs)), key=lambda i: (i != written, -prod(specs[i].meta.shape), i))
    leaders: dict[str, _Leader] = {}
    for index in order:
        spec = specs[index]
        for dim, at in enumerate(rule.inputs[index]):
            if at is None or at.factor in leaders or not spec.dim_axes[dim]:
                continue
            cuts = _to_factor(at, spec.dim_cuts[dim])
            if cuts is not None:
                leaders[at.factor] = _Leader(spec.dim_axes[dim], cuts)
    return leaders


def _to_factor(at: Along, cuts: Cuts) -> Cuts | None:
    return cuts if at.link is None else at.link.to_factor(cuts)


def _choose(
    rule: Rule,
    specs: tuple[DTensorSpec, ...],
    leaders: dict[str, _Leader],
    axis: int,
    count: int,
    written: int | None,
    sizes: list[int],
    results: list[int],
) -> Row:
    rows = rule.rows
    if written is not None:
        place = specs[written].placements[axis]
        rows = tuple(row for row in rows if row.inputs[written] is row.outputs[0])
        rows = tuple(row for row in rows if row.inputs[written] is place) or rows
    for row in rows:
        if all(_fits(rule, specs, leaders, axis, row, i) for i in range(len(specs))):
            return row
    prices = [_price(rule, specs, leaders, axis, count, row, sizes, results) for row in rows]
    return rows[prices.index(min(prices))]


def _fits(
    rule: Rule,
    specs: tuple[DTensorSpec, ...],
    leaders: dict[str, _Leader],
    axis: int,
    row: Row,
    operand: int,
) -> bool:
    spec = specs[operand]
    place = spec.placements[axis]
    if row.inputs[operand] is not place:
        return False
    if not isinstance(place, Shard):
        return True
    at = rule.inputs[operand][place.dim]
    leader = leaders.get(at.factor) if at is not None else None
    if at is None or leader is None:
        return False
    mine = _to_factor(at, spec.dim_cuts[place.dim])
    if mine is None:  # cuts that follow from the factor's, as those of a slice do
        assert at.link is not None
        counts = tuple(spec.topology.shape[a] for a in leader.axes)
        same = at.link.from_factor(leader.cuts, counts) == spec.dim_cuts[place.dim]
        return same and leader.axes == spec.dim_axes[place.dim]
    return leader.axes != spec.dim_axes[place.dim] or leader.cuts == mine


def _price(
    rule: Rule,
    specs: tuple[DTensorSpec, ...],
    leaders: dict[str, _Leader],
    axis: int,
    count: int,
    row: Row,
    sizes: list[int],
    results: list[int],
) -> int:
    total = 0
    for operand, spec in enumerate(specs):
        if not _fits(rule, specs, leaders, axis, row, operand):
            have, want = spec.placements[axis], row.inputs[operand]
            nbytes = sizes[operand] // count if have.is_shard() else sizes[operand]
            total += (
                recut_cost(count, nbytes) if have is want else move_cost(have, want, count, nbytes)
            )
    for place, nbytes in zip(row.outputs, results, strict=True):
        if not any(p.is_partial() for p in (s.placements[axis] for s in specs)):
            total += debt(place, count, nbytes)
    return total


def _factor_cuts(
    rule: Rule, topology: Topology, chosen: list[Row], leaders: dict[str, _Leader]
) -> dict[str, tuple[Cuts, tuple[int, ...]]]:
    """The cuts of each sharded factor, with the sizes of the axes that shard it."""
    cuts: dict[str, tuple[Cuts, tuple[int, ...]]] = {}
    for factor, size in rule.sizes.items():
        axes = tuple(axis for axis, row in enumerate(chosen) if row.factor == factor)
        if axes:
            leader = leaders.get(factor)
            counts = tuple(topology.shape[axis] for axis in axes)
            own = leader is not None and leader.axes == axes
            cuts[factor] = (leader.cuts if own and leader else chunk_cuts(size, counts), counts)
    return cuts


def spec_for(
    topology: Topology,
    places: list[Placement],
    dims: Dims,
    meta: TensorMeta,
    cuts: dict[str, tuple[Cuts, tuple[int, ...]]],
) -> DTensorSpec:
    """The spec of a tensor whose dims walk along factors that are cut like this."""
    own: list[Cuts | None] = [None] * len(dims)
    for place in places:
        if isinstance(place, Shard):
            at = dims[place.dim]
            assert at is not None
            sizes, counts = cuts[at.factor]
            own[place.dim] = sizes if at.link is None else at.link.from_factor(sizes, counts)
    return DTensorSpec(topology, places, meta, cuts=own if any(own) else None)
