"""Elements or rows by index, both in shards: each goes straight to its owner.

A rule makes the index whole on every rank. Where that is much, a rank sends what it writes, or asks
for what it picks, in order of who owns the places; only those who own them learn of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from math import prod
from typing import Any, NamedTuple

import torch

from ..dispatch.fallback import mesh_of
from ..dispatch.plans import filled, tensors_in
from ..errors import OutOfRangeError
from ..layout.cost import Link
from ..layout.geometry import Cuts, contiguous_stride, flat_index
from ..layout.placement import Partial, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..rules import Call
from ..rules.scattering import stays_pending
from ..storage import policy
from ..storage.match_meta import in_memory_order
from ..storage.ragged import as_dtensor
from ..storage.wrapper import Locals, wrap
from ..tensor.autograd import keeps_partial_grads
from .shards import lacking, neighbours, relaid, sent_on, told

__all__ = [
    "Post",
    "Range",
    "as_sum",
    "asks",
    "picked",
    "piece_of",
    "posted",
    "sends",
    "short",
    "waits",
    "written",
]


def short(size: int) -> torch.dtype:
    """The narrowest integers of 4 or 8 bytes that hold the places of a dim."""
    return torch.int32 if size < 1 << 31 else torch.int64


_FLAT = frozenset(("take", "put"))
"""What counts places through all elements."""
_ADDING = frozenset(("scatter_add", "index_add"))
"""What adds up all that goes into one place."""
_WIDE = 32
"""From so many bytes on a row that many want is asked for once."""
_ONE_BY_ONE = frozenset(("gather", "scatter", "scatter_add", "scatter_reduce"))
"""What has a place along a dim for each element."""


def _name(op: Any) -> str:
    return str(op._schema.name).removeprefix("aten::").removesuffix("_")


def _by_rows(op: Any) -> bool:
    """Whether one place stands for all that has the same place in the indexed dim."""
    return _name(op) not in _FLAT | _ONE_BY_ONE


# --- when it is less -------------------------------------------------------------------------


def _front(spec: DTensorSpec, dim: int) -> DTensorSpec:
    """The layout of a tensor with `dim` before the others."""
    order = [dim, *(d for d in range(spec.ndim) if d != dim)]
    shape = tuple(spec.shape[d] for d in order)
    meta = TensorMeta(shape, contiguous_stride(shape), spec.dtype)
    cuts = None if spec.cuts is None else [spec.cuts[d] for d in order]
    places = [
        Shard(order.index(place.dim)) if isinstance(place, Shard) else place
        for place in spec.placements
    ]
    return DTensorSpec(spec.topology, places, meta, cuts=cuts)


def _in_front(call: Call) -> list[DTensorSpec] | None:
    """The operands with the indexed dim in front; None if other dims are in shards, unless all
    operands have them in the same ones, if the index is no tensor of integers, or something is
    pending."""
    x, index, *sources = call.specs
    if any(spec.groups is not None or spec.sums for spec in call.specs):
        return None
    if index.dtype not in (torch.int64, torch.int32) or not prod(index.shape):
        return None
    if not x.ndim or not prod(x.shape):
        return None
    dim = (call.get("dim") or 0) % x.ndim
    if _name(call.op) in _ONE_BY_ONE:
        if index.ndim != x.ndim or _rest(index, dim) != _rest(x, dim):
            return None
        index = _front(index, dim)
    moved = [_front(each, dim) if each.ndim == x.ndim else each for each in sources]
    x = _front(x, dim)
    if not any(any(spec.dim_axes[1:]) for spec in (x, *moved)):
        return [x, index, *moved]
    cut = [spec for spec in (index, *moved) if spec.ndim and not spec.is_replicated()]
    fits = _name(call.op) in _ONE_BY_ONE and all(_is_beside(x, spec) for spec in cut)
    return [x, index, *moved] if fits else None


def _is_beside(x: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether two tensors have all dims but the first in the same shards."""
    return x.placements == other.placements and x.dim_cuts[1:] == other.dim_cuts[1:]


