"""Bags of rows, of which each rank has some: few indices move, and the rows of a rank's own bags.

No bag is taken apart. Each largest element comes with the index of its row, and which it is of
equal ones, or next to NaN, depends on the order in the bag; a rank runs the operator on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch

from ..layout.cost import debt
from ..layout.geometry import Cuts, contiguous_stride
from ..layout.mesh import Coord
from ..layout.placement import Partial, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..storage.ragged import as_dtensor, gather_plain
from ..storage.wrapper import wrap
from .elements import local, pick
from .places import Given, layouts_of, moving
from .posting import Range
from .shards import columns, gathered, relaid, told

__all__ = ["bag_gradient", "factor_gradient", "in_bags", "largest_gradient"]

aten = torch.ops.aten
_SUM, _MEAN, _MAX = 0, 1, 2


# --- when it is less ---------------------------------------------------------------------------


def _axes(rows: DTensorSpec, *others: DTensorSpec) -> list[int]:
    """The axes that bags can be in shards over: those of rows, or of indices of whole rows."""
    return [
        axis
        for axis, place in enumerate(rows.placements)
        if place.is_shard(0)
        or (not place.is_shard() and any(each.placements[axis].is_shard() for each in others))
    ]


def _over(spec: DTensorSpec, axes: Sequence[int], cuts: Cuts | None = None) -> DTensorSpec:
    """A vector in shards over `axes`."""
    places = [Shard(0) if axis in axes else Replicate() for axis in range(spec.topology.ndim)]
    return spec.with_placements(places, [cuts])


def _asking(weight: DTensorSpec, indices: DTensorSpec) -> int | None:
    """What it costs to ask for the rows of indices; None if to make all rows whole is less."""
    found = layouts_of(Given(weight, (indices,)))
    return None if found is None or found[0] >= _whole_rows(weight) else found[0]


def _whole_rows(weight: DTensorSpec) -> int:
    places = [Replicate() if place.is_shard(0) else place for place in weight.placements]
    cuts = None if weight.cuts is None else [None, weight.cuts[1]]
    return moving(weight, weight.with_placements(places, cuts))


def _pays(weight: DTensorSpec, others: Sequence[DTensorSpec], mode: int) -> bool:
    """Whether it is less to give each rank some of the bags than to give it all of them, or for
    sums its own rows of all of them."""
    indices, offsets, *_ = others
    axes, mesh = _axes(weight, *others), weight.topology
    if not axes or 0 in (*indices.shape, *offsets.shape, *weight.shape):
        return False
    even = _over(indices, axes)
    asking, rows = _asking(weight, even), _whole_rows(weight)
    sizes = [8 * 4 * even.num_shards]
    if asking is None:
        sizes.append(8 * 2 * even.num_shards)
    for each in (indices, *others[2:]):
        if each.is_sharded():  # as if no index were where its bag is
            sizes.append(-(-each.shape[0] // even.num_shards) * each.dtype.itemsize)
    links = [mesh.links[axis] for axis in axes]
    own = sum(max(link.price(nbytes) for link in links) for nbytes in sizes)
    wholes = [each.with_placements(default_placements(mesh)) for each in others]
    every = sum(moving(*pair) for pair in zip(others, wholes, strict=True))
    if mode == _MAX:
        every += rows
    else:
        nbytes = offsets.shape[0] * weight.shape[1] * weight.dtype.itemsize
        pending = [axis for axis in axes if weight.placements[axis].is_shard(0)]
        every += sum(debt(True, mesh.shape[axis], nbytes, mesh.links[axis]) for axis in pending)
    return own + (rows if asking is None else asking) < every


# --- bags in shards ----------------------------------------------------------------------------


class _Bags(NamedTuple):
    """Where the bags of each rank start, and the indices in them."""

    starts: Any
    indices: Any

    @property
    def kind(self) -> torch.dtype:
        """What the operator makes of two kinds of integers."""
        return torch.promote_types(self.starts.dtype, self.indices.dtype)

    def first(self, coord: Coord) -> tuple[int, int]:
        """The first bag of a rank and its first index."""
        starts, indices = (each._spec.box(coord)[0][0] for each in self)
        return starts, indices

    def here(self, coord: Coord) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices of a rank, and where among them its bags start."""
        index, starts = local(self.indices, coord), local(self.starts, coord)
        return index.to(self.kind), starts.to(self.kind) - self.first(coord)[1]

    def numbers(self, coord: Coord) -> torch.Tensor:
        """The bag of each index of a rank, counted from its first."""
        index, starts = self.here(coord)
        places = torch.arange(len(index), device=index.device)
        return torch.searchsorted(starts.to(torch.int64), places, right=True) - 1

    def with_indices(self, op: Any, x: Any) -> Any:
        """What has a place for each index, in the shards of the indices."""
        like = self.indices._spec
        return relaid(op, x, x._spec.with_placements(like.placements, [like.dim_cuts[0]]))


