"""Reading and writing by index where tensors are cut first, and gradients that are sparse."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..entry import register_form
from ..plans import tensors_in
from ..ragged import as_dtensor, settled, whole
from ..replicated import mesh_of
from ..rules import Call
from ..rules.indexing import of_two_shapes
from ..wrapper import Wrapper
from .posting import asks, picked, sends, written

__all__ = ["gather", "index_select", "scatter", "scatter_", "scatter_copy", "sparse_gradient"]

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
    if x.ndim == 1:
        return picked(aten.gather.default, x, index, wraps=False)
    return aten.gather.default(_cut(x, index.shape, dim % x.ndim), dim, index)


@register_form("index_select", when=asks)
def index_select(x: Any, dim: int, index: Any) -> Any:
    """Elements of a vector come from their owners."""
    return picked(aten.index_select.default, x, index, wraps=False)


def scatter(write: Any, x: Any, dim: int, index: Any, value: Any, *rest: Any, **named: Any) -> Any:
    """An index smaller than the tensor or the source writes the first places only."""
    if isinstance(value, torch.Tensor):
        value = _cut(value, index.shape)
    write(_cut(x, index.shape, dim % x.ndim), dim, index, value, *rest, **named)
    return x


def _scatter_copy(write: Any, x: Any, *given: Any, **named: Any) -> Any:
    args = list(given)
    mesh = mesh_of(write, list(tensors_in((x, *args), {})))
    how = [value for value in (*args, *named.values()) if isinstance(value, str)]
    if how in (["amax"], ["amin"]):
        # The backward asks what equals the result: what is pending is reduced once, as a whole,
        # for two reductions in other orders may differ in the last bit.
        x, *args = [settled(write, v) if isinstance(v, Wrapper) else v for v in (x, *args)]
    return scatter(write, aten.clone.default(as_dtensor(x, mesh)), *args, **named)


for _name, _overloads in {
    "scatter": ("value", "reduce", "value_reduce"),
    "scatter_add": ("default",),
    "scatter_reduce": ("two",),
}.items():
    for _overload in _overloads:
        _write = getattr(getattr(aten, f"{_name}_"), _overload)
        register_form(f"{_name}.{_overload}", when=of_two_shapes)(partial(_scatter_copy, _write))
        register_form(f"{_name}_.{_overload}", when=of_two_shapes)(partial(scatter, _write))


def _sends_or_cuts(call: Call) -> bool:
    return of_two_shapes(call) or sends(call)


@register_form("scatter.src", when=_sends_or_cuts)
def scatter_copy(x: Any, dim: int, index: Any, src: Any) -> Any:
    """Elements of a vector go to their owners."""
    if x.ndim == 1 and index.shape == src.shape:
        return written(aten.scatter.src, x, index, src)
    return _scatter_copy(aten.scatter_.src, x, dim, index, src)


@register_form("scatter_.src", when=_sends_or_cuts)
def scatter_(x: Any, dim: int, index: Any, src: Any) -> Any:
    """As `scatter_copy`, into the tensor."""
    if x.ndim == 1 and index.shape == src.shape:
        return x.copy_(written(aten.scatter_.src, x, index, src))
    return scatter(aten.scatter_.src, x, dim, index, src)


@register_form("_sparse_coo_tensor_with_dims_and_tensors", always=True)
def sparse_gradient(
    sparse_dim: int, dense_dim: int, size: Any, indices: Any, values: Any, **named: Any
) -> Any:
    """The gradient of `embedding(..., sparse=True)`: plain, the same on every rank."""
    op = aten._sparse_coo_tensor_with_dims_and_tensors.default
    return op(sparse_dim, dense_dim, size, whole(op, indices), whole(op, values), **named)
