"""The largest elements of bags of rows: each rank has some of the bags, and asks for their rows.

Each largest element comes with the index of its row, and which it is of equal ones, or next to NaN,
depends on the order in the bag. So no bag is taken apart: a rank runs the operator on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ..geometry import Cuts, contiguous_stride
from ..mesh import Coord
from ..placement import Replicate, Shard
from ..ragged import whole
from ..spec import DTensorSpec, TensorMeta, default_placements
from ..wrapper import wrap
from .elements import local, pick
from .places import Given, layouts_of, moving
from .posting import Range
from .shards import columns, gathered, relaid, told

__all__ = ["largest", "largest_backward"]

aten = torch.ops.aten


# --- when it is less ---------------------------------------------------------------------------


def _axes(weight: DTensorSpec, *others: DTensorSpec) -> list[int]:
    """The axes that bags can be in shards over: those of rows, or of indices of whole rows."""
    return [
        axis
        for axis, place in enumerate(weight.placements)
        if place.is_shard(0)
        or (place.is_replicate() and any(each.placements[axis].is_shard() for each in others))
    ]


def _vector(
    like: DTensorSpec, axes: Sequence[int], size: int, cuts: Cuts | None = None
) -> DTensorSpec:
    """The layout of `size` numbers in shards over `axes`."""
    places = [Shard(0) if axis in axes else Replicate() for axis in range(like.topology.ndim)]
    meta = TensorMeta((size,), (1,), like.dtype)
    return DTensorSpec(like.topology, places, meta, cuts=[cuts])


def _asking(weight: DTensorSpec, indices: DTensorSpec) -> int | None:
    """What it costs to ask for the rows of indices; None if to make all rows whole is less."""
    found = layouts_of(Given(weight, (indices,)))
    return None if found is None or found[0] >= _whole_rows(weight) else found[0]


def _whole_rows(weight: DTensorSpec) -> int:
    places = [Replicate() if place.is_shard(0) else place for place in weight.placements]
    cuts = None if weight.cuts is None else [None, weight.cuts[1]]
    return moving(weight, weight.with_placements(places, cuts))


def _pays(weight: DTensorSpec, indices: DTensorSpec, offsets: DTensorSpec) -> bool:
    """Whether it is less to give each rank some of the bags than to give it all of them."""
    axes, mesh = _axes(weight, indices, offsets), weight.topology
    if not axes or 0 in (*indices.shape, *offsets.shape, *weight.shape):
        return False
    even = _vector(indices, axes, indices.shape[0])
    asking, rows = _asking(weight, even), _whole_rows(weight)
    sizes = [8 * 4 * even.num_shards]
    if asking is None:
        sizes.append(8 * 2 * even.num_shards)
    if indices.is_sharded():  # as if no index were where its bag is
        sizes.append(-(-indices.shape[0] // even.num_shards) * indices.dtype.itemsize)
    links = [mesh.links[axis] for axis in axes]
    own = sum(max(link.price(nbytes) for link in links) for nbytes in sizes)
    whole = [each.with_placements(default_placements(mesh)) for each in (indices, offsets)]
    every = sum(moving(*pair) for pair in zip((indices, offsets), whole, strict=True))
    return own + (rows if asking is None else asking) < rows + every


# --- bags in shards ----------------------------------------------------------------------------


def _bags(
    op: Any, weight: Any, indices: Any, offsets: Any, include_last: bool
) -> tuple[Any, Any] | None:
    """Where the bags of each rank start, and the indices in them; None if some start is wrong, of
    which the operator itself tells."""
    axes = _axes(weight._spec, indices._spec, offsets._spec)
    wrong = False
    if include_last:  # it only says where the indices end
        wrong = int(whole(op, offsets[-1:])) > indices.shape[0]
        offsets = offsets[:-1]
    offsets = relaid(op, offsets, _vector(offsets._spec, axes, offsets.shape[0]))
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
    return offsets, relaid(op, indices, _vector(indices._spec, axes, indices.shape[0], cuts))


def _check(op: Any, indices: Any, size: int) -> None:
    """Let all ranks know of an index that is out of range."""
    limits = Range(indices._locals, 0, size, wraps=False)
    table = told(op, indices._spec, limits.ends())
    limits.check(min(row[0] for row in table), max(row[1] for row in table))


def largest(
    op: Any, weight: Any, indices: Any, offsets: Any, include_last: bool, options: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """What `op` gives for the largest elements, in shards of the bags; None if that is more to
    move than to make all whole."""
    if not _pays(weight._spec, indices._spec, offsets._spec):
        return None
    axes = _axes(weight._spec, indices._spec, offsets._spec)
    asks = _asking(weight._spec, _vector(indices._spec, axes, indices.shape[0])) is not None
    bags = _bags(op, weight, indices, offsets, include_last)
    if bags is None:
        return None
    starts, indices = bags
    if asks:
        rows = pick(op, weight, [indices], wraps=False)
    else:
        _check(op, indices, weight.shape[0])
        rows = gathered(op, weight, [0])
    out, kind = _layout(weight._spec, axes, starts.shape[0]), _integers(indices, starts)
    made = columns([_local(op, rows, starts, indices, asks, options, c) for c in out.slots], 4)
    specs = [
        out,
        *(
            each.with_meta(each.meta._replace(dtype=kind))
            for each in (indices._spec, starts._spec, out)
        ),
    ]
    return tuple(
        wrap(spec, tuple(parts[out.slot(coord)] for coord in spec.slots))
        for spec, parts in zip(specs, made, strict=True)
    )


def _layout(weight: DTensorSpec, axes: Sequence[int], count: int) -> DTensorSpec:
    """The layout of a row for each bag: bags over `axes`, columns as they are."""
    shape = (count, weight.shape[1])
    places = [Shard(0) if axis in axes else place for axis, place in enumerate(weight.placements)]
    meta = TensorMeta(shape, contiguous_stride(shape), weight.dtype)
    cuts = None if weight.cuts is None else [None, weight.cuts[1]]
    return DTensorSpec(weight.topology, places, meta, cuts=cuts)


def _integers(indices: Any, starts: Any) -> torch.dtype:
    """What the operator makes of two kinds of integers."""
    return torch.promote_types(indices.dtype, starts.dtype)


def _local(
    op: Any,
    rows: Any,
    starts: Any,
    indices: Any,
    asked: bool,
    options: tuple[Any, ...],
    coord: Coord,
) -> tuple[torch.Tensor, ...]:
    """What `op` gives on a rank. If rows were asked for there is one for each index."""
    table, kind = local(rows, coord), _integers(indices, starts)
    index, start = (local(each, coord).to(kind) for each in (indices, starts))
    width, picks, padding = table.shape[1], index, options[-1]
    if not len(start):
        none = index.new_empty(0)
        return table.new_empty(0, width), none, none, index.new_empty(0, width)
    if asked:
        picks = torch.arange(len(index), dtype=index.dtype, device=index.device)
        skipped = (index == padding).nonzero().flatten()
        # What is left out has the place of the first that is left out.
        padding = int(skipped[0]) if len(skipped) else -1
        picks = picks.index_fill_(0, skipped, padding)
        # The empty table of empty bags would be asked for a row.
        table, index = (t if len(t) else t.new_zeros(1, *t.shape[1:]) for t in (table, index))
    begin = indices._spec.box(coord)[0][0]
    found, bags, sizes, chosen = op(table, picks, start - begin, *options[:-2], False, padding)
    if asked:
        chosen = torch.where(sizes.unsqueeze(1) > 0, index[chosen], 0)
    return found, bags + starts._spec.box(coord)[0][0], sizes, chosen


def largest_backward(grad: Any, chosen: Any, sizes: Any, rows: int) -> Any:
    """The gradient of the table: each largest element has that of its bag, if the bag has any."""
    grad = torch.where(sizes.unsqueeze(1) > 0, grad, 0)
    made = grad.new_zeros(rows, grad.shape[1])
    if any(place.is_shard(1) for place in grad._spec.placements):
        return aten.scatter_add.default(made, 0, chosen, grad)
    places = torch.arange(grad.shape[1], device=grad.device)
    return aten.index_put.default(made, [chosen, places], grad, True)
