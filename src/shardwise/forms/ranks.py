"""Order statistics of elements in shards: samples move, and the few elements that they leave."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from .. import policy
from .._torch import run_composite
from ..cost import Link
from ..entry import register_composite, register_form
from ..geometry import flat_index
from ..placement import Placement, Shard
from ..ragged import as_dtensor, joined, settled, whole
from ..replicated import mesh_of
from ..rules import Call, Operand
from ..spec import DTensorSpec
from ..wrapper import Wrapper
from .sampling import Search, keys_of, known, lines, narrowed, rounds
from .shards import in_line, lacking, rows_of, shard_of, told_of_rows

__all__ = ["kthvalue", "median", "nanmedian", "quantile"]

aten = torch.ops.aten


# --- what it costs ------------------------------------------------------------------------------


def _links(spec: DTensorSpec) -> list[Link]:
    return [spec.topology.links[axis] for axis in spec.slot_axes]


def _rounds(spec: DTensorSpec, dim: int, ranks: int) -> tuple[int, list[int]]:
    """The price of finding some ranks along a dim, and the samples for it."""
    count, width = len(spec.dim_cuts[dim]), spec.dtype.itemsize
    rows = prod(max(cuts) for d, cuts in enumerate(spec.dim_cuts) if d != dim)
    groups = spec.num_shards // count
    return rounds(spec.shape[dim], count, rows, ranks, width, _links(spec), groups)


def _has_ranks(spec: DTensorSpec) -> bool:
    return spec.is_sharded() and prod(spec.shape) > 0 and known(spec.dtype)


def _pays(call: Call, ranks: int = 1) -> bool:
    """Whether samples are less than the tensor, if so many ranks are asked for."""
    spec = call.specs[0].reduced
    if not _has_ranks(spec):
        return False
    width = spec.dtype.itemsize
    price, _ = rounds(prod(spec.shape), spec.num_shards, 1, ranks, width, _links(spec))
    own = prod(spec.largest_shape)
    nbytes = (prod(spec.shape) - own) * width
    return all(price + link.price(0) < link.price(nbytes) for link in _links(spec))


def _columns_pay(call: Call, ranks: int = 1) -> bool:
    """Whether samples are less than what a rule moves."""
    spec = call.specs[0].reduced
    if not spec.ndim or not _has_ranks(spec):
        return False
    dim = call.get("dim") % spec.ndim
    if not spec.dim_axes[dim]:
        return False
    price, _ = _rounds(spec, dim, ranks)
    table = 8 * spec.num_shards * (prod(spec.shape) // spec.shape[dim])
    links = [spec.topology.links[axis] for axis in spec.dim_axes[dim]]
    return all(price + 2 * link.price(table) < link.price(lacking(spec, dim)) for link in links)


# --- elements of given ranks --------------------------------------------------------------------


def _selected(
    op: Any, x: Any, dim: int, first: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of pairs of ranks that are the same or follow each other, some for each row."""
    spec: DTensorSpec = x._spec
    own = [lines(part, dim) for part in x._locals]
    orders = [keys_of(part).sort(stable=True) for part in own]
    ordered = [part.gather(1, order.indices) for part, order in zip(own, orders, strict=True)]
    held = rows_of(spec, dim)
    searches = []
    for coord in spec.slots:
        rows = held[flat_index(coord, spec.topology.shape, spec.slot_axes)]
        searches.append(Search.begin(spec.dim_cuts[dim], first[rows], last[rows] + 1))
    count, each = first.shape[1], 1
    for most in _rounds(spec, dim, count)[1]:
        keys = [order.values for order in orders]
        searches = narrowed(op, spec, dim, keys, searches, most, each)
        each = count
    near: list[list[tuple[int, int]]] = [[] for _ in first]
    for shard, rows in enumerate(held):
        for spot, row in enumerate(rows.tolist()):
            near[row].append((shard, spot))
    spans = _spans(op, spec, dim, searches, count)
    left = _left(op, spec, ordered, spans)
    found = []
    for row, ranks in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        for at, (low, high) in enumerate(zip(*ranks, strict=True)):
            line = torch.cat([left[shard][spot * count + at] for shard, spot in near[row]])
            before = sum(int(spans[shard, spot, at, 0]) for shard, spot in near[row])
            order = keys_of(line).sort(stable=True).indices
            found.append(line[order[[low - before, high - before]]])
    below, above = torch.stack(found).view(*first.shape, 2).unbind(-1)
    return below, above


