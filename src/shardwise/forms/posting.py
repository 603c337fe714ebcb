"""Elements by index, both in shards: each goes straight to its owner.

A rule makes the index whole on every rank. Where that is much, a rank sends what it writes, or asks
for what it picks, in order of who owns the places; only those who own them learn of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from ..cost import Link
from ..errors import OutOfRangeError
from ..geometry import Cuts, contiguous_stride
from ..plans import filled, tensors_in
from ..ragged import as_dtensor
from ..replicated import mesh_of
from ..rules import Call
from ..rules.scattering import stays_pending
from ..spec import DTensorSpec, TensorMeta
from ..wrapper import Locals, wrap
from .shards import relaid, sent_on, told

__all__ = ["Post", "asks", "picked", "sends", "short", "written"]


def short(size: int) -> torch.dtype:
    """The narrowest integers of 4 or 8 bytes that hold the places of a dim."""
    return torch.int32 if size < 1 << 31 else torch.int64


def _line(spec: DTensorSpec) -> DTensorSpec | None:
    """A tensor in shards of its first dim, and nothing pending, as a vector in the order of its
    elements."""
    if not spec.is_sharded() or any(spec.dim_axes[1:]) or spec.sums or spec.groups is not None:
        return None
    inner = prod(spec.shape[1:])
    meta = TensorMeta((prod(spec.shape),), (1,), spec.dtype)
    cuts = [tuple(size * inner for size in spec.dim_cuts[0])]
    return DTensorSpec(spec.topology, spec.placements, meta, cuts=cuts)


def _price(link: Link, index: DTensorSpec, step: Sequence[int]) -> int:
    """What it costs to learn who gets how many elements, and to exchange so many bytes of each."""
    count = index.num_shards
    table = 8 * count * (count + 2)
    return link.price(table) + sum(link.price(prod(index.shape) * n // count) for n in step)


def _gathering(link: Link, spec: DTensorSpec) -> int:
    count = spec.num_shards
    return link.price(prod(spec.shape) * spec.dtype.itemsize * (count - 1) // count)


def _links(spec: DTensorSpec) -> list[Link]:
    return [spec.topology.links[axis] for axis in spec.slot_axes]


def _is_index(spec: DTensorSpec) -> bool:
    return spec.dtype in (torch.int64, torch.int32) and spec.groups is None and not spec.sums


def sends(call: Call) -> bool:
    """Whether a call writes by an index, and what it writes goes to the owners of the places.

    Index and source are in shards of their first dim, so that of what is written into one place the
    last comes last.
    """
    x, index, *sources = call.specs
    line = x if x.is_replicated() else _line(x)
    where = _line(index)
    if not x.ndim or (x.ndim != 1 and call.op._schema.name not in _FLAT):
        return False
    if line is None or where is None or not _is_index(index) or not prod(x.shape):
        return False
    fits = x.is_replicated() or line.slot_axes == where.slot_axes
    if not fits or not all(_goes_with(index, source) for source in sources):
        return False
    pending = stays_pending(call)
    if pending and x.is_replicated():
        return False  # it is not made whole by being pending
    sent = [source for source in sources if source.ndim]
    step = short(prod(x.shape)).itemsize + sum(source.dtype.itemsize for source in sent)
    for link in _links(index):
        now = sum(_gathering(link, spec) for spec in (index, *sent))
        if pending:
            now = min(now, 2 * _gathering(link, line))
        if _price(link, index, [step]) >= now:
            return False
    return True


_FLAT = ("aten::take", "aten::put", "aten::put_")
"""What counts places through all dims."""


def _goes_with(index: DTensorSpec, source: DTensorSpec) -> bool:
    """Whether there is an element for each place, where the place is, or a number for all."""
    if not source.ndim:
        return source.is_replicated()
    same = source.shape == index.shape and source.placements == index.placements
    return same and source.dim_cuts == index.dim_cuts


def asks(call: Call) -> bool:
    """Whether a call picks elements by an index from their owners."""
    if len(call.specs) != 2:
        return False
    x, index = call.specs
    line = _line(x)
    if line is None or (x.ndim != 1 and call.op._schema.name not in _FLAT):
        return False
    if not _is_index(index) or line.slot_axes != index.slot_axes or not prod(x.shape):
        return False
    step = [short(prod(x.shape)).itemsize, x.dtype.itemsize]
    return all(
        _price(link, index, step) < min(_gathering(link, index), _gathering(link, line))
        for link in _links(index)
    )


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
    """Who gets which place in `index`, and the places, counted through all elements."""
    line = _line(x)
    assert line is not None
    size = line.shape[0]
    ends = torch.tensor(list(accumulate(line.dim_cuts[0])), device=index.device)
    orders, places, facts = [], [], []
    for part in index._locals:
        given = torch.cat([part.flatten().to(torch.int64), ends.new_zeros(1)])
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


def _inside(spec: DTensorSpec, places: Locals) -> Iterator[torch.Tensor]:
    """Places counted through all elements as places counted through each local tensor."""
    inner = prod(spec.shape[1:])
    for coord, each in zip(spec.slots, places, strict=True):
        yield each.to(torch.int64) - spec.box(coord)[0][0] * inner


def written(op: Any, wraps: bool, *args: Any, **kwargs: Any) -> Any:
    """A call that writes by an index: each rank writes what it is sent, in the order of all."""
    mesh = mesh_of(op, list(tensors_in(args, kwargs)))
    operands: list[Any] = [as_dtensor(each, mesh) for each in tensors_in(args, kwargs)]
    x, index, *sources = operands
    if x._spec.is_replicated():
        x = relaid(op, x, x._spec.with_placements(index.placements))
    spec = x._spec
    post, given = _post(op, spec, index, wraps)
    sent = [[part.flatten() for part in each._locals] for each in sources if each.ndim]
    places, *came = post.forth(op, spec, given, *sent)
    parts = []
    for slot, (part, at) in enumerate(zip(x._locals, _inside(spec, places), strict=True)):
        arrived = iter(came)
        new = [next(arrived)[slot] if each.ndim else each._locals[0] for each in sources]
        own, named = filled(args, kwargs, iter((part, at, *new)))
        parts.append(op(*own, **named))
    return wrap(spec, tuple(parts))


def picked(op: Any, wraps: bool, *args: Any, **kwargs: Any) -> Any:
    """A call that picks elements by an index: they come from their owners, laid out as the index
    is."""
    operands: list[Any] = list(tensors_in(args, kwargs))
    mesh_of(op, operands)
    x, index = operands
    spec, out = x._spec, index._spec
    post, given = _post(op, spec, index, wraps)
    (wanted,) = post.forth(op, out, given)
    answers = []
    for part, at in zip(x._locals, _inside(spec, wanted), strict=True):
        own, named = filled(args, kwargs, iter((part, at)))
        answers.append(op(*own, **named))
    found = post.back(op, out, tuple(answers))
    parts = [
        torch.empty_like(new).index_copy_(0, order, new).view(out.local_shape(coord))
        for coord, order, new in zip(out.slots, post.orders, found, strict=True)
    ]
    return wrap(
        out.with_meta(TensorMeta(out.shape, contiguous_stride(out.shape), x.dtype)), tuple(parts)
    )