def _rest(spec: DTensorSpec, dim: int) -> list[int]:
    return [size for d, size in enumerate(spec.shape) if d != dim]


def _asking(link: Link, index: DTensorSpec, *widths: int) -> int:
    """The price of learning who gets how much, and of exchanging so many bytes for each place."""
    count = index.num_shards
    table = 8 * (count - 1) * (count + 2)
    others = prod(index.shape) * (count - 1) // count // count
    return link.price(table) + sum(link.price(others * n) for n in widths)


def _gathering(link: Link, groups: int, shards: int, *specs: DTensorSpec) -> int:
    """The price of making tensors whole that are in so many shards, in each group by itself."""
    count = shards // groups
    sizes = [prod(spec.shape) * spec.dtype.itemsize // groups for spec in specs]
    return sum(link.price(size * (count - 1) // count) for size in sizes)


def _groups(x: DTensorSpec) -> int:
    """In how many pieces the dims beside the first are."""
    return x.num_shards // len(x.dim_cuts[0])


def _exchanging(link: Link, *specs: DTensorSpec) -> int:
    """The price of cutting another dim."""
    return sum(link.price(lacking(spec, 0)) for spec in specs)


def _links(spec: DTensorSpec) -> list[Link]:
    return [spec.topology.links[axis] for axis in spec.slot_axes]


def sends(call: Call) -> bool:
    """Whether a call writes by an index, and what it writes goes to the owners of the places.

    Index and source are in shards of their first dim, so that of what is written into one place the
    last comes last.
    """
    found = _in_front(call)
    if found is None:
        return False
    x, known, *sources = found
    index = _as_sources(known, sources)
    if not index.is_sharded() or (any(index.dim_axes[1:]) and not any(x.dim_axes[1:])):
        return False
    pending = stays_pending(call)
    if x.is_replicated():
        # It is not made whole by being pending; in place it would be made whole again.
        if call.op._schema.is_mutable or (pending and _name(call.op) not in _ADDING):
            return False
    elif x.slot_axes != index.slot_axes:
        return False
    rest = tuple(x.shape[1:]) if _by_rows(call.op) else ()
    sent = [source for source in sources if source.ndim]
    if not all(_goes_with(index, source, rest) for source in sources):
        return False
    width = short(prod(x.shape)).itemsize + sum(s.dtype.itemsize * prod(rest) for s in sent)
    cut = [each for each in (known, *sent) if not each.is_replicated()]
    for link in _links(index):
        ways = [_gathering(link, _groups(x), index.num_shards, *cut)]
        if not x.is_replicated() and _name(call.op) not in _FLAT:
            ways.append(_exchanging(link, x, *cut))
        if pending:  # what is written into a tensor that all have is reduced into shards at least
            times = 1 if x.is_replicated() else 2
            ways.append(times * _gathering(link, _groups(x), index.num_shards, x))
        if _asking(link, index, width) >= min(ways):
            return False
    return True


def _as_sources(index: DTensorSpec, sources: Sequence[DTensorSpec]) -> DTensorSpec:
    """An index that every rank has, where there is a row for each place of it."""
    for source in sources if index.is_replicated() else ():
        same = source.shape[: index.ndim] == index.shape and not any(source.dim_axes[index.ndim :])
        if source.is_sharded() and same and index.ndim:
            cuts = None if source.cuts is None else source.cuts[: index.ndim]
            return index.with_placements(source.placements, cuts)
    return index


def _goes_with(index: DTensorSpec, source: DTensorSpec, rest: tuple[int, ...]) -> bool:
    """Whether there is a row for each place, where the place is or everywhere, or a number for
    all."""
    if source.is_replicated():
        return not source.ndim or tuple(source.shape) == (*index.shape, *rest)
    same = tuple(source.shape) == (*index.shape, *rest) and source.placements == index.placements
    return same and source.dim_cuts[0] == index.dim_cuts[0]


def _with_places(op: Any, index: DTensorSpec, source: Any) -> Any:
    """Rows that every rank has, as each rank has places for them."""
    if not source.ndim or not source._spec.is_replicated():
        return source
    cuts = [*index.dim_cuts, *[None] * (source.ndim - index.ndim)]
    return relaid(op, source, source._spec.with_placements(index.placements, cuts))


def asks(call: Call) -> bool:
    """Whether a call picks by an index from the owners of the places."""
    found = _in_front(call) if len(call.specs) == 2 else None
    if found is None:
        return False
    x, index = found
    if not x.is_sharded() or x.slot_axes != index.slot_axes:
        return False
    one_by_one = _name(call.op) in _ONE_BY_ONE
    if one_by_one and any(index.dim_axes[1:]) and not any(x.dim_axes[1:]):
        return False
    if _name(call.op) == "index_select" and index.ndim != 1:  # PyTorch's error
        return False
    count, groups = x.num_shards, _groups(x)
    width = x.dtype.itemsize * (prod(x.shape[1:]) if _by_rows(call.op) else 1)
    narrow = short(prod(x.shape)).itemsize
    for link in _links(index):
        picked = link.price(prod(index.shape) * width // count * (count - 1) // count)
        ways = [_gathering(link, groups, count, x), _gathering(link, groups, count, index) + picked]
        if (one_by_one or not any(index.dim_axes[1:])) and _name(call.op) not in _FLAT:
            ways.append(_exchanging(link, x, index))
        if _asking(link, index, narrow, width) >= min(ways):
            return False
    return True


def waits() -> bool:
    """Whether sums are to be left pending rather than sent."""
    return policy.current().moves == "error" or keeps_partial_grads()


def as_sum(op: Any, x: Any, others: Sequence[Any]) -> Any:
    """`x` as a pending sum over the axes that other operands are in shards over."""
    given = [each for each in others if each is not None]
    mesh = mesh_of(op, [x, *given])
    x, *given = (as_dtensor(each, mesh) for each in (x, *given))
    places = [
        Partial() if any(each.placements[axis].is_shard() for each in given) else place
        for axis, place in enumerate(x.placements)
    ]
    return relaid(op, x, x._spec.with_placements(places))


# --- sending and asking ----------------------------------------------------------------------


class Post(NamedTuple):
    """Elements that go to their owners: in which order each rank sends its own, and how many each
    shard has for every other."""

    orders: list[torch.Tensor]
    sizes: list[list[int]]

    def forth(
        self,
        op: Any,
        like: DTensorSpec,
        *given: Sequence[torch.Tensor],
        rows: Sequence[DTensorSpec | None] = (),
    ) -> list[Locals]:
        """What arrives of vectors in the shards of `like`, in one exchange: that of the first shard
        first. Those of rows in shards have these as in `rows`."""
        splits = [tuple(accumulate(row)) for row in self.sizes]
        vectors = []
        for parts, own in zip_longest(given, rows[: len(given)]):
            slots = (like if own is None else own).slots
            orders = [self.orders[like.slot(coord)] for coord in slots]
            sent = tuple(part[order] for part, order in zip(parts, orders, strict=True))
            vectors.append((sent, splits))
        found = sent_on(op, like, vectors, rows)
        return [tuple(torch.cat(pieces) for pieces in each) for each in found]

    def back(
        self, op: Any, like: DTensorSpec, answers: Locals, rows: DTensorSpec | None = None
    ) -> Locals:
        """One answer to each element that arrived, in the order in which a rank sent its own."""
        splits: list[Cuts] = [tuple(accumulate(row)) for row in zip(*self.sizes, strict=True)]
        (found,) = sent_on(op, like, [(answers, splits)], [rows])
        return tuple(torch.cat(pieces) for pieces in found)


class Range(NamedTuple):
    """Integers that the shards have, which must be places of a dim, maybe counted from its end."""

    parts: Sequence[torch.Tensor]
    dim: int
    size: int
    wraps: bool

    def ends(self) -> list[torch.Tensor]:
        """The least and the largest of each shard, or 0, which is a place."""
        flat = (part.flatten().to(torch.int64) for part in self.parts)
        return [torch.stack(torch.aminmax(torch.cat([part, part.new_zeros(1)]))) for part in flat]

    def check(self, low: int, high: int) -> None:
        if low < (-self.size if self.wraps else 0) or high >= self.size:
            bad = high if high >= self.size else low
            raise OutOfRangeError(
                f"index {bad} is out of bounds for dimension {self.dim} with size {self.size}"
            )


def posted(
    op: Any, like: DTensorSpec, owners: Sequence[torch.Tensor], ranges: Sequence[Range]
) -> Post:
    """Who gets which place, if these are the shards that own them; `owners` are in the shards of
    `like`, and so is what must be in range."""
    count = like.num_shards
    orders = [owner.sort(stable=True).indices for owner in owners]
    facts = [
        torch.cat([*limits, torch.bincount(owner, minlength=count)])
        for owner, *limits in zip(owners, *(each.ends() for each in ranges), strict=True)
    ]
    table = told(op, like, facts)
    for at, each in enumerate(ranges):
        each.check(min(row[2 * at] for row in table), max(row[2 * at + 1] for row in table))
    return Post(orders, [row[2 * len(ranges) :] for row in table])


def piece_of(place: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Which piece each place is in, if they end at `ends`; the last if it is out of range."""
    stops = torch.tensor(ends, device=place.device)
    return torch.bucketize(place, stops, right=True).clamp_(max=len(ends) - 1)


def _inner(op: Any, part: torch.Tensor) -> int:
    """How many places each place along the first dim of a tensor stands for."""
    return 1 if _by_rows(op) else prod(part.shape[1:])


class _Places(NamedTuple):
    """Who gets which place, and the places that each shard has, as they go out: with `where` each
    once, which tells for every element of the index which of them it is."""

    post: Post
    given: Locals
    where: Sequence[torch.Tensor] | None


def _post(op: Any, x: Any, index: Any, wraps: bool, once: bool) -> _Places:
    """The places in `index`: of rows, or counted through the elements of all shards that have the
    other dims as the owner has. What many elements want is told `once`."""
    spec, at = x._spec, index._spec
    size = prod(spec.shape) if _name(op) in _FLAT else spec.shape[0]
    groups = neighbours(spec, 0)
    places, owners, where = [], [], []
    for coord, part in zip(at.slots, index._locals, strict=True):
        inner = _inner(op, x._locals[spec.slot(coord)])
        given = part.flatten().to(torch.int64)
        place = torch.where(given < 0, given + size, given) if wraps else given
        if _name(op) in _ONE_BY_ONE and inner:
            columns = torch.arange(inner, device=place.device)
            place = (place.view(-1, inner) * inner + columns).flatten()
        if once:
            place, which = place.unique(return_inverse=True)
            where.append(which)
        piece = piece_of(place, [end * inner for end in accumulate(spec.dim_cuts[0])])
        group = groups[flat_index(coord, at.topology.shape, at.slot_axes)]
        owners.append(torch.tensor(group, device=piece.device)[piece])
        places.append(place.to(short(prod(spec.shape))))
    post = posted(op, at, owners, [Range(index._locals, 0, size, wraps)])
    return _Places(post, tuple(places), where if once else None)


def _pieces(op: Any, x: Any, places: Locals) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each local tensor, flat if every element has a place, with places counted through it."""
    spec = x._spec
    for coord, part, at in zip(spec.slots, x._locals, places, strict=True):
        flat = part.flatten() if _name(op) in _ONE_BY_ONE else part
        yield flat, at.to(torch.int64) - spec.box(coord)[0][0] * _inner(op, part)


def _turned(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
    """`run` with the indexed dim in front, and back."""
    x, dim = args[:2]
    if not isinstance(dim, int):
        return run(args, kwargs)
    dim %= x.ndim
    if not dim:
        return run((x, 0, *args[2:]), kwargs)  # local tensors may have fewer dims to count back

    def turn(tensor: Any) -> Any:
        whole = tensor.ndim == x.ndim and (_name(op) in _ONE_BY_ONE or tensor is not args[2])
        return tensor.movedim(dim, 0) if whole else tensor

    given, named = filled(args, kwargs, map(turn, tensors_in(args, kwargs)))
    return run((given[0], 0, *given[2:]), named).movedim(0, dim)


def _added(
    parts: Sequence[torch.Tensor], where: Sequence[torch.Tensor], places: Locals
) -> list[torch.Tensor]:
    """One row for each place, of rows that may be for the same."""
    return [
        part.new_zeros((len(at), *part.shape[1:])).index_add_(0, which, part)
        for part, which, at in zip(parts, where, places, strict=True)
    ]


def written(op: Any, wraps: bool, *args: Any, **kwargs: Any) -> Any:
    """A call that writes by an index: each rank writes what it is sent, in the order of all."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = mesh_of(op, list(tensors_in(args, kwargs)))
        operands: list[Any] = [as_dtensor(each, mesh) for each in tensors_in(args, kwargs)]
        x, index, *sources = operands
        if _name(op) in _ADDING and waits():
            own, named = filled(args, kwargs, iter((as_sum(op, x, operands), *operands[1:])))
            return op(*own, **named)
        index = relaid(op, index, _as_sources(index._spec, [each._spec for each in sources]))
        sources = [_with_places(op, index._spec, source) for source in sources]
        if x._spec.is_replicated():
            x = relaid(op, x, x._spec.with_placements(index.placements))
        post, given, where = _post(op, x, index, wraps, once=_name(op) in _ADDING)
        rest = x.shape[1:] if _by_rows(op) else ()
        sent = [[part.reshape(-1, *rest) for part in s._locals] for s in sources if s.ndim]
        if where is not None:  # what goes into one place is added up before
            sent = [_added(parts, where, given) for parts in sent]
        places, *came = post.forth(op, x._spec, given, *sent)
        parts = []
        for slot, (part, at) in enumerate(_pieces(op, x, places)):
            arrived = iter(came)
            new = [next(arrived)[slot] if each.ndim else each._locals[0] for each in sources]
            own, named = filled(args, kwargs, iter((part, at, *new)))
            parts.append(op(*own, **named).view(x._locals[slot].shape))
        return wrap(x._spec, tuple(in_memory_order(x._spec, part) for part in parts))

    return _turned(op, args, kwargs, run)


def picked(op: Any, wraps: bool, *args: Any, **kwargs: Any) -> Any:
    """A call that picks by an index: what it picks comes from its owners, laid out as the index
    is."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands: list[Any] = list(tensors_in(args, kwargs))
        mesh_of(op, operands)
        x, index = operands
        out = index._spec
        rest = tuple(x.shape[1:]) if _by_rows(op) else ()
        once = prod(rest) * x.dtype.itemsize >= _WIDE
        post, given, where = _post(op, x, index, wraps, once)
        (wanted,) = post.forth(op, out, given)
        answers = []
        for piece in _pieces(op, x, wanted):
            own, named = filled(args, kwargs, iter(piece))
            answers.append(op(*own, **named))
        found = [
            torch.empty_like(new).index_copy_(0, order, new)
            for order, new in zip(post.orders, post.back(op, out, tuple(answers)), strict=True)
        ]
        if where is not None:
            found = [new[which] for new, which in zip(found, where, strict=True)]
        parts = [
            new.view(*out.local_shape(coord), *rest)
            for coord, new in zip(out.slots, found, strict=True)
        ]
        shape = (*out.shape, *rest)
        cuts = None if out.cuts is None else [*out.cuts, *[None] * len(rest)]
        meta = TensorMeta(shape, contiguous_stride(shape), x.dtype)
        return wrap(DTensorSpec(out.topology, out.placements, meta, cuts=cuts), tuple(parts))

    return _turned(op, args, kwargs, run)
