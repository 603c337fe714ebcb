"""From a rule and the operands' specs to the layouts in which a call runs.

Axes are decided one after another, outer to inner. On each axis a row that fits the operands as
they are is taken; otherwise every row is priced and the cheapest wins. No rank, clock or set order
enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import prod

from ..comm.events import choosers
from ..layout.cost import debt, move_cost
from ..layout.geometry import Cuts, chunk_cuts
from ..layout.mesh import Topology
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, Groups, TensorMeta, fine_meta
from ..layout.split_dims import assumed, merge_dims, split_dims
from ..rules.language import Along, Call, Dims, Row, Rule, split_factors, stored


@dataclass(frozen=True)
class Decision:
    """The layouts in which a call runs: one spec per operand, one per result."""

    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[DTensorSpec, ...]

    def fits(self, specs: tuple[DTensorSpec, ...]) -> bool:
        """True if the operands can stay as they are."""
        return self.inputs == specs


@dataclass(frozen=True)
class _Leader:
    """The operand whose cuts of a factor the others follow."""

    axes: tuple[int, ...]
    cuts: Cuts


def decide(rule: Rule, call: Call, written: int | None = None) -> Decision:
    """Choose the layouts for a call. Operand `written` keeps its layout if any row allows it."""
    if rule.ignores:
        return _by_example(rule, call)
    topology = call.specs[0].topology
    rule, specs, unfit = _taken_apart(rule, call)
    choice = _Choice(rule, specs, call.results, written, unfit)
    chosen = [choice.next_row(axis, count) for axis, count in enumerate(topology.shape)]
    cuts = _factor_cuts(rule, topology, chosen, choice.leaders)
    ins, outs = rule.apart or ([None] * len(specs), [None] * len(call.results))
    inputs = tuple(
        spec_for(topology, [row.inputs[i] for row in chosen], dims, spec.meta, cuts, groups)
        for i, (spec, dims, groups) in enumerate(zip(call.specs, rule.inputs, ins, strict=True))
    )
    outputs = tuple(
        spec_for(topology, [row.outputs[i] for row in chosen], dims, meta, cuts, groups)
        for i, (meta, dims, groups) in enumerate(zip(call.results, rule.outputs, outs, strict=True))
    )
    return Decision(inputs, outputs)


def _taken_apart(rule: Rule, call: Call) -> tuple[Rule, tuple[DTensorSpec, ...], frozenset[int]]:
    """The rule and the operands' layouts on split dims, where every rank holds one box.

    The last result has the operands that cannot be split like this. They must move; their layouts
    are given as they will be after the move.
    """
    if rule.apart is None:
        if all(spec.groups is None for spec in call.laid):
            return rule, call.specs, frozenset()
        rule = split_factors(rule, call)
    if rule.apart is None:
        unfit = (i for i, spec in enumerate(call.laid) if spec.groups is not None)
        return rule, call.specs, frozenset(unfit)
    found = [split_dims(spec, each) for spec, each in zip(call.laid, rule.apart[0], strict=True)]
    specs = tuple(
        assumed(spec, each) if fine is None else fine
        for fine, spec, each in zip(found, call.specs, rule.apart[0], strict=True)
    )
    return rule, specs, frozenset(i for i, fine in enumerate(found) if fine is None)


def _by_example(rule: Rule, call: Call) -> Decision:
    """Operands that are not read stay; the results take the shards of dims that the first one
    shares with them."""
    shared = [at is not None for at in rule.inputs[0]]
    alike = all(shared) and all(call.shape(0) == meta.shape for meta in call.results)
    example = call.laid[0] if alike else call.specs[0]
    places: list[Placement] = []
    for place in example.placements:
        kept = isinstance(place, Shard) and shared[place.dim]
        places.append(place if kept else Replicate())
    cuts = example.cuts
    if not alike and cuts is not None:
        same = len(call.results[0].shape) == len(shared)
        pairs = zip(cuts, shared, strict=True)
        cuts = tuple(own if kept else None for own, kept in pairs) if same else None
    outputs = tuple(DTensorSpec(example.topology, places, meta, cuts=cuts) for meta in call.results)
    return Decision(call.laid, outputs)


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


def _is_product(rule: Rule) -> bool:
    """True if two operands share a factor that is summed, as in a matrix product."""
    names = [{at.factor for at in dims if at is not None} for dims in rule.inputs]
    kept = {at.factor for dims in rule.outputs for at in dims if at is not None}
    return any((a & b) - kept for a, b in combinations(names, 2))


def _to_factor(at: Along, cuts: Cuts) -> Cuts | None:
    return cuts if at.link is None else at.link.to_factor(cuts)


class _Choice:
    """The choice of a row for one axis after another, with the sizes that the axes before leave."""

    def __init__(
        self,
        rule: Rule,
        specs: tuple[DTensorSpec, ...],
        results: tuple[TensorMeta, ...],
        written: int | None,
        unfit: frozenset[int],
    ) -> None:
        self.rule = rule
        self.specs = specs
        self.written = written
        self.unfit = unfit
        self.leaders = _leaders(rule, specs, written)
        self.sizes = [stored(spec.meta) * spec.dtype.itemsize for spec in specs]
        self.results = [prod(meta.shape) * meta.dtype.itemsize for meta in results]
        self.counts = [stored(spec.meta) for spec in specs], [stored(meta) for meta in results]

    def next_row(self, axis: int, count: int) -> Row:
        """The row for `axis`: one that fits, or else the cheapest."""
        self.held = [spec.placements[axis] for spec in self.specs]
        rows, operands = self._allowed(), range(len(self.specs))
        fitting = (row for row in rows if all(self._fits(axis, row, i) for i in operands))
        row = next(fitting, None) or self._reduced_into(axis, rows)
        if row is None:
            row = min(rows, key=lambda row: self._price(axis, count, row))
        for tell in choosers:
            tell(axis, rows, [self._price(axis, count, each) for each in rows], row)
        for values, places in ((self.sizes, row.inputs), (self.results, row.outputs)):
            for index, place in enumerate(places):
                if place.is_shard():
                    values[index] //= count
        return row

    def _reduced_into(self, axis: int, rows: tuple[Row, ...]) -> Row | None:
        """The row in which Partial operands are reduced into the layout of one of the same dims.

        None if there is no such operand. No price enters, so it is the same for all sizes.
        """
        pending = [i for i, have in enumerate(self.held) if have.is_partial()]
        staying = [i for i, have in enumerate(self.held) if not have.is_partial()]
        dims = self.rule.inputs
        if not pending or not staying or any(dims[i] != dims[0] for i in range(len(dims))):
            return None
        reduced = (
            row
            for row in rows
            if all(self._fits(axis, row, i) for i in staying)
            and not any(row.inputs[i].is_partial() for i in pending)
        )
        return next(reduced, None)

    def _allowed(self) -> tuple[Row, ...]:
        """The rows in which a written operand holds the result; if possible, where it is now."""
        rows, written = self.rule.rows, self.written
        if any(spec.sums for spec in self.specs):
            rows = tuple(row for row in rows if not self._grows(row))
            if written is None:
                rows = tuple(row for row in rows if not self._makes_partial(row))
        if written is None:
            return rows
        place = self.held[written]
        rows = tuple(row for row in rows if row.inputs[written] is row.outputs[0])
        return tuple(row for row in rows if row.inputs[written] is place) or rows

    def _grows(self, row: Row) -> bool:
        """True if the row would make a Partial more than twice as large: it is reduced first.

        Matrix products are exempt: a low-rank adapter widens a Partial that is then added to the
        Partial of the layer it adapts, and both are reduced at once.
        """
        if _is_product(self.rule):
            return False
        pending = [n for n, p in zip(self.counts[0], row.inputs, strict=True) if p.is_partial()]
        made = [n for n, p in zip(self.counts[1], row.outputs, strict=True) if p.is_partial()]
        return bool(pending) and sum(made) > 2 * sum(pending)

    def _makes_partial(self, row: Row) -> bool:
        """True if the row would make an operand Partial that is as large as a Partial one.

        The Partial operand is reduced into the layout of the other instead. A bias is smaller.
        """
        held, sizes = self.held, self.counts[0]
        pending = [n for n, have in zip(sizes, held, strict=True) if have.is_partial()]
        return bool(pending) and any(
            want.is_partial() and not have.is_partial() and n >= max(pending)
            for n, have, want in zip(sizes, held, row.inputs, strict=True)
        )

    def _fits(self, axis: int, row: Row, operand: int) -> bool:
        """True if an operand can stay as it is on `axis`: its placement, and where it is cut."""
        spec = self.specs[operand]
        place = spec.placements[axis]
        if row.inputs[operand] is not place:
            return False
        if not isinstance(place, Shard):
            return True
        if operand in self.unfit:
            return False
        at = self.rule.inputs[operand][place.dim]
        leader = self.leaders.get(at.factor) if at is not None else None
        if at is None or leader is None:
            return False
        mine = _to_factor(at, spec.dim_cuts[place.dim])
        if mine is None:  # cuts that follow from the factor's, as those of a slice do
            assert at.link is not None
            counts = tuple(spec.topology.shape[a] for a in leader.axes)
            same = at.link.from_factor(leader.cuts, counts) == spec.dim_cuts[place.dim]
            return same and leader.axes == spec.dim_axes[place.dim]
        return leader.axes != spec.dim_axes[place.dim] or leader.cuts == mine

    def _price(self, axis: int, count: int, row: Row) -> int:
        """The price of a row: moving the operands that do not fit, and undoing what it leaves.

        - A Partial result must be reduced. A sharded one must be gathered if no operand was
          sharded: else a Partial would be scattered for each user instead of reduced once.
        - A Partial operand that is made whole pays what it owed, because that serves all users.
        """
        link = self.specs[0].topology.links[axis]
        total = 0
        for operand, spec in enumerate(self.specs):
            if self._fits(axis, row, operand):
                continue
            have, want = spec.placements[axis], row.inputs[operand]
            nbytes = self.sizes[operand] // (count if have.is_shard() else 1)
            if have is want:
                total += link.price((count - 1) * nbytes // count)
            else:
                total += move_cost(have, want, count, nbytes, link)
                if have.is_partial() and want.is_replicate():
                    total -= debt(True, count, nbytes, link)
        partial = sharded = 0
        passes_on = False
        for place, nbytes in zip(row.outputs, self.results, strict=True):
            if place.is_partial():
                partial += nbytes
                passes_on |= place in self.held
            elif place.is_shard() and not any(isinstance(have, Shard) for have in self.held):
                sharded += nbytes
        if passes_on:  # a Partial operand is reduced anyway, now or later
            pairs = zip(self.sizes, self.held, strict=True)
            partial = max(partial - sum(n for n, have in pairs if have.is_partial()), 0)
        return total + debt(True, count, partial, link) + debt(False, count, sharded, link)


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
    groups: Groups | None = None,
) -> DTensorSpec:
    """The spec of a tensor: its placements, and the cuts of the factors that its dims walk along.

    With `groups` the dims are those of the tensor split like this.
    """
    if groups is not None:
        fine = spec_for(topology, places, dims, fine_meta(meta, groups), cuts)
        return merge_dims(fine, groups, meta)
    own: list[Cuts | None] = [None] * len(dims)
    for place in places:
        if isinstance(place, Shard):
            at = dims[place.dim]
            assert at is not None
            sizes, counts = cuts[at.factor]
            own[place.dim] = sizes if at.link is None else at.link.from_factor(sizes, counts)
    return DTensorSpec(topology, places, meta, cuts=own if any(own) else None)
