"""How x[i, :, j] and x[i, :, j] = values are laid out, so that several indices are one.

The local tensors of `x` one after another are one vector, of rows where dims are not indexed. The
indices together say where in it an element is: they are one index of its first dim, whichever dims
are sharded and over however many axes. All here follows from specs alone, so that every rank finds
the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from ..dispatch.decide import decide
from ..layout.cost import debt
from ..layout.geometry import Cuts, all_coords, contiguous_stride
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..redistribute import steps_between
from ..rules import Call, family_of
from .posting import short

__all__ = ["Given", "Laid", "by_rule", "layouts_of", "moving", "owning_axes", "picks", "writes"]

Specs = tuple[DTensorSpec | None, ...]


class Given(NamedTuple):
    """A call by indices: its tensors, and whether what it writes is added up."""

    x: DTensorSpec
    indices: Specs
    values: DTensorSpec | None = None
    adds: bool = False

    @property
    def used(self) -> list[int]:
        """The indexed dims."""
        return [dim for dim, each in enumerate(self.indices) if each is not None]

    @property
    def free(self) -> list[int]:
        """The dims that are not indexed."""
        used = self.used
        return [dim for dim in range(self.x.ndim) if dim not in used]

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the indices together."""
        return tuple(torch.broadcast_shapes(*(i.shape for i in self.indices if i is not None)))

    @property
    def before(self) -> int:
        """How many dims of what is picked stand before those of the indices: none, if the indexed
        dims are no neighbours."""
        used = self.used
        return used[0] if used[-1] - used[0] == len(used) - 1 else 0

    @property
    def repeats(self) -> bool:
        """Whether the same is written into all of several places."""
        if self.values is None:
            return False
        stop = self.values.ndim - (len(self.free) - self.before)
        own = self.values.shape[max(stop - len(self.lead), 0) : max(stop, 0)]
        return prod(own) == 1 < prod(self.lead)

    @property
    def ordered(self) -> bool:
        """Whether of what is written into one place the last counts."""
        return self.values is not None and not self.adds


class Laid(NamedTuple):
    """The layouts in which a call by indices is a call by one.

    They are those of the tensor, of what has the shape of all indices together, of each index and
    of the values; then of the tensor as a vector, and of what is picked or written.
    """

    x: DTensorSpec
    lead: DTensorSpec
    indices: Specs
    values: DTensorSpec | None
    vector: DTensorSpec
    picked: DTensorSpec


def _like(full: DTensorSpec, own: DTensorSpec) -> DTensorSpec:
    """The layout of a tensor that is repeated to have the shape of `full`, so that each rank has
    what it repeats."""
    shift = full.ndim - own.ndim
    same = [size == full.shape[dim + shift] for dim, size in enumerate(own.shape)]
    places: list[Placement] = [Replicate()] * len(full.placements)
    for axis, place in enumerate(full.placements):
        if isinstance(place, Shard) and place.dim >= shift and same[place.dim - shift]:
            places[axis] = Shard(place.dim - shift)
    cuts = (full.cuts or (None,) * full.ndim)[shift:]
    return own.with_placements(
        places, [each if kept else None for each, kept in zip(cuts, same, strict=True)]
    )


def _cut(spec: DTensorSpec, places: Sequence[Placement]) -> DTensorSpec:
    """A tensor in other shards, cut where it is now in dims that the same axes shard."""
    found = spec.with_placements(places)
    if spec.cuts is None:
        return found
    pairs = zip(spec.cuts, spec.dim_axes, found.dim_axes, strict=True)
    return spec.with_placements(places, [own if old == new else None for own, old, new in pairs])


def _roomy(shape: Sequence[int], dims: Sequence[int], count: int) -> int:
    """The first of `dims` that has a place for each rank, else the largest."""
    fitting = (dim for dim in dims if shape[dim] >= count)
    return next(fitting, max(dims, key=lambda dim: shape[dim]))


