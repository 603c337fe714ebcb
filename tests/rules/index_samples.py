"""Sample calls of the operators that read and write by index."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .samples import BOOL, C128, I64, Sample, aten, call, index, x


def _reads() -> Iterator[Sample]:
    for dtype in (torch.float64, I64, BOOL, C128):
        yield call(aten.gather.default, x(5, 3, dtype=dtype), 0, index(4, 3, below=5))
    yield call(aten.gather.default, x(5, 3, 4), -2, index(5, 2, 4, below=3))
    yield call(aten.gather.default, x(5, 3), 1, index(4, 2, below=3))  # smaller than the tensor
    yield call(aten.gather.default, x(5, 3), 0, index(0, 3, below=5))
    yield call(aten.gather.default, x(5).sum(), 0, index(1, below=1))
    yield call(aten.gather.default, x(4), 0, torch.tensor(2))
    yield call(aten.gather.default, x(5), 0, index(2, 0, below=5))
    for dim in (0, -1):
        yield call(aten.index_select.default, x(5, 3), dim, index(4, below=3))
    yield call(aten.index_select.default, x(4, 0), 0, index(3, below=4))
    yield call(aten.index_select.default, x(5, 3), 1, torch.tensor(2))
    yield call(aten.index_select.default, x(1).sum(), 0, torch.tensor([0]))
    wrapped = index(4, 2, below=5) - 5
    for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
        yield call(op, x(5, 3), [index(4, below=5)])
        yield call(op, x(5, 3), [None, index(2, 2, below=3)])
        yield call(op, x(5, 3, 4), [wrapped, None, index(2, below=4)])
        yield call(op, x(5, 3, 4), [None, index(4, 1, below=3), index(2, below=4)])
    yield call(aten.index.Tensor, x(5, 3), [torch.tensor(2), index(3, below=3)])
    yield call(aten.index.Tensor, x(5, 3), [torch.tensor(2), torch.tensor(-1)])
    yield call(aten.index.Tensor, x(5, 3, dtype=BOOL), [index(0, below=1)])
    yield call(aten.index.Tensor, x(6, 4).t(), [index(3, 2, below=4).int()])


def _scatters() -> Iterator[Sample]:
    own = torch.tensor([[3, 0, 1, 2], [0, 4, 2, 3], [4, 1, 0, 2]]).t().contiguous()  # (4, 3)
    for op in (aten.scatter.src, aten.scatter_.src):
        yield call(op, x(5, 3), 0, own, x(4, 3, shift=2))
    yield call(aten.scatter.src, x(3, 5).t(), 0, own, x(4, 3, shift=2))
    yield call(aten.scatter_.src, x(3, 5).t(), 0, own, x(4, 3, shift=2))
    yield call(aten.scatter.src, x(5, 3), 0, own[:, :2], x(5, 4, shift=2))
    for value in (0, 1.5):
        yield call(aten.scatter.value, x(5, 3), -2, own, value)
    yield call(aten.scatter.value, x(3).sum(), 0, torch.tensor([0]), 2.0)
    repeated = index(4, 3, below=5)
    for how in ("add", "multiply"):
        yield call(aten.scatter.reduce, x(5, 3), 0, repeated, x(4, 3, shift=2), reduce=how)
        yield call(aten.scatter.value_reduce, x(5, 3), 0, repeated, 2.0, reduce=how)
    for op in (aten.scatter_add.default, aten.scatter_add_.default):
        yield call(op, x(5, 3), 0, repeated, x(4, 3, shift=2))
    yield call(
        aten.scatter_add.default, x(5, 3, dtype=I64), 1, index(5, 4, below=3), x(5, 4, dtype=I64)
    )
    yield call(aten.scatter_add.default, x(3, 5), 1, index(3, 0, below=3), x(3, 4))
    for how in ("sum", "prod", "mean", "amax", "amin"):
        for keep in (True, False):
            args = (x(5, 3), 0, repeated, x(4, 3, shift=2), how)
            yield call(aten.scatter_reduce.two, *args, include_self=keep)
            yield call(aten.scatter_reduce_.two, *args, include_self=keep)


def _rows() -> Iterator[Sample]:
    once, some = torch.tensor([3, 0, 4]), index(4, below=5)
    for op in (aten.index_add.default, aten.index_add_.default):
        yield call(op, x(5, 3), 0, some, x(4, 3, shift=1))
    yield call(aten.index_add.default, x(3, 5), -1, some, x(3, 4), alpha=2)
    yield call(aten.index_add.default, x(5), 0, torch.tensor(2), x(1))
    for op in (aten.index_copy.default, aten.index_copy_.default):
        yield call(op, x(5, 3), 0, once, x(3, 3, shift=1))
        yield call(op, x(3, 5).t(), 0, once, x(3, 3, shift=1))
    for value in (0, 2.5):
        yield call(aten.index_fill.int_Scalar, x(5, 3), 0, some - 5, value)
    yield call(aten.index_fill_.int_Scalar, x(3, 5), 1, some, 1)
    yield call(aten.index_fill.int_Tensor, x(5, 3), 0, some, torch.tensor(2.5, dtype=torch.float64))
    for how in ("prod", "mean", "amax", "amin"):
        for keep in (True, False):
            args = (x(5, 3), 0, some, x(4, 3, shift=1), how)
            yield call(aten.index_reduce.default, *args, include_self=keep)


def _puts() -> Iterator[Sample]:
    once, some = torch.tensor([3, 0, -1]), index(4, below=5)
    for op in (aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default):
        yield call(op, x(5, 3), [once], x(3, 3, shift=1))
        yield call(op, x(5, 3), [some], x(4, 3, shift=1), True)
    yield call(aten._index_put_impl_.default, x(5, 3), [some], x(4, 3, shift=1), True)
    yield call(aten.index_put.default, x(5, 3), [once], x(3, shift=1))
    yield call(aten.index_put.default, x(5, 3), [once], x(1).sum())
    yield call(
        aten.index_put.default, x(4, 5, 3), [None, once.view(3, 1), index(2, below=3)], x(3, 1)
    )
    yield call(aten.index_put.default, x(5, 3, 4), [some, None, index(4, below=4)], x(4, 3), True)
    yield call(aten.index_put.default, x(4, 5, 3), [None, some], x(4, 4, 3), True)
    yield call(aten.index_put.default, x(5, 3, dtype=BOOL), [once], x(3, 3, dtype=BOOL, shift=1))
    yield call(aten.index_put.default, x(5, 3), [torch.tensor(2), torch.tensor(-1)], x(1).sum())


def _masks() -> Iterator[Sample]:
    half = torch.tensor(0.5, dtype=torch.float64)
    for op in (aten.masked_fill.Tensor, aten.masked_fill_.Tensor):
        yield call(op, x(5, 3), x(5, 3, dtype=BOOL), half)
        yield call(op, x(5, 3), x(3, dtype=BOOL), half)


def _search() -> Iterator[Sample]:
    edges = torch.tensor([-2.0, -0.5, 0.0, 0.0, 1.0], dtype=torch.float64)
    values = x(4, 3)
    for right in (False, True):
        yield call(aten.bucketize.Tensor, values, edges, right=right)
        yield call(aten.searchsorted.Tensor, edges, values, right=right)
    yield call(aten.bucketize.Tensor, torch.tensor(0.5), edges, out_int32=True)
    yield call(aten.searchsorted.Tensor, x(4, 5).sort().values, values, side="right")
    yield call(aten.searchsorted.Scalar, edges, 0.0)
    yield call(aten.searchsorted.Tensor, edges.flip(0), values, sorter=torch.arange(4, -1, -1))


def index_samples() -> list[Sample]:
    """All samples of operators that read and write by index."""
    parts = (_reads, _scatters, _rows, _puts, _masks, _search)
    return [sample for part in parts for sample in part()]
