"""Places of values in a sorted sequence, both in shards: each value asks the one shard where its
place is.

The last elements of all shards tell every rank which shard that is. What comes back is a place: the
sequence stays where it is, and so do the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..cost import debt
from ..entry import register_form
from ..geometry import all_coords, contains, contiguous_stride, flat_index
from ..mesh import Coord
from ..placement import Placement, Shard
from ..ragged import as_dtensor
from ..replicated import mesh_of
from ..rules import Call, Operand
from ..spec import DTensorSpec, TensorMeta
from ..wrapper import wrap
from .posting import Post, short
from .shards import candidates, lacking, relaid, settled, told

__all__ = ["bucketize", "searchsorted"]

aten = torch.ops.aten


def _laid(sequence: DTensorSpec, values: DTensorSpec) -> DTensorSpec | None:
    """A layout of the values in shards over all axes that cut the sequence; None if some rank would
    have values of rows that it has not."""
    places: list[Placement] = list(values.placements)
    local = list(values.largest_shape)
    for axis in sequence.dim_axes[-1]:
        if not places[axis].is_shard():  # each rank asks for its share of them
            dim = local.index(max(local))
            places[axis] = Shard(dim)
            local[dim] //= values.topology.shape[axis]
    spec = values if tuple(places) == values.placements else values.with_placements(places)
    lead = sequence.ndim - 1
    held = all(
        contains(sequence.box(coord)[:lead], spec.box(coord)[:lead])
        for coord in all_coords(spec.topology.shape)
    )
    return spec if held else None


def _pays(sequence: DTensorSpec, values: DTensorSpec) -> bool:
    """Whether to ask is less than to gather one of both, or to exchange them for rows."""
    axes = sequence.dim_axes[-1] if sequence.ndim else ()
    shared = [axis for axis in axes if values.placements[axis].is_shard()]
    if not shared or not prod(sequence.shape) or not prod(values.shape):
        return False
    at = _laid(sequence.reduced, values.reduced)
    if at is None:
        return False
    mesh = at.topology
    own, asked = (prod(spec.largest_shape) for spec in (sequence, at))
    count, width, wide = len(sequence.dim_cuts[-1]), sequence.dtype.itemsize, values.dtype.itemsize
    rows = own // max(sequence.largest_shape[-1], 1)
    told_of = 4 if rows > 1 else 0
    steps = [
        rows * count * width,
        8 * at.num_shards**2,
        asked * (wide + told_of),
        asked * short(sequence.shape[-1]).itemsize,
    ]
    held = asked * prod(mesh.shape[axis] for axis in axes)
    for axis in shared:
        link = mesh.links[axis]
        ways = [
            link.price((count - 1) * own * width),
            link.price((count - 1) * held // count * wide) + debt(True, count, held * 8, link),
        ]
        if rows >= count:
            ways.append(link.price(own * width) + link.price(asked * wide))
        if sum(map(link.price, steps)) >= min(ways):
            return False
    return True


def _targets(sequence: DTensorSpec, spec: DTensorSpec, coord: Coord) -> list[int]:
    """For each shard of the sequence that has elements, which shard of the values is the rank that
    holds it; last a number for no shard at all."""
    axes, shape = sequence.dim_axes[-1], sequence.topology.shape
    found = []
    for size, piece in zip(
        sequence.dim_cuts[-1], all_coords(tuple(shape[axis] for axis in axes)), strict=True
    ):
        there = list(coord)
        for axis, place in zip(axes, piece, strict=True):
            there[axis] = place
        if size:
            found.append(flat_index(there, shape, spec.slot_axes))
    return [*found, spec.num_shards]


def _rows(sequence: DTensorSpec, spec: DTensorSpec, coord: Coord) -> torch.Tensor:
    """Which row of a rank's piece of the sequence each row of its values is searched in."""
    rows = torch.zeros((), dtype=torch.int64)
    boxes = zip(sequence.box(coord), spec.box(coord), strict=True)
    for (start, stop), (first, last) in list(boxes)[:-1]:
        rows = rows.unsqueeze(-1) * (stop - start) + torch.arange(first - start, last - start)
    return rows.flatten()


def _found(
    part: torch.Tensor, values: torch.Tensor, rows: torch.Tensor | None, right: bool
) -> torch.Tensor:
    """The place of each value in its row; in the only one if there are no rows."""
    if rows is None:
        return torch.searchsorted(part, values, right=right)
    if not len(rows):
        return torch.empty_like(rows)
    order = rows.sort(stable=True).indices
    counts = torch.bincount(rows, minlength=part.shape[0])
    at = rows[order]
    column = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[at]
    filled = values.new_zeros(part.shape[0], int(counts.max()))
    filled[at, column] = values[order]
    found = torch.searchsorted(part, filled, right=right)[at, column]
    return torch.empty_like(found).index_copy_(0, order, found)


class Question(NamedTuple):
    """The values of a rank in one line, the row of the sequence that each belongs to if there are
    several, and the shard that each has to ask."""

    values: torch.Tensor
    rows: torch.Tensor | None
    owner: torch.Tensor