def _leads(given: Given) -> Iterator[DTensorSpec]:
    """How what has the shape of all indices may lie: as one of them, or as the values.

    Ranks that share a place and hold other parts of its row must know the same indices.
    """
    lead = given.lead
    meta = TensorMeta(lead, contiguous_stride(lead), torch.int64)
    # Where the last dim of a tensor stands among those of the indices, counted behind it.
    ends = {each: len(lead) for each in given.indices if each is not None}
    if given.values is not None:
        ends[given.values] = len(lead) + len(given.free) - given.before
    apart = {axis for dim in given.free for axis in given.x.dim_axes[dim]}
    for each, end in ends.items():
        places: list[Placement] = [Replicate()] * len(each.placements)
        cuts: list[Cuts | None] = [None] * len(lead)
        for axis, place in enumerate(each.placements):
            if not isinstance(place, Shard) or axis in apart:
                continue
            dim = place.dim + end - each.ndim
            if 0 <= dim < len(lead) and each.shape[place.dim] == lead[dim]:
                places[axis] = Shard(dim)
                if not apart.intersection(each.dim_axes[place.dim]):
                    cuts[dim] = each.dim_cuts[place.dim]
        yield DTensorSpec(given.x.topology, places, meta, cuts=cuts)


def _layouts(given: Given) -> Iterator[Laid]:
    """Layouts in which the indices are in shards over the axes that the indexed dims are in shards
    over."""
    x, sizes = given.x, given.x.topology.shape
    for lead in _leads(given):
        places, mine = list(lead.placements), list(x.placements)
        for axis, (own, place) in enumerate(zip(x.placements, lead.placements, strict=True)):
            if isinstance(own, Shard) and own.dim in given.used and not place.is_shard():
                dims = range(1 if given.ordered else lead.ndim)
                places[axis] = Shard(_roomy(lead.shape, dims, sizes[axis]))
            elif place.is_shard() and own.is_replicate():
                mine[axis] = Shard(_roomy(x.shape, given.used, sizes[axis]))
        index = _cut(lead, places)
        # What the ranks write comes in the order of the indices, if these are in shards of their
        # first dim alone.
        if index.is_sharded() and not (given.ordered and any(index.dim_axes[1:])):
            yield _laid(given, _cut(x, mine), index)


def _laid(given: Given, x: DTensorSpec, index: DTensorSpec) -> Laid:
    indices = tuple(None if each is None else _like(index, each) for each in given.indices)
    picked, values = _picked(given, x, index), None
    if given.values is not None:
        whole = index.with_placements(default_placements(index.topology))
        full = _picked(given, x, whole) if given.repeats else picked
        values = _like(full, given.values)
    return Laid(x, index, indices, values, _vector(given, x), picked)


def _picked(given: Given, x: DTensorSpec, index: DTensorSpec) -> DTensorSpec:
    """The layout of what is picked or written: the dims of the indices among those that are not
    indexed."""
    at, free = given.before, given.free
    shape = [x.shape[dim] for dim in free]
    shape[at:at] = index.shape
    cuts: list[Cuts | None] = [None if x.cuts is None else x.cuts[dim] for dim in free]
    cuts[at:at] = index.cuts or [None] * index.ndim
    places: list[Placement] = [Replicate()] * len(x.placements)
    for axis, (own, place) in enumerate(zip(x.placements, index.placements, strict=True)):
        if isinstance(place, Shard):
            places[axis] = Shard(at + place.dim)
        elif isinstance(own, Shard) and own.dim in free:
            dim = free.index(own.dim)
            places[axis] = Shard(dim if dim < at else dim + index.ndim)
    meta = TensorMeta(tuple(shape), contiguous_stride(shape), x.dtype)
    return DTensorSpec(x.topology, places, meta, cuts=cuts)


def owning_axes(given: Given, x: DTensorSpec) -> list[int]:
    """The axes that shard indexed dims: who owns a place is counted over them."""
    return sorted(axis for dim in given.used for axis in x.dim_axes[dim])


