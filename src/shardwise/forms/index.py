"""Rows by index where tensor and index are both sharded: each row moves between its owner and the
rank that has the index. The rules in `rules/indexing.py` serve all other calls."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..dispatch.fallback import mesh_of
from ..dispatch.operator import register_form
from ..errors import LayoutError
from ..layout.geometry import contiguous_stride
from ..layout.placement import Placement, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..rules import Call
from ..rules.indexing import has_mask
from ..storage.ragged import as_dtensor, move_to
from ..storage.wrapper import wrap
from .exchange import exchange, exchange_cost, index_dtype
from .mask import is_mask, masked_index

aten = torch.ops.aten


def _sharded_alone(spec: DTensorSpec, dim: int) -> bool:
    """True if `dim` is the only sharded dim, and nothing is Partial."""
    own = spec.dim_axes[dim]
    return bool(own and prod(spec.shape)) and own == spec.slot_axes and not spec.sums


def _row_bytes(spec: DTensorSpec, dim: int) -> int:
    return prod(spec.shape) // spec.shape[dim] * spec.dtype.itemsize


def _is_index(spec: DTensorSpec) -> bool:
    return spec.dtype in (torch.int64, torch.int32) and prod(spec.shape) > 0 and not spec.sums


# --- reading -----------------------------------------------------------------------------------


def _index_cost(call: Call) -> tuple[int, ...] | None:
    return () if has_mask(call) else _pick_cost(call)


def _pick_cost(call: Call) -> tuple[int, ...] | None:
    """The cost of fetching rows from their owners: index and tensor are sharded on one axis set."""
    if len(call.specs) != 2 or not call.specs[0].ndim:
        return None
    x, index = call.specs
    dim = _indexed_dim(call) % x.ndim
    if not _sharded_alone(x, dim) or not _is_index(index) or index.slot_axes != x.slot_axes:
        return None
    return exchange_cost(index, index_dtype(x.shape[dim]).itemsize, _row_bytes(x, dim))


def _indexed_dim(call: Call) -> int:
    indices = call.get("indices")
    if isinstance(indices, (list, tuple)):
        return next(dim for dim, each in enumerate(indices) if each is not None)
    return call.get("dim") or 0


def _pick(op: Any, x: Any, dim: int, index: Any, wraps: bool = False) -> Any:
    """The rows of `x` along `dim` that `index` names, sharded as the index is."""
    spec, at = x._spec, index._spec
    flat = [part.reshape(-1).to(torch.int64) for part in index._locals]
    if wraps:
        flat = [torch.where(part < 0, part + spec.shape[dim], part) for part in flat]
    sent = exchange(op, at, flat, spec, dim, wraps)
    (wanted,) = sent.send([part.to(index_dtype(spec.shape[dim])) for part in flat])
    starts = [spec.box(coord)[dim][0] for coord in spec.slots]
    answers = [
        part.movedim(dim, 0)[own.to(torch.int64) - start]
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


@register_form("index", "_unsafe_index", cost=_index_cost)
def index(x: Any, indices: Sequence[Any]) -> Any:
    """x[:, i], or what masks pick."""
    if any(map(is_mask, indices)):
        return masked_index(x, indices)
    ((dim, given),) = ((dim, each) for dim, each in enumerate(indices) if each is not None)
    return _pick(aten.index.Tensor, x, dim, given, wraps=True)


# --- writing -----------------------------------------------------------------------------------


def _add_cost(call: Call) -> tuple[int, ...] | None:
    """The cost of sending rows to their owners: tensor and rows are sharded on one axis set."""
    x, index, source = call.specs
    if not x.ndim or source.ndim != x.ndim or not _is_index(index):
        return None
    dim = call.get("dim") % x.ndim
    if not _sharded_alone(x, dim) or not _sharded_alone(source, dim):
        return None
    if x.slot_axes != source.slot_axes:
        return None
    like = index.with_placements(_as_index(source), [source.dim_cuts[dim]])
    if index is not like and not index.is_replicated():
        return None
    width = index_dtype(x.shape[dim]).itemsize + _row_bytes(source, dim)
    return exchange_cost(like, width)


def _as_index(source: DTensorSpec) -> list[Placement]:
    return [Shard(0) if place.is_shard() else place for place in source.placements]


@register_form("index_add", cost=_add_cost)
def index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    """Each rank adds the rows that it is sent."""
    op = aten.index_add.default
    mesh, dim = mesh_of(op, [x, index, source]), dim % x.ndim
    x, index, source = (as_dtensor(each, mesh) for each in (x, index, source))
    spec, cuts = x._spec, [source._spec.dim_cuts[dim]]
    index = move_to(op, index, index._spec.with_placements(_as_index(source._spec), cuts))
    sent = exchange(op, index._spec, [part.to(torch.int64) for part in index._locals], spec, dim)
    narrow = [part.to(index_dtype(spec.shape[dim])) for part in index._locals]
    wanted, came = sent.send(narrow, [part.movedim(dim, 0) for part in source._locals])
    parts = []
    for coord, part, own, new in zip(spec.slots, x._locals, wanted, came, strict=True):
        at = own.to(torch.int64) - spec.box(coord)[dim][0]
        parts.append(part.index_add(dim, at, new.movedim(0, dim), alpha=alpha))
    return wrap(spec, tuple(parts))


# --- one place of a dim ------------------------------------------------------------------------


@register_form("select", blocks=True)
def select(x: Any, dim: int, index: int) -> Any:
    """A slice of one place, without its dim: the slice is local, and only it moves."""
    place = index % x.shape[dim]
    return aten.squeeze.dim(aten.slice.Tensor(x, dim, place, place + 1), dim)


@register_form("select_copy", blocks=True)
def select_copy(x: Any, dim: int, index: int) -> Any:
    """As `select`, but never an alias."""
    return select(x, dim, index).clone()


@register_form("select_scatter")
def select_scatter(x: Any, src: Any, dim: int, index: int) -> Any:
    """A slice of one place is replaced, so that only its owner needs the source."""
    place = index % x.shape[dim]
    row = aten.unsqueeze.default(src, dim % x.ndim)
    return aten.slice_scatter.default(x, row, dim, place, place + 1)


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
