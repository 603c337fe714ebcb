"""x[i, :, j] and x[i, :, j] = values, tensors and indices in shards: each element goes straight
between its place and its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from ..dispatch.fallback import mesh_of
from ..layout.geometry import all_coords, contiguous_stride
from ..layout.mesh import Coord
from ..layout.spec import DTensorSpec
from ..storage.ragged import as_dtensor
from ..storage.wrapper import Locals, wrap
from .places import Given, Laid, layouts_of, owning_axes
from .posting import Post, Range, as_sum, piece_of, posted, short, waits
from .shards import relaid

__all__ = ["local", "pick", "write"]

aten = torch.ops.aten


class _Sent(NamedTuple):
    """A call whose ranks know where to send: its operands as they are laid out, and the places in
    the vector that each rank has indices of."""

    given: Given
    laid: Laid
    x: Any
    values: Any
    post: Post
    places: Locals

    def rows(self, part: torch.Tensor) -> torch.Tensor:
        """A local tensor as rows of the vector."""
        order = [*self.given.used, *self.given.free]
        return part.permute(order).flatten(0, len(self.given.used) - 1)

    def box(self, coord: Coord, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the vector as a local tensor."""
        order = [*self.given.used, *self.given.free]
        shape = self.laid.x.local_shape(coord)
        back = sorted(range(len(order)), key=order.__getitem__)
        return rows.view([shape[dim] for dim in order]).permute(back).contiguous()

    def here(self, coord: Coord, places: Locals) -> torch.Tensor:
        """Places in the vector, counted through the rows of a rank."""
        start = self.laid.vector.box(coord)[0][0]
        return places[self.laid.lead.slot(coord)].to(torch.int64) - start


def _sent(
    op: Any,
    x: Any,
    indices: Sequence[Any],
    values: Any = None,
    adds: bool = False,
    wraps: bool = True,
) -> _Sent:
    tensors = [x, values, *indices]
    mesh = mesh_of(op, [each for each in tensors if each is not None])
    ours = [None if each is None else as_dtensor(each, mesh) for each in tensors]
    specs: list[Any] = [None if each is None else each._spec for each in ours]
    given = Given(specs[0], tuple(specs[2:]), specs[1], adds)
    found = layouts_of(given)
    assert found is not None
    laid = found[1]
    goals: list[Any] = [laid.x, laid.values, *laid.indices]
    x, values, *own = (
        None if each is None else relaid(op, each, goal)
        for each, goal in zip(ours, goals, strict=True)
    )
    places = [_places(given, laid, own, coord) for coord in laid.lead.slots]
    ranges = [
        Range([local(own[d], c) for c in laid.lead.slots], d, given.x.shape[d], wraps)
        for d in given.used
    ]
    ends = list(accumulate(laid.vector.dim_cuts[0]))
    owners = [piece_of(place, ends) for place in places]
    post = posted(op, laid.lead, owners, ranges)
    narrow = short(prod(given.x.shape))
    return _Sent(given, laid, x, values, post, tuple(place.to(narrow) for place in places))


def _places(given: Given, laid: Laid, indices: Sequence[Any], coord: Coord) -> torch.Tensor:
    """The place in the vector of each element that a rank has indices of."""
    x, lead = laid.x, laid.lead.local_shape(coord)
    given_at = [local(indices[dim], coord).to(torch.int64) for dim in given.used]
    ats = {
        d: torch.where(at < 0, at + x.shape[d], at)
        for d, at in zip(given.used, given_at, strict=True)
    }
    if any(x.dim_axes[dim] for dim in given.used[1:]):
        return _in_boxes(given, laid, ats).expand(lead).flatten()
    place = ats.pop(given.used[0])  # the boxes follow each other as their places do
    for dim, at in ats.items():
        place = place * x.shape[dim] + at
    return place.expand(lead).flatten()


