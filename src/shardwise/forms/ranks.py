"""Order statistics of elements in shards: samples move, and the few elements that they leave."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from .. import policy
from .._torch import run_composite, take_composite
from ..cost import Link
from ..entry import register_form
from ..placement import Placement, Shard
from ..ragged import as_dtensor, joined, settled, whole
from ..replicated import mesh_of
from ..rules import Call, Operand
from ..spec import DTensorSpec
from ..wrapper import Wrapper
from .sampling import Search, keys_of, known, lines, narrowed, rounds
from .shards import in_line, lacking, shard_of, told

__all__ = ["kthvalue", "median", "nanmedian", "quantile"]

aten = torch.ops.aten


# --- what it costs ------------------------------------------------------------------------------


def _links(spec: DTensorSpec) -> list[Link]:
    return [spec.topology.links[axis] for axis in spec.slot_axes]


def _rounds(spec: DTensorSpec, size: int, ranks: int) -> tuple[int, list[int]]:
    """The price of finding some ranks in each row of so many elements, and the samples for it."""
    rows = prod(spec.shape) // size
    width = spec.dtype.itemsize
    return rounds(size, spec.num_shards, rows, ranks, width, _links(spec))


def _has_ranks(spec: DTensorSpec) -> bool:
    return spec.is_sharded() and prod(spec.shape) > 0 and known(spec.dtype)


def _pays(call: Call, ranks: int = 1) -> bool:
    """Whether samples are less than the tensor, if so many ranks are asked for."""
    spec = call.specs[0].reduced
    if not _has_ranks(spec):
        return False
    price, _ = _rounds(spec, prod(spec.shape), ranks)
    own = prod(spec.local_shape((0,) * spec.topology.ndim))
    nbytes = (prod(spec.shape) - own) * spec.dtype.itemsize
    return all(price + link.price(0) < link.price(nbytes) for link in _links(spec))


def _columns_pay(call: Call, ranks: int = 1) -> bool:
    """Whether only the dim that is asked for is in shards, and samples are less than what a rule
    moves."""
    spec = call.specs[0].reduced
    if not spec.ndim or not _has_ranks(spec):
        return False
    dim = call.get("dim") % spec.ndim
    if spec.num_shards != len(spec.dim_cuts[dim]):
        return False
    price, _ = _rounds(spec, spec.shape[dim], ranks)
    table = 8 * spec.num_shards * (prod(spec.shape) // spec.shape[dim])
    return all(
        price + 2 * link.price(table) < link.price(lacking(spec, dim)) for link in _links(spec)
    )


# --- elements of given ranks --------------------------------------------------------------------


def _selected(
    op: Any, x: Any, dim: int, first: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of pairs of ranks that are the same or follow each other, some for each row."""
    spec: DTensorSpec = x._spec
    own = [lines(part, dim) for part in x._locals]
    orders = [keys_of(part).sort(stable=True) for part in own]
    ordered = [part.gather(1, order.indices) for part, order in zip(own, orders, strict=True)]
    keys = [order.values for order in orders]
    search, each = Search.begin(spec.dim_cuts[dim], first, last + 1), 1
    for most in _rounds(spec, spec.shape[dim], first.shape[1])[1]:
        search = narrowed(op, spec, dim, keys, [search] * len(keys), most, each)[0]
        each = first.shape[1]
    before = search.low.sum(0)
    places = torch.stack([each.flatten() - before for each in (first, last)], 1)
    found = []
    for line, at in zip(_left(op, x, dim, ordered, search), places, strict=True):
        found.append(line[keys_of(line).sort(stable=True).indices[at.to(line.device)]])
    below, above = torch.stack(found).view(*first.shape, 2).unbind(-1)
    return below, above