def _bags(
    op: Any, axes: Sequence[int], indices: Any, offsets: Any, include_last: bool
) -> _Bags | None:
    """Bags in shards over `axes`; None if some offset is wrong, of which the operator itself
    tells."""
    wrong = False
    if include_last:  # it only says where the indices end
        wrong = int(gather_plain(op, offsets[-1:])) > indices.shape[0]
        offsets = offsets[:-1]
    offsets = relaid(op, offsets, _over(offsets._spec, axes))
    facts = []
    for part in offsets._locals:
        ends = torch.cat([part[:1], part[-1:]]) if len(part) else part.new_zeros(2)
        rest = torch.stack([(part.diff() < 0).any(), ends.new_tensor(len(part)) > 0])
        facts.append(torch.cat([ends, rest]).to(torch.int64))
    edges = [indices.shape[0]]
    for first, last, falls, some in reversed(told(op, offsets._spec, facts)):
        wrong = wrong or bool(falls) or last > edges[-1]
        edges.append(first if some else edges[-1])
    if wrong or edges[-1]:
        return None
    cuts = tuple(b - a for a, b in pairwise(reversed(edges)))
    indices = relaid(op, indices, _over(indices._spec, axes, cuts))
    return _Bags(offsets, indices)


def _check(op: Any, indices: Any, size: int) -> None:
    """Let all ranks know of an index that is out of range."""
    limits = Range(indices._locals, 0, size, wraps=False)
    table = told(op, indices._spec, limits.ends())
    limits.check(min(row[0] for row in table), max(row[1] for row in table))


def _rows(spec: DTensorSpec, axes: Sequence[int]) -> DTensorSpec:
    """Rows in shards over `axes`, their columns as they are."""
    places = [Shard(0) if axis in axes else place for axis, place in enumerate(spec.placements)]
    return spec.with_placements(places, None if spec.cuts is None else [None, spec.cuts[1]])


def _of_size(spec: DTensorSpec, count: int, cuts: Cuts | None = None) -> DTensorSpec:
    """So many rows, in the shards of others."""
    shape = (count, *spec.shape[1:])
    meta = TensorMeta(shape, contiguous_stride(shape), spec.dtype)
    rest = [None] * (spec.ndim - 1) if spec.cuts is None else spec.cuts[1:]
    return DTensorSpec(spec.topology, spec.placements, meta, cuts=[cuts, *rest])


def _of_integers(spec: DTensorSpec, kind: torch.dtype) -> DTensorSpec:
    """Integers in the shards of others."""
    return spec.with_meta(TensorMeta(spec.meta.shape, contiguous_stride(spec.shape), kind))


def in_bags(
    op: Any,
    weight: Any,
    others: Sequence[Any],
    options: tuple[Any, ...],
    include_last: bool,
    padding: int,
) -> tuple[Any, ...] | None:
    """What `op` gives, in shards of the bags; None if that is more to move than by other ways.

    `others` are the indices, the offsets and perhaps a weight for each index.
    """
    specs = [each._spec for each in others]
    mode = options[1]
    if not _pays(weight._spec, specs, mode):
        return None
    indices, offsets, *factors = others
    axes = _axes(weight._spec, *specs)
    asks = _asking(weight._spec, _over(specs[0], axes)) is not None
    bags = _bags(op, axes, indices, offsets, include_last)
    if bags is None:
        return None
    factors = [bags.with_indices(op, each) for each in factors]
    if asks:
        rows = pick(op, weight, [bags.indices], wraps=False)
    else:
        _check(op, indices, weight.shape[0])
        rows = gathered(op, weight, [0])
    out = _of_size(_rows(weight._spec, axes), bags.starts.shape[0])
    made = [_local(op, rows, bags, factors, asks, options, padding, c) for c in out.slots]
    return _returned(op, weight, bags, out, made, (*options, None, include_last, padding))


