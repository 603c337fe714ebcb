"""Reading and writing by index where tensors are cut first."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch

from ..dispatch.fallback import mesh_of
from ..dispatch.operator import register_form
from ..dispatch.plans import tensors_in
from ..errors import LayoutError
from ..layout.geometry import contiguous_stride
from ..layout.placement import Replicate
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..rules import Call, Operand
from ..rules.indexing import of_two_shapes
from ..rules.reductions import wide
from ..storage.ragged import as_dtensor, gather_plain, move_to, reduce_partial
from ..storage.wrapper import Wrapper, wrap
from .posting import asks, picked, sends, written

__all__ = [
    "divided",
    "embedding_dense_backward",
    "frequencies",
    "gather",
    "scatter",
    "sparse_gradient",
]

aten = torch.ops.aten


def _cut(x: Any, shape: Any, skip: int | None = None) -> Any:
    """The first places of every dim, as many as `shape` has."""
    for dim, size in enumerate(shape):
        if dim != skip and x.shape[dim] != size:
            x = aten.slice.Tensor(x, dim, 0, size)
    return x


@register_form("gather", when=lambda call: of_two_shapes(call) or asks(call))
def gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """An index smaller than the tensor walks along its first places only."""
    if _are_alike(x, dim, index):
        return picked(aten.gather.default, False, x, dim, index)
    return aten.gather.default(_cut(x, index.shape, dim % x.ndim), dim, index)


for _op, _wraps in (
    (aten.index_select.default, False),
    (aten.take.default, True),
    (aten.embedding.default, False),
):
    register_form(_op._schema.name.removeprefix("aten::"), when=asks)(partial(picked, _op, _wraps))


def _are_alike(x: Any, dim: int, index: Any, *values: Any) -> bool:
    """Whether no place has to be left out: sizes are the same, but those of the indexed dim."""
    sources = [value for value in values if isinstance(value, torch.Tensor)]
    return all(source.shape == index.shape for source in sources) and all(
        size == index.shape[d] for d, size in enumerate(x.shape) if d != dim % x.ndim
    )


def scatter(write: Any, x: Any, dim: int, index: Any, value: Any, *rest: Any, **named: Any) -> Any:
    """An index smaller than the tensor or the source writes the first places only."""
    if isinstance(value, torch.Tensor):
        value = _cut(value, index.shape)
    write(_cut(x, index.shape, dim % x.ndim), dim, index, value, *rest, **named)
    return x


def _scatter_copy(copy: Any, write: Any, x: Any, *given: Any, **named: Any) -> Any:
    args = list(given)
    if _are_alike(x, *args):
        return written(copy, False, x, *args, **named)
    mesh = mesh_of(write, list(tensors_in((x, *args), {})))
    how = [value for value in (*args, *named.values()) if isinstance(value, str)]
    if how in (["amax"], ["amin"]):
        # The backward asks what equals the result: what is pending is reduced once, as a whole,
        # for two reductions in other orders may differ in the last bit.
        x, *args = [reduce_partial(write, v) if isinstance(v, Wrapper) else v for v in (x, *args)]
    return scatter(write, aten.clone.default(as_dtensor(x, mesh)), *args, **named)


def _scatter_into(copy: Any, write: Any, x: Any, *args: Any, **named: Any) -> Any:
    if _are_alike(x, *args):
        return x.copy_(written(copy, False, x, *args, **named))
    return scatter(write, x, *args, **named)


def _sends_or_cuts(call: Call) -> bool:
    return of_two_shapes(call) or sends(call)


for _name, _overloads in {
    "scatter": ("src", "value", "reduce", "value_reduce"),
    "scatter_add": ("default",),
    "scatter_reduce": ("two",),
}.items():
    for _overload in _overloads:
        _pair = [getattr(getattr(aten, each), _overload) for each in (_name, f"{_name}_")]
        for _form, _kind in ((_scatter_copy, _name), (_scatter_into, f"{_name}_")):
            register_form(f"{_kind}.{_overload}", when=_sends_or_cuts)(partial(_form, *_pair))


for _op, _wraps in (
    (aten.index_add.default, False),
    (aten.index_copy.default, False),
    (aten.index_reduce.default, False),
    (aten.index_fill.int_Scalar, True),
    (aten.index_fill.int_Tensor, True),
    (aten.put.default, True),
):
    _at = f"{_op._schema.name.removeprefix('aten::')}.{_op._overloadname or 'default'}"
    register_form(_at, when=sends)(partial(written, _op, _wraps))


def _adds_rows(call: Call) -> bool:
    """Whether the rows of a gradient go to the owners of their places: those of a table in shards,
    which is less than a pending sum of it."""
    grad, index = call.specs
    cut = any(grad.dim_axes[1:]) or any(index.dim_axes[1:]) or grad.sums or index.sums
    if not index.ndim or cut:
        return False
    rows, width, inner = prod(index.shape), grad.shape[-1], prod(index.shape[1:])
    table = (call.get("num_weights"), width)

    def spec(shape: tuple[int, ...], like: DTensorSpec | None) -> DTensorSpec:
        meta = TensorMeta(shape, contiguous_stride(shape), (like or grad).dtype)
        if like is None:
            return DTensorSpec(grad.topology, default_placements(grad.topology), meta)
        cuts = tuple(n * inner for n in like.dim_cuts[0]) if like.dim_axes[0] else None
        own = [cuts, *[None] * (len(shape) - 1)]
        return DTensorSpec(grad.topology, like.placements, meta, cuts=own)

    operands = [spec(table, None), spec((rows,), index), spec((rows, width), grad)]
    args = [Operand(0), 0, Operand(1), Operand(2)]
    return sends(Call(aten.index_add.default, args, {}, operands, [operands[0].meta]))


def _adds_or_counts(call: Call) -> bool:
    """As `_adds_rows`, and where indices have to be counted that are in shards; not where each rank
    has columns of all rows, and so all indices."""
    if not call.get("scale_grad_by_freq"):
        return _adds_rows(call)
    grad, index = call.specs
    cut = {axis for axes in (*index.dim_axes, *grad.dim_axes[:-1]) for axis in axes}
    return bool(prod(index.shape) and cut and not cut.intersection(grad.dim_axes[-1]))


def frequencies(op: Any, rows: Any, index: Any) -> Any:
    """How often an index names each of the rows, which is counted where they are; all indices are
    given to ranks that have all rows, if they are fewer."""
    spec = rows._spec
    ours = as_dtensor(index, spec.topology).reshape(-1)
    if not spec.dim_axes[0] and ours.numel() * ours.dtype.itemsize < 2 * 4 * rows.shape[0]:
        ours = as_dtensor(gather_plain(op, ours), spec.topology)
    ones = torch.ones_like(ours, dtype=torch.int32)
    counts = aten.index_add.default(ones.new_zeros(rows.shape[0]), 0, ours, ones)
    places = [place if place.is_shard(0) else Replicate() for place in spec.placements]
    cuts = [spec.dim_cuts[0] if spec.dim_axes[0] else None]
    return move_to(op, counts, counts._spec.with_placements(places, cuts))


def divided(rows: Any, counts: Any) -> Any:
    """Each row over a number of its own; a sum of rows stays pending in a product."""
    return rows * counts.to(rows.dtype).reciprocal().unsqueeze(1)


@register_form("embedding_dense_backward", first=True, when=_adds_or_counts)
def embedding_dense_backward(
    grad: Any, index: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """Rows of the gradient go to the owners of their places."""
    if scale_grad_by_freq:
        op = aten.embedding_dense_backward.default
        grad = grad.to(wide(grad.dtype))  # which holds sums of many
        made = op(grad, index, num_weights, padding_idx, False)
        return divided(made, frequencies(op, made, index).clamp(min=1))
    rows, flat = grad.reshape(-1, grad.shape[-1]), index.reshape(-1)
    if padding_idx >= 0:
        rows = rows.masked_fill((flat == padding_idx).unsqueeze(1), 0)
    shape = (num_weights, grad.shape[-1])
    meta = TensorMeta(shape, contiguous_stride(shape), grad.dtype)
    spec = DTensorSpec(grad._spec.topology, default_placements(grad._spec.topology), meta)
    one = torch.zeros((1, 1), dtype=grad.dtype, device=grad.device).expand(shape)
    return aten.index_add.default(wrap(spec, (one,) * len(spec.slots)), 0, flat, rows)


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