def _vector(given: Given, x: DTensorSpec) -> DTensorSpec:
    """The local tensors one after another: rows of what is not indexed."""
    free, axes = given.free, owning_axes(given, x)
    cuts = []
    for piece in all_coords(tuple(x.topology.shape[axis] for axis in axes)):
        at = dict(zip(axes, piece, strict=True))
        local = x.local_shape(tuple(at.get(axis, 0) for axis in range(x.topology.ndim)))
        cuts.append(prod(local[dim] for dim in given.used))
    places = [
        Shard(1 + free.index(place.dim) if place.dim in free else 0)
        if isinstance(place, Shard)
        else place
        for place in x.placements
    ]
    shape = (sum(cuts), *(x.shape[dim] for dim in free))
    meta = TensorMeta(shape, contiguous_stride(shape), x.dtype)
    rest = [None if x.cuts is None else x.cuts[dim] for dim in free]
    return DTensorSpec(x.topology, places, meta, cuts=[tuple(cuts), *rest])


# --- when it is less ---------------------------------------------------------------------------


def moving(src: DTensorSpec | None, dst: DTensorSpec | None) -> int:
    """The price of another layout."""
    if src is None or dst is None:
        return 0
    return sum(step.price(src.dtype.itemsize) for step in steps_between(src, dst))


def _price(given: Given, laid: Laid) -> int:
    """What it costs to lay the operands out, to learn who gets how much, and to exchange that."""
    index, (_, *rest) = laid.lead, laid.vector.largest_shape
    count = index.num_shards
    place, row = short(prod(given.x.shape)).itemsize, prod(rest) * given.x.dtype.itemsize
    sent = place if given.repeats else place + row
    widths = [place, row] if given.values is None else [sent]
    cuts = laid.vector.dim_cuts[0]  # as many go to an owner as it has places
    each = -(-prod(index.shape) * max(cuts) // sum(cuts))
    posts = [8 * count * (count + 2 * len(given.used)), *(each * width for width in widths)]
    links = [index.topology.links[axis] for axis in index.slot_axes]
    moves = [(given.x, laid.x), (given.values, laid.values)]
    moves += zip(given.indices, laid.indices, strict=True)
    return sum(max(link.price(nbytes) for link in links) for nbytes in posts) + sum(
        moving(src, dst) for src, dst in moves
    )


@lru_cache(maxsize=4096)
def layouts_of(given: Given) -> tuple[int, Laid] | None:
    """The price of a call by one index, and the layouts that cost least; None if there are none."""
    specs = [each for each in given.indices if each is not None]
    if not specs or given.x.sums or any(i.dtype not in (torch.int64, torch.int32) for i in specs):
        return None
    if not given.lead or not prod(given.lead) or not prod(given.x.shape):
        return None
    priced = [(_price(given, each), each) for each in _layouts(given)]
    return min(priced, key=lambda pair: pair[0], default=None)


def by_rule(call: Call) -> int:
    """What a call costs where operands move to fit a row, and what is left pending is reduced."""
    family, mesh = family_of(call.op), call.specs[0].topology
    assert family is not None
    decision = decide(family(call), call, 0 if call.op._schema.is_mutable else None)
    price = sum(moving(src, dst) for src, dst in zip(call.specs, decision.inputs, strict=True))
    for out in decision.outputs:
        nbytes = prod(out.largest_shape) * out.dtype.itemsize
        for axis in out.sums:
            if not any(spec.placements[axis].is_partial() for spec in call.specs):
                price += debt(True, mesh.shape[axis], nbytes, mesh.links[axis])
                nbytes //= mesh.shape[axis]  # the next axis reduces a share of it
    return price


def _found(call: Call) -> tuple[Given, Laid] | None:
    """A call by indices and its layouts, if they cost less than a row."""
    specs, values = call.specs, call.get("values")
    indices = tuple(None if each is None else specs[each] for each in call.get("indices"))
    adds = bool(call.get("accumulate"))
    given = Given(specs[0], indices, None if values is None else specs[values], adds)
    found = layouts_of(given)
    return None if found is None or found[0] >= by_rule(call) else (given, found[1])


def picks(call: Call) -> bool:
    """Whether a call picks by indices, and what it picks comes from the owners."""
    return _found(call) is not None


def writes(call: Call) -> bool:
    """Whether a call writes by indices, and what it writes goes to the owners.

    A tensor that is written in place keeps its layout.
    """
    found = _found(call)
    return found is not None and not (call.op._schema.is_mutable and found[1].x is not found[0].x)
