"""Elements of a vector by index, vector and index in shards: each goes straight to its owner.

A rule makes the index whole on every rank. Where that is much, a rank sends what it writes, or asks
for what it picks, in order of who owns the places; only those who own them learn of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..errors import OutOfRangeError
from ..geometry import Cuts
from ..ragged import as_dtensor
from ..replicated import mesh_of
from ..rules import Call
from ..spec import DTensorSpec, TensorMeta
from ..wrapper import Locals, wrap
from .shards import relaid, sent_on, told

__all__ = ["Post", "asks", "picked", "sends", "short", "written"]


def _are_alike(*specs: DTensorSpec) -> bool:
    """Whether all are vectors in the same shards, with nothing pending."""
    first = specs[0]
    places = {spec.placements for spec in specs}
    return (
        all(spec.ndim == 1 for spec in specs)
        and first.is_sharded()
        and first.groups is None
        and len(places) == 1
        and not first.sums
    )


def short(size: int) -> torch.dtype:
    """The narrowest integers of 4 or 8 bytes that hold the places of a dim."""
    return torch.int32 if size < 1 << 31 else torch.int64


def _less(spec: DTensorSpec, steps: Sequence[int], gathered: Sequence[int]) -> bool:
    """Whether bytes of each element that are exchanged, and a table, are less than a gather."""
    count, size = len(spec.pieces(0)), spec.shape[0]
    table = 8 * count * (count + 2)
    links = [spec.topology.links[axis] for axis in spec.dim_axes[0]]
    return all(
        link.price(table) + sum(link.price(size * step // count) for step in steps)
        < sum(link.price(size * each * (count - 1) // count) for each in gathered)
        for link in links
    )


def sends(call: Call) -> bool:
    """Whether a call writes elements of a vector by an index into a vector."""
    if len(call.specs) != 3 or any(spec.ndim != 1 for spec in call.specs):
        return False
    x, index, source = call.specs
    fits = _are_alike(index, source) and index.dim_cuts == source.dim_cuts
    if not fits or not (x.is_replicated() or _are_alike(x, index)):
        return False
    narrow, width = short(x.shape[0]).itemsize, source.dtype.itemsize
    return _less(index, [narrow + width], [8, width])


def asks(call: Call) -> bool:
    """Whether a call picks elements of a vector by an index."""
    if len(call.specs) != 2 or not _are_alike(*call.specs):
        return False
    x, index = call.specs
    if index.dtype is not torch.int64 and index.dtype is not torch.int32:
        return False
    narrow, width = short(x.shape[0]).itemsize, x.dtype.itemsize
    return _less(index, [narrow, width], [index.dtype.itemsize, width // len(index.pieces(0))])


class Post(NamedTuple):
    """Elements that go to their owners: in which order each rank sends its own, and how many each
    shard has for every other."""

    orders: list[torch.Tensor]
    sizes: list[list[int]]

    def forth(self, op: Any, like: DTensorSpec, *given: Sequence[torch.Tensor]) -> list[Locals]:
        """What arrives of vectors in the shards of `like`, in one exchange: that of the first shard
        first."""
        splits = [tuple(accumulate(row)) for row in self.sizes]
        vectors = [
            (tuple(part[order] for part, order in zip(parts, self.orders, strict=True)), splits)
            for parts in given
        ]
        found = sent_on(op, like, vectors)
        return [tuple(torch.cat(pieces) for pieces in each) for each in found]

    def back(self, op: Any, like: DTensorSpec, answers: Locals) -> Locals:
        """One answer to each element that arrived, in the order in which a rank sent its own."""
        splits: list[Cuts] = [tuple(accumulate(row)) for row in zip(*self.sizes, strict=True)]
        (found,) = sent_on(op, like, [(answers, splits)])
        return tuple(torch.cat(pieces) for pieces in found)


def _post(op: Any, x: DTensorSpec, index: Any, wraps: bool) -> tuple[Post, Locals]:
    """Who gets which place in `index`, and the places."""
    size = x.shape[0]
    ends = torch.tensor(list(accumulate(x.dim_cuts[0])), device=index.device)
    orders, places, facts = [], [], []
    for part in index._locals:
        given = torch.cat([part.to(torch.int64), part.new_zeros(1, dtype=torch.int64)])
        place = torch.where(given < 0, given + size, given)[:-1] if wraps else given[:-1]
        owner = torch.bucketize(place, ends, right=True).clamp_(max=len(ends) - 1)
        orders.append(owner.sort(stable=True).indices)
        places.append(place.to(short(size)))
        range_ = torch.stack(torch.aminmax(given))
        facts.append(torch.cat([range_, torch.bincount(owner, minlength=len(ends))]))
    table = told(op, index._spec, facts)
    low, high = min(row[0] for row in table), max(row[1] for row in table)
    if low < (-size if wraps else 0) or high >= size:
        bad = high if high >= size else low
        raise OutOfRangeError(f"index {bad} is out of bounds for dimension 0 with size {size}")
    return Post(orders, [row[2:] for row in table]), tuple(places)


def written(op: Any, x: Any, index: Any, source: Any) -> Any:
    """`x` with the elements of `source` at the places in `index`; of several the last counts."""
    x = as_dtensor(x, mesh_of(op, [x, index, source]))
    if x._spec.is_replicated():
        x = relaid(op, x, x._spec.with_placements(index.placements))
    spec = x._spec
    post, given = _post(op, spec, index, wraps=False)
    places, sources = post.forth(op, spec, given, source._locals)
    parts = [
        part.scatter(0, at.to(torch.int64) - spec.box(coord)[0][0], new)
        for coord, part, at, new in zip(spec.slots, x._locals, places, sources, strict=True)
    ]
    return wrap(spec, tuple(parts))


def picked(op: Any, x: Any, index: Any, wraps: bool) -> Any:
    """The elements of `x` at the places in `index`, laid out as the index is."""
    mesh_of(op, [x, index])
    spec = x._spec
    post, given = _post(op, spec, index, wraps)
    (wanted,) = post.forth(op, spec, given)
    answers = tuple(
        part[places.to(torch.int64) - spec.box(coord)[0][0]]
        for coord, part, places in zip(spec.slots, x._locals, wanted, strict=True)
    )
    found = post.back(op, spec, answers)
    parts = [
        torch.empty_like(new).index_copy_(0, order, new)
        for order, new in zip(post.orders, found, strict=True)
    ]
    return wrap(index._spec.with_meta(TensorMeta(index._spec.shape, (1,), x.dtype)), tuple(parts))