def _in_boxes(given: Given, laid: Laid, ats: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Places in the vector by indices of dims: those of the boxes before, and those in the box."""
    axes, within = owning_axes(given, laid.x), torch.zeros_like(ats[given.used[0]])
    owner, starts = within, [0, *accumulate(laid.vector.dim_cuts[0])]
    for dim, at in ats.items():
        shards = torch.tensor(_shards(laid.x, dim, axes), device=at.device)
        start, stop, number = shards.t().contiguous()
        shard = torch.bucketize(at, stop, right=True).clamp_(max=len(stop) - 1)
        owner = owner + number[shard]
        within = within * (stop - start)[shard] + at - start[shard]
    return torch.tensor(starts, device=owner.device)[owner] + within


def _shards(x: DTensorSpec, dim: int, axes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Where each shard of a dim starts and stops, and what it adds to the number of the owner,
    which is counted over `axes`."""
    shape = x.topology.shape
    steps = dict(zip(axes, contiguous_stride([shape[axis] for axis in axes]), strict=True))
    own = x.dim_axes[dim]
    coords = all_coords(tuple(shape[axis] for axis in own))
    return [
        (*piece, sum(steps[axis] * place for axis, place in zip(own, coord, strict=True)))
        for piece, coord in zip(x.pieces(dim), coords, strict=True)
    ]


def local(x: Any, coord: Coord) -> torch.Tensor:
    """The local tensor of a rank."""
    part: torch.Tensor = x._locals[x._spec.slot(coord)]
    return part


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).index_copy_(0, order, places)


def pick(op: Any, x: Any, indices: Sequence[Any], wraps: bool = True) -> Any:
    """x[i, :, j]: what is picked comes from its owners, laid out as the indices are, which may be
    negative if it `wraps`."""
    sent = _sent(op, x, indices, wraps=wraps)
    laid, post = sent.laid, sent.post
    (wanted,) = post.forth(op, laid.lead, sent.places)
    answers = [
        aten.index.Tensor(sent.rows(part), [sent.here(coord, wanted)])
        for coord, part in zip(laid.x.slots, sent.x._locals, strict=True)
    ]
    found = post.back(op, laid.lead, tuple(answers), laid.vector)
    parts, lead, at = [], laid.lead.ndim, sent.given.before
    for coord, new in zip(laid.x.slots, found, strict=True):
        rows = aten.index.Tensor(new, [_inverse(post.orders[laid.lead.slot(coord)])])
        rows = rows.view(*laid.lead.local_shape(coord), *rows.shape[1:])
        turned = [*range(lead, lead + at), *range(lead), *range(lead + at, rows.ndim)]
        parts.append(rows.permute(turned).contiguous())
    return wrap(laid.picked, tuple(parts))


def write(op: Any, x: Any, indices: Sequence[Any], values: Any, adds: bool) -> Any:
    """x[i, :, j] = values, of a copy of `x`: each rank writes what it is sent, in the order of
    all."""
    if adds and not op._schema.is_mutable and waits():
        return op(as_sum(op, x, [*indices, values]), indices, values, adds)
    sent = _sent(op, x, indices, values, adds)
    laid, one = sent.laid, sent.given.repeats
    rows = [_value_rows(sent, coord) for coord in laid.x.slots]
    mail = [sent.places] if one else [sent.places, rows]
    places, *came = sent.post.forth(op, laid.lead, *mail, rows=[None, laid.vector])
    (new,) = [rows] if one else came
    parts = []
    for coord, part, own in zip(laid.x.slots, sent.x._locals, new, strict=True):
        at = sent.here(coord, places)
        made = aten.index_put.default(sent.rows(part), [at], own, adds)
        parts.append(sent.box(coord, made))
    meta = laid.x.meta._replace(stride=contiguous_stride(laid.x.shape))
    return wrap(laid.x.with_meta(meta), tuple(parts))


def _value_rows(sent: _Sent, coord: Coord) -> torch.Tensor:
    """The values that a rank has, a row for each of its places; one row if all are the same."""
    given, laid = sent.given, sent.laid
    at, count = given.before, laid.lead.ndim
    lead = (1,) * count if given.repeats else laid.lead.local_shape(coord)
    rest = laid.vector.local_shape(coord)[1:]
    full = local(sent.values, coord).expand((*rest[:at], *lead, *rest[at:]))
    order = [*range(at, at + count), *range(at), *range(at + count, full.ndim)]
    return full.permute(order).reshape(prod(lead), *rest)