def _asked(held: DTensorSpec, lasts: Any, values: Any, right: bool) -> Iterator[Question]:
    """What each rank asks; `lasts` has the last element of each shard of the sequence."""
    spec = values._spec
    for coord, part in zip(spec.slots, values._locals, strict=True):
        near, given = lasts._locals[lasts._spec.slot(coord)].contiguous(), part.contiguous()
        rows = None
        if held.ndim > 1:
            row = _rows(held, spec, coord).to(part.device)
            near, given = near.flatten(0, -2)[row], given.view(len(row), part.shape[-1])
            rows = row.to(torch.int32).repeat_interleave(part.shape[-1])
        piece = torch.searchsorted(near, given, right=right).flatten()
        owner = torch.tensor(_targets(held, spec, coord), device=part.device)[piece]
        yield Question(given.flatten(), rows, owner)


def _search(op: Any, sequence: Any, values: Any, right: bool) -> Any:
    mesh = mesh_of(op, [sequence, values])
    sequence, values = (settled(op, as_dtensor(x, mesh)) for x in (sequence, values))
    held: DTensorSpec = sequence._spec
    spec = _laid(held, values._spec)
    assert spec is not None
    values = relaid(op, values, spec)
    dim, count = held.ndim - 1, spec.num_shards
    (lasts,) = candidates(op, sequence, [dim], 1, lambda p, _: (p[..., -1:],), [sequence.dtype])
    asked = list(_asked(held, lasts, values, right))
    counts = [torch.bincount(each.owner, minlength=count + 1)[:count] for each in asked]
    orders = [  # what is after all elements asks nobody, and so does NaN
        each.owner.sort(stable=True).indices[: int(own.sum())]
        for each, own in zip(asked, counts, strict=True)
    ]
    post = Post(orders, told(op, spec, counts))
    rows = [[each.rows for each in asked if each.rows is not None]] if dim else []
    came, *where = post.forth(op, spec, [each.values for each in asked], *rows)
    answers = []
    for slot, coord in enumerate(spec.slots):
        part = sequence._locals[held.slot(coord)].contiguous()
        row = where[0][slot].to(torch.int64) if dim else None
        found = _found(part.flatten(0, -2) if dim else part, came[slot], row, right)
        answers.append((found + held.box(coord)[dim][0]).to(short(held.shape[dim])))
    return _put(post, spec, post.back(op, spec, tuple(answers)), held.shape[dim])


def _put(post: Post, spec: DTensorSpec, found: Sequence[torch.Tensor], size: int) -> Any:
    """Places where they were asked for; `size` for what asked nobody."""
    parts = []
    for coord, order, places in zip(spec.slots, post.orders, found, strict=True):
        shape = spec.local_shape(coord)
        made = torch.full((prod(shape),), size, device=places.device)
        parts.append(made.index_copy_(0, order, places.to(torch.int64)).view(shape))
    meta = TensorMeta(spec.shape, contiguous_stride(spec.shape), torch.int64)
    return wrap(spec.with_meta(meta), tuple(parts))


def _searches(call: Call) -> bool:
    if isinstance(call.get("sorter"), Operand):
        return _orders(call)
    return len(call.specs) == 2 and _pays(*call.specs)


def _orders(call: Call) -> bool:
    """Whether to put a sequence in the order that is given, and then to search it, is less than to
    make both whole."""
    sequence, order = call.specs[0].reduced, call.specs[-1].reduced
    axes = sequence.dim_axes[-1]
    if not axes or order.placements != sequence.placements or not prod(sequence.shape):
        return False
    own, width, dim = prod(sequence.largest_shape), sequence.dtype.itemsize, sequence.ndim - 1
    table = 8 * sequence.num_shards**2
    asked: list[int] = []
    if isinstance(call.get("self"), Operand) and call.specs[1].is_sharded():
        count = prod(call.specs[1].largest_shape)
        asked = [table, 0, count * call.specs[1].dtype.itemsize, count * 4]
    for link in (sequence.topology.links[axis] for axis in axes):
        whole = link.price(lacking(sequence, dim))
        gather = min(whole, sum(map(link.price, (table, own * 4, own * width))))
        search = min(whole, sum(map(link.price, asked)))
        if gather + search >= whole + link.price(lacking(order, dim)):
            return False
    return True


@register_form("searchsorted.Tensor", "searchsorted.Scalar", when=_searches)
def searchsorted(
    sequence: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Values ask for their places; a sequence with an order is put into it first."""
    right = right or side == "right"
    if sorter is None:
        return _search(aten.searchsorted.Tensor, sequence, values, right)
    given = aten.gather.default(sequence, -1, sorter)
    scalar = not isinstance(values, torch.Tensor)
    again = aten.searchsorted.Scalar if scalar else aten.searchsorted.Tensor
    return again(given, values, out_int32=out_int32, right=right)


@register_form("bucketize.Tensor", when=lambda call: _pays(call.specs[1], call.specs[0]))
def bucketize(values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """As `searchsorted`."""
    return _search(aten.bucketize.Tensor, boundaries, values, right)