def _spans(
    op: Any, spec: DTensorSpec, dim: int, searches: Sequence[Search], count: int
) -> torch.Tensor:
    """For each shard, each of its rows and each rank, from where to where elements are left."""
    tables: list[torch.Tensor] = [
        torch.stack([s.low, s.high], -1).unflatten(1, (-1, count)) for s in searches
    ]
    if spec.num_shards == len(spec.dim_cuts[dim]):
        return tables[0]
    own = [
        table[shard_of(spec, dim, coord)] for table, coord in zip(tables, spec.slots, strict=True)
    ]
    return told_of_rows(op, spec, dim, own)


def _left(
    op: Any, spec: DTensorSpec, ordered: Sequence[torch.Tensor], spans: torch.Tensor
) -> list[Sequence[torch.Tensor]]:
    """For each shard what is left of its rows, for each rank, on all ranks."""
    parts = []
    for coord, rows in zip(spec.slots, ordered, strict=True):
        own = spans[flat_index(coord, spec.topology.shape, spec.slot_axes)].tolist()
        pieces = [row[a:b] for row, some in zip(rows, own, strict=False) for a, b in some]
        parts.append(torch.cat(pieces) if pieces else rows.flatten())
    places: list[Placement] = [Shard(0) if p.is_shard() else p for p in spec.placements]
    sizes = spans.diff().flatten(1).tolist()
    cuts = tuple(map(sum, sizes))
    every = whole(op, joined(op, spec.topology, places, parts, cuts=cuts))
    return [part.split(own) for part, own in zip(every.split(cuts), sizes, strict=True)]


# --- median and quantiles ---------------------------------------------------------------------


def _nans(op: Any, x: Any, dim: int) -> torch.Tensor:
    """How many elements of each row are NaN."""
    counts = torch.zeros(prod(x.shape) // x.shape[dim], dtype=torch.int64)
    if x.dtype.is_floating_point:
        own = [lines(part.isnan(), dim).sum(-1) for part in x._locals]
        table = told_of_rows(op, x._spec, dim, own)
        for rows, some in zip(rows_of(x._spec, dim), table, strict=True):
            counts[rows] += some[: len(rows)]
    return counts


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
    keys, held = keys_of(value), rows_of(spec, dim)
    own = []
    for coord, part in zip(spec.slots, x._locals, strict=True):
        mine = keys[held[flat_index(coord, spec.topology.shape, spec.slot_axes)].to(part.device)]
        hits = keys_of(lines(part, dim)) == mine
        hits = torch.cat([hits, torch.ones_like(mine, dtype=torch.bool)], 1)
        first = hits.to(torch.int8).argmax(1)
        start, stop = spec.box(coord)[dim]
        own.append(torch.where(first < stop - start, first + start, size))
    places = torch.full((len(keys),), size)
    for rows, some in zip(held, told_of_rows(op, spec, dim, own), strict=True):
        places[rows] = places[rows].minimum(some[: len(rows)])
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


_PLACES = torch.float64 if torch.arange(21.0).quantile(0.3, interpolation="higher") > 6 else None
"""The dtype in which PyTorch finds the places of quantiles, if not that of the tensor: newer
versions know that 20 * 0.3 in single precision is more than 6."""


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
        places = q.flatten().to(_PLACES or x.dtype) * last.clamp(min=0).unsqueeze(1)
        if interpolation in ("lower", "higher", "nearest"):
            how = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}
            places = how[interpolation](places)
        below, above = places.floor(), places.ceil()
        made, upper = _selected(op, x, dim, below.cpu().long(), above.cpu().long())
        if interpolation == "linear":
            made = torch.lerp(made, upper, (places - below).to(x.dtype))
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

    register_composite(op, run)


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