def _local(
    op: Any,
    rows: Any,
    bags: _Bags,
    factors: Sequence[Any],
    asked: bool,
    options: tuple[Any, ...],
    padding: int,
    coord: Coord,
) -> tuple[torch.Tensor, ...]:
    """The bags of a rank, their sizes and chosen rows. If rows were asked for there is one for each
    index."""
    table, (index, starts) = local(rows, coord), bags.here(coord)
    width, picks = table.shape[1], index
    if not len(starts):
        rest = (0, width) if options[1] == _MAX else (0,)
        return table.new_empty(0, width), index.new_empty(0), index.new_empty(rest)
    if asked:
        picks = torch.arange(len(index), dtype=index.dtype, device=index.device)
        skipped = (index == padding).nonzero().flatten()
        # What is left out has the place of the first that is left out.
        padding = int(skipped[0]) if len(skipped) else -1
        picks = picks.index_fill_(0, skipped, padding)
        # The empty table of empty bags would be asked for a row.
        table, index = (t if len(t) else t.new_zeros(1, *t.shape[1:]) for t in (table, index))
    factor = local(factors[0], coord) if factors else None
    found, _, sizes, chosen = op(table, picks, starts, *options, factor, False, padding)
    if asked and options[1] == _MAX:
        chosen = torch.where(sizes.unsqueeze(1) > 0, index[chosen], 0)
    return found, sizes, chosen


def _returned(
    op: Any,
    weight: Any,
    bags: _Bags,
    out: DTensorSpec,
    made: Sequence[tuple[torch.Tensor, ...]],
    options: tuple[Any, ...],
) -> tuple[Any, ...]:
    """The results of `op`: what it does not tell of a small call it does not tell of this one."""
    parts, sizes, chosen = columns(made, 3)
    mode, include_last = options[1], options[-2]
    one = bags.indices._locals[0].new_zeros(1, dtype=bags.kind)
    ends = torch.cat([one, one + 1]) if include_last else one
    table = weight._locals[0].new_zeros(1, 1)
    _, known, size, _ = op(table, one, ends, *options)
    mesh, each = out.topology, _of_integers(bags.indices._spec, bags.kind)
    numbers: Any = as_dtensor(one.new_empty(0), mesh)
    if len(known):
        own = [bags.numbers(c) + bags.first(c)[0] for c in each.slots]
        numbers = wrap(each, tuple(part.to(bags.kind) for part in own))
    result = wrap(out, parts)
    if mode == _SUM:
        count = bags.starts.shape[0] + len(size) - 1
        return result, numbers, *(as_dtensor(one.new_zeros(count), mesh) for _ in range(2))
    like = _of_integers(bags.starts._spec, bags.kind)
    at = _of_integers(out, bags.kind) if mode == _MAX else like
    rest = [
        wrap(spec, tuple(own[out.slot(coord)] for coord in spec.slots))
        for spec, own in ((like, sizes), (at, chosen))
    ]
    return result, numbers, *rest


# --- gradients ---------------------------------------------------------------------------------


def largest_gradient(grad: Any, chosen: Any, sizes: Any, rows: int) -> Any:
    """The gradient of the table: each largest element has that of its bag, if the bag has any."""
    grad = torch.where(sizes.unsqueeze(1) > 0, grad, 0)
    made = grad.new_zeros(rows, grad.shape[1])
    if any(place.is_shard(1) for place in grad._spec.placements):
        return aten.scatter_add.default(made, 0, chosen, grad)
    places = torch.arange(grad.shape[1], device=grad.device)
    return aten.index_put.default(made, [chosen, places], grad, True)


