"""Rows by index where tensor and index are both sharded: each row moves from its owner to the rank
that has the index. The rules in `rules/indexing.py` serve all other calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch

from ..dispatch.operator import register_form
from ..errors import LayoutError, OutOfRangeError
from ..layout.geometry import contiguous_stride
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute import DimMap
from ..rules import Call
from ..rules.indexing import has_mask
from ..storage.halo import fetch_all
from ..storage.ragged import gather_plain
from ..storage.wrapper import Locals, wrap
from .mask import is_mask, masked_index

aten = torch.ops.aten


# --- owner exchange ------------------------------------------------------------------------------


def _vector_spec(
    like: DTensorSpec, shape: tuple[int, ...], dtype: torch.dtype, cuts: Sequence[int]
) -> DTensorSpec:
    """The layout of rows that are sharded on dim 0 over the axes over which `like` is sharded."""
    places = [Shard(0) if place.is_shard() else Replicate() for place in like.placements]
    meta = TensorMeta(shape, contiguous_stride(shape), dtype)
    return DTensorSpec(like.topology, places, meta, cuts=[tuple(cuts), *[None] * (len(shape) - 1)])


class Exchange(NamedTuple):
    """A vector of which each element is sent to the shard that owns it.

    It is sharded as `spec` is. `orders` sorts the elements of each local vector by owner,
    `counts[i][j]` is how many elements shard i sends to shard j.
    """

    op: Any
    spec: DTensorSpec
    orders: list[torch.Tensor]
    counts: list[list[int]]

    def send(self, vector: Sequence[torch.Tensor]) -> Locals:
        """What arrives of the vector, in order of the sending shards."""
        ordered = [part[order] for part, order in zip(vector, self.orders, strict=True)]
        return self._ship(ordered, self.counts)

    def reply(self, answers: Sequence[torch.Tensor]) -> Locals:
        """One answer for each element that arrived, in the order of the elements sent."""
        found = self._ship(answers, list(zip(*self.counts, strict=True)))
        return tuple(
            torch.empty_like(new).index_copy_(0, order, new)
            for order, new in zip(self.orders, found, strict=True)
        )

    def _ship(self, parts: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> Locals:
        cuts = [sum(row) for row in counts]
        spec = _vector_spec(self.spec, (sum(cuts), *parts[0].shape[1:]), parts[0].dtype, cuts)
        return ship(self.op, [(spec, tuple(parts), counts)])[0]


Shipment = tuple[DTensorSpec, Locals, Sequence[Sequence[int]]]
"""Rows: their layout, the local tensors, and how many of each shard's rows each shard gets."""


def ship(op: Any, shipments: Sequence[Shipment]) -> list[Locals]:
    """Send rows in one collective: what arrives at each shard, in order of the sending shards."""
    wanted = []
    for spec, parts, counts in shipments:
        for (start, _), row in zip(spec.pieces(0), counts, strict=True):
            table = tuple(pairwise([start, *(start + end for end in accumulate(row))]))
            wanted.append((spec, parts, {0: DimMap(spec.dim_axes[0], table)}))
    found = iter(fetch_all(op, wanted))
    return [
        tuple(map(torch.cat, zip(*[next(found) for _ in counts], strict=True)))
        for _, _, counts in shipments
    ]


def exchange(
    op: Any,
    index: DTensorSpec,
    indices: Sequence[torch.Tensor],
    owned: DTensorSpec,
    dim: int,
    wrapped: bool = False,
) -> Exchange:
    """The exchange of `indices` of a sharded dim of `owned`; they are sharded as `index` is.

    An index that is out of range raises on every rank. If they are `wrapped`, the size of the dim
    was added to negative ones.
    """
    stops = torch.tensor(list(accumulate(owned.dim_cuts[dim])), device=indices[0].device)
    orders, facts = [], []
    for part in indices:
        owner = torch.bucketize(part, stops, right=True).clamp_(max=len(stops) - 1)
        orders.append(owner.sort(stable=True).indices)
        limits = torch.stack(torch.aminmax(torch.cat([part, part.new_zeros(1)])))
        facts.append(torch.cat([limits, torch.bincount(owner, minlength=len(stops))]).unsqueeze(0))
    shape = (index.num_shards, len(stops) + 2)
    spec = _vector_spec(index, shape, torch.int64, [1] * index.num_shards)
    table = gather_plain(op, wrap(spec, tuple(facts))).tolist()
    low, high = min(row[0] for row in table), max(row[1] for row in table)
    size = owned.shape[dim]
    if low < 0 or high >= size:
        bad = high if high >= size else low - size * wrapped
        raise OutOfRangeError(f"index {bad} is out of bounds for dimension {dim} with size {size}")
    return Exchange(op, index, orders, [row[2:] for row in table])


def _sharded_alone(spec: DTensorSpec, dim: int) -> bool:
    """True if `dim` is the only sharded dim, and nothing is Partial."""
    own = spec.dim_axes[dim]
    return bool(own and prod(spec.shape)) and own == spec.slot_axes and not spec.sums