def _left(
    op: Any, x: Any, dim: int, ordered: Sequence[torch.Tensor], search: Search
) -> list[torch.Tensor]:
    """For each line of a search the elements that may be what it is for, of the first shard first,
    on all ranks."""
    spec: DTensorSpec = x._spec
    row = search.row.tolist()
    parts = []
    for coord, rows in zip(spec.slots, ordered, strict=True):
        at = shard_of(spec, dim, coord)
        bounds = zip(row, search.low[at].tolist(), search.high[at].tolist(), strict=True)
        parts.append(torch.cat([rows[line, start:stop] for line, start, stop in bounds]))
    sizes = search.high - search.low
    places: list[Placement] = [Shard(0) if p.is_shard() else p for p in spec.placements]
    cuts = tuple(sizes.sum(1).tolist())
    every = whole(op, joined(op, spec.topology, places, parts, cuts=cuts))
    pieces = every.split(sizes.flatten().tolist())
    return [torch.cat(pieces[line :: len(row)]) for line in range(len(row))]


# --- median and quantiles ---------------------------------------------------------------------


def _nans(op: Any, x: Any, dim: int) -> torch.Tensor:
    """How many elements of each row are NaN."""
    if not x.dtype.is_floating_point:
        return torch.zeros(prod(x.shape) // x.shape[dim], dtype=torch.int64)
    return torch.tensor(told(op, x._spec, [lines(p.isnan(), dim).sum(-1) for p in x._locals])).sum(
        0
    )


def _middles(op: Any, x: Any, dim: int, ignore_nan: bool) -> torch.Tensor:
    """For each row the rank of its median; that of the last, which is NaN, if the median is."""
    size, missing = x.shape[dim], _nans(op, x, dim)
    none = (missing == size) if ignore_nan else (missing > 0)
    return torch.where(none, size - 1, (size - missing - 1) // 2).unsqueeze(1)


def _middle(op: Any, x: Any, ignore_nan: bool) -> Any:
    mesh = mesh_of(op, [x])
    x = in_line(op, settled(op, x))
    rank = _middles(op, x, 0, ignore_nan)
    return as_dtensor(_selected(op, x, 0, rank, rank)[0].reshape(()), mesh)


@register_form("median.default", when=_pays)
def median(x: Any) -> Any:
    """The element in the middle, the lower one of two; NaN if there is one."""
    return _middle(aten.median.default, x, False)


@register_form("nanmedian.default", when=_pays)
def nanmedian(x: Any) -> Any:
    """As `median`, of what is not NaN."""
    return _middle(aten.nanmedian.default, x, True)


def _found(
    op: Any, x: Any, dim: int, rank: int | None, keepdim: bool, ignore_nan: bool = False
) -> Any:
    """The element of a rank along a dim, and where it is first; the median if the rank is None."""
    mesh_of(op, [x])
    x = settled(op, x)
    spec, dim = x._spec, dim % x.ndim
    size = x.shape[dim]
    ranks = torch.full((prod(x.shape) // size, 1), rank or 0)
    if rank is None:
        ranks = _middles(op, x, dim, ignore_nan)
    value = _selected(op, x, dim, ranks, ranks)[0]
    keys = keys_of(value)
    own = []
    for part in x._locals:
        hits = keys_of(lines(part, dim)) == keys
        hits = torch.cat([hits, torch.ones_like(keys, dtype=torch.bool)], 1)
        own.append(hits.to(torch.int8).argmax(1))  # the size of the part if there is none
    table = torch.tensor(told(op, spec, own))
    starts, stops = torch.tensor(spec.pieces(dim)).T.unsqueeze(-1)
    places = torch.where(table < stops - starts, table + starts, size).amin(0)
    shape = _reduced(x, dim, keepdim)
    made = (value.reshape(shape), places.reshape(shape).to(x.device))
    return tuple(as_dtensor(each, spec.topology) for each in made)


def _reduced(x: Any, dim: int | None, keepdim: bool) -> list[int]:
    """The shape without a dim, or without any."""
    if dim is None:
        return [1] * x.ndim if keepdim else []
    return [*x.shape[:dim], *[1] * keepdim, *x.shape[dim + 1 :]]


@register_form("kthvalue", when=_columns_pay)
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The element of a rank, and where it is first."""
    return _found(aten.kthvalue.default, x, dim, k - 1, keepdim)


@register_form("median.dim", when=_columns_pay)
def median_of_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """As `median`, and where it is first."""
    return _found(aten.median.dim, x, dim, None, keepdim)


@register_form("nanmedian.dim", when=_columns_pay)
def nanmedian_of_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """As `nanmedian`, and where it is first."""
    return _found(aten.nanmedian.dim, x, dim, None, keepdim, True)


def quantile(
    op: Any, x: Any, q: Any, dim: int | None, keepdim: bool, interpolation: str, ignore_nan: bool
) -> Any:
    """Quantiles along a dim, or of all elements, each between two of them."""
    with policy.inside(op):
        mesh = mesh_of(op, [x])
        x = settled(op, x)
        shape = _reduced(x, dim, keepdim)
        x, dim = (in_line(op, x), 0) if dim is None else (x, dim)
        q = torch.as_tensor(q, dtype=x.dtype, device=x.device)
        missing = _nans(op, x, dim).to(x.device)
        size = torch.full_like(missing, x.shape[dim])
        last = (size - missing if ignore_nan else size) - 1
        none = (last < 0) | (missing > 0 if not ignore_nan else missing < 0)
        places = q.flatten() * last.clamp(min=0).unsqueeze(1)
        if interpolation in ("lower", "higher", "nearest"):
            how = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}
            places = how[interpolation](places)
        below, above = places.floor(), places.ceil()
        made, upper = _selected(op, x, dim, below.cpu().long(), above.cpu().long())
        if interpolation == "linear":
            made = torch.lerp(made, upper, places - below)
        elif interpolation == "midpoint":
            made = torch.lerp(made, upper, 0.5)
        made = made.masked_fill(none.unsqueeze(1), float("nan"))
        made = made.reshape([*shape, *q.shape])
        return as_dtensor(made.movedim(-1, 0) if q.ndim else made, mesh)


def _take_quantile(op: Any, ignore_nan: bool) -> None:
    def run(
        x: Any, q: Any, dim: int | None = None, keepdim: bool = False, interpolation: str = "linear"
    ) -> Any:
        ours = isinstance(x, Wrapper) and interpolation in _WAYS
        if ours and _fits(x, q, dim):
            at = None if dim is None else dim % x.ndim
            return quantile(op, x, q, at, keepdim, interpolation, ignore_nan)
        return run_composite(op, x, q, dim, keepdim, interpolation=interpolation)

    take_composite(op, run)


_WAYS = ("linear", "lower", "higher", "midpoint", "nearest")


def _fits(x: Any, q: Any, dim: int | None) -> bool:
    """Whether a call asks for a few quantiles of a tensor in shards, and for no gradient."""
    many = isinstance(q, torch.Tensor)
    if many and (isinstance(q, Wrapper) or q.dtype is not x.dtype or q.ndim > 1):
        return False
    if many and not 0 < q.numel() <= 32:
        return False
    if dim is not None and not -x.ndim <= dim < x.ndim:
        return False
    within = bool(((q >= 0) & (q <= 1)).all()) if many else 0 <= q <= 1
    graded = torch.is_grad_enabled() and (x.requires_grad or (many and q.requires_grad))
    if not within or graded or x.dtype not in (torch.float32, torch.float64):
        return False
    ranks = q.numel() if many else 1
    if dim is None:
        return _pays(Call(aten.median.default, (), {}, [x._spec], []), ranks)
    return _columns_pay(Call(aten.median.dim, (Operand(0), dim), {}, [x._spec], []), ranks)


for _name, _ignores in (("quantile", False), ("nanquantile", True)):
    for _kind in ("default", "scalar"):
        _take_quantile(getattr(getattr(aten, _name), _kind), _ignores)