def bag_gradient(
    op: Any, grad: Any, others: Sequence[Any], rows: int, mode: int, padding: int
) -> Any:
    """The gradient of the table for sums and means, of which each rank has some bags; None if bags
    are whole on every rank.

    `others` are the indices, the offsets and perhaps a weight for each index.
    """
    indices, offsets, *factors = others
    axes = _axes(grad._spec, *(each._spec for each in others))
    if not axes or not indices.shape[0] or not grad.numel():
        return None
    if not _spreads(grad._spec, [each._spec for each in others], axes):
        return None
    bags = _bags(op, axes, indices, offsets, offsets.shape[0] > grad.shape[0])
    if bags is None:
        return None
    grad = relaid(op, grad, _rows(grad._spec, axes))
    factors = [bags.with_indices(op, each) for each in factors]
    spec, cuts = grad._spec, bags.indices._spec.dim_cuts[0]
    parts = []
    for coord, part in zip(spec.slots, grad._locals, strict=True):
        number, (own, starts) = bags.numbers(coord), bags.here(coord)
        kept = own != padding
        if mode == _MEAN:
            part = part / torch.bincount(number[kept], minlength=len(starts)).clamp_(min=1)[:, None]
        mine = part.to(grad.dtype)[number]
        for each in factors:
            mine = mine * local(each, coord).unsqueeze(1)
        parts.append(mine.masked_fill(~kept.unsqueeze(1), 0))
    sent = wrap(_of_size(spec, indices.shape[0], cuts), tuple(parts))
    made = sent.new_zeros(rows, grad.shape[1])
    return aten.index_put.default(made, [bags.indices], sent, True)


def _spreads(grad: DTensorSpec, others: Sequence[DTensorSpec], axes: Sequence[int]) -> bool:
    """Whether a row for each index, from its bag to its place, is less than to make all bags
    whole."""
    mesh, given = grad.topology, (grad, *others)
    every = sum(moving(each, each.with_placements(default_placements(mesh))) for each in given)
    count = prod(mesh.shape[axis] for axis in axes)
    places, width = others[0].shape[0], grad.shape[1] * grad.dtype.itemsize + 4
    sent = places * width // count * (count - 1) // count
    tables = 8 * 4 * count + 8 * count * (count + 2)
    links = [mesh.links[axis] for axis in axes]
    return sum(max(link.price(n) for link in links) for n in (tables, sent)) < every


def factor_gradient(
    op: Any, grad: Any, weight: Any, indices: Any, offsets: Any, padding: int
) -> Any:
    """The gradient of a weight for each index, in shards of the bags: its row times that of its
    bag; None if bags are whole on every rank."""
    axes = _axes(weight._spec, indices._spec, offsets._spec)
    if not axes or 0 in (*indices.shape, *grad.shape, *weight.shape):
        return None
    bags = _bags(op, axes, indices, offsets, offsets.shape[0] > grad.shape[0])
    if bags is None:
        return None
    asks = _asking(weight._spec, _over(indices._spec, axes)) is not None
    rows = pick(op, weight, [bags.indices], wraps=False) if asks else gathered(op, weight, [0])
    goal = _rows(weight._spec, axes)
    cuts = None if goal.cuts is None else [None, goal.cuts[1]]
    grad = relaid(op, grad, grad._spec.with_placements(goal.placements, cuts))
    parts = []
    for coord, part in zip(grad._spec.slots, grad._locals, strict=True):
        table, (index, _) = local(rows, coord), bags.here(coord)
        made = ((table if asks else table[index]) * part[bags.numbers(coord)]).sum(1)
        parts.append(made.masked_fill(index == padding, 0))
    like = bags.indices._spec
    places = [
        Partial() if each.is_shard(1) else place
        for each, place in zip(goal.placements, like.placements, strict=True)
    ]
    meta = TensorMeta(like.meta.shape, (1,), grad.dtype)
    return wrap(DTensorSpec(like.topology, places, meta, cuts=[like.dim_cuts[0]]), tuple(parts))