def _is_index(spec: DTensorSpec) -> bool:
    return spec.dtype in (torch.int64, torch.int32) and prod(spec.shape) > 0 and not spec.sums


# --- reading -------------------------------------------------------------------------------------


def _pick_cost(call: Call) -> tuple[int, ...] | None:
    """The bytes received to fetch rows from their owners: the table of counts, the indices, the
    rows. Index and tensor are sharded over the same axes."""
    indices = call.get("indices")
    by_list = isinstance(indices, (list, tuple))
    if by_list and has_mask(call):
        return ()
    if len(call.specs) != 2 or not call.specs[0].ndim:
        return None
    x, index = call.specs
    dim = next(d for d, i in enumerate(indices) if i is not None) if by_list else call.get("dim", 0)
    if not _sharded_alone(x, dim) or not _is_index(index) or index.slot_axes != x.slot_axes:
        return None
    count, row = index.num_shards, prod(x.shape) // x.shape[dim] * x.dtype.itemsize
    received = prod(index.largest_shape) * (count - 1) // count
    return 8 * (count - 1) * (count + 2), received * 8, received * row


def _pick(op: Any, x: Any, dim: int, index: Any, wraps: bool = False) -> Any:
    """The rows of `x` along `dim` that `index` names, sharded as the index is."""
    spec, at = x._spec, index._spec
    flat = [part.reshape(-1).to(torch.int64) for part in index._locals]
    if wraps:
        flat = [torch.where(part < 0, part + spec.shape[dim], part) for part in flat]
    sent = exchange(op, at, flat, spec, dim, wraps)
    wanted = sent.send(flat)
    starts = [spec.box(coord)[dim][0] for coord in spec.slots]
    answers = [
        part.movedim(dim, 0)[own - start]
        for part, own, start in zip(x._locals, wanted, starts, strict=True)
    ]
    out = _picked_spec(spec, dim, at)
    parts = [
        rows.view(*at.local_shape(coord), *rows.shape[1:])
        for coord, rows in zip(at.slots, sent.reply(answers), strict=True)
    ]
    order = [*range(at.ndim, at.ndim + dim), *range(at.ndim), *range(at.ndim + dim, out.ndim)]
    return wrap(out, tuple(part.permute(order).contiguous() for part in parts))


def _picked_spec(spec: DTensorSpec, dim: int, index: DTensorSpec) -> DTensorSpec:
    """The layout of picked rows: the dims of the index in place of the indexed one."""
    shape = (*spec.shape[:dim], *index.shape, *spec.shape[dim + 1 :])
    places: list[Placement] = [
        Shard(dim + place.dim) if isinstance(place, Shard) else place for place in index.placements
    ]
    own = index.cuts or (None,) * index.ndim
    cuts = [*[None] * dim, *own, *[None] * (spec.ndim - dim - 1)]
    meta = TensorMeta(shape, contiguous_stride(shape), spec.dtype)
    return DTensorSpec(spec.topology, places, meta, cuts=cuts)


@register_form("index_select", cost=_pick_cost)
def index_select(x: Any, dim: int, index: Any) -> Any:
    """Rows by an index of one dim."""
    return _pick(aten.index_select.default, x, dim % x.ndim, index)


@register_form("embedding", cost=_pick_cost)
def embedding(weight: Any, indices: Any, *options: Any) -> Any:
    """Rows of a table. The options are for the gradient."""
    return _pick(aten.embedding.default, weight, 0, indices)


@register_form("index", "_unsafe_index", cost=_pick_cost)
def index(x: Any, indices: Sequence[Any]) -> Any:
    """x[:, i], or what masks pick."""
    if any(map(is_mask, indices)):
        return masked_index(x, indices)
    ((dim, given),) = ((dim, each) for dim, each in enumerate(indices) if each is not None)
    return _pick(aten.index.Tensor, x, dim, given, wraps=True)


# --- one place of a dim --------------------------------------------------------------------------


@register_form("select", blocks=True)
def select(x: Any, dim: int, index: int) -> Any:
    """A slice of one place, without its dim: the slice is local, and only it moves."""
    place = index % x.shape[dim]
    return aten.squeeze.dim(aten.slice.Tensor(x, dim, place, place + 1), dim)


@register_form("unbind", blocks=True)
def unbind(x: Any, dim: int = 0) -> list[Any]:
    """Every place of a dim."""
    return [aten.select.int(x, dim, index) for index in range(x.shape[dim])]


# --- sparse gradients ----------------------------------------------------------------------------


@register_form("_sparse_coo_tensor_with_dims_and_tensors", always=True)
def sparse_gradient(
    sparse_dim: int, dense_dim: int, size: Any, indices: Any, values: Any, **named: Any
) -> Any:
    """An error: the gradient of `embedding(..., sparse=True)` would be sparse."""
    raise no_sparse_gradient(f"embedding of a table of shape {list(size)}")


def no_sparse_gradient(what: str) -> LayoutError:
    """The error for a gradient that would be sparse."""
    return LayoutError(
        f"{what}: with sparse=True its gradient is a sparse tensor, but only dense tensors can be "
        "on a mesh. Use sparse=False."
    )
