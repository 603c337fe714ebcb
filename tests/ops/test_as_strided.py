"""Operators that go by memory leave shape, strides and values as one device leaves them."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.errors import LayoutError

from ..compare import check, ints, numbers, virtual

X = numbers(6, 5)


def in_place(name, *args):
    def f(x):
        y = x.clone()
        assert getattr(y, name)(*args) is y
        y.mul_(2)
        return [y, y + 1]

    return f


def write_by_strides(x):
    y = x.clone()
    y.as_strided((3,), (6,), 2).fill_(7)
    return y


VIEWS = {
    "t_": (in_place("t_"), X),
    "transpose_": (in_place("transpose_", 0, -1), X),
    "swapaxes_": (in_place("swapaxes_", 1, 0), X),
    "swapdims_": (in_place("swapdims_", 1, 0), X),
    "squeeze_": (in_place("squeeze_"), numbers(1, 6, 1)),
    "squeeze_ one": (in_place("squeeze_", 0), numbers(1, 6, 1)),
    "squeeze_ none": (in_place("squeeze_", 1), numbers(1, 6, 1)),
    "unsqueeze_": (in_place("unsqueeze_", -1), X),
    "as_strided_": (in_place("as_strided_", (2, 3), (1, 2)), X),
    "as_strided": (
        lambda x: [
            x.as_strided((3, 2), (5, 2), 3),
            x.as_strided((4, 4), (1, 2)),
            x[2:].as_strided((2,), (0,)),
        ],
        X,
    ),
    "as_strided of views": (
        lambda x: [x.t().as_strided((3, 2), (5, 2)), x[:, ::2].as_strided((3, 2), (5, 2))],
        X,
    ),
    "as_strided_copy": (lambda x: torch.as_strided_copy(x, (2, 2), (1, 2), 1), X),
    "as_strided_scatter": (
        lambda x, y: torch.as_strided_scatter(x, y, (3, 2), (5, 2), 3),
        X,
        numbers(3, 2),
    ),
    "written by strides": (write_by_strides, X),
    "masked_fill_": (lambda x: [x.clone().masked_fill_(x > 0, 3.0), x.masked_fill(x < 0, 0)], X),
}
SIZES = {
    "resize_": (
        lambda x: [x.clone().resize_(5, 6), x.clone().resize_(10), x.clone().resize_(6, 5)],
        X,
    ),
    "resize_ of a transposed": (lambda x: x.t().clone().resize_(2, 12), X),
    "resize_ larger": (lambda x: [x.clone().resize_(7, 5)[:6], x.clone().resize_(40)[:30]], X),
    "resize_ to channels last": (
        lambda x: x.clone().resize_(2, 3, 2, 2, memory_format=torch.channels_last),
        numbers(3, 2, 2, 2),
    ),
    "resize_as_": (lambda x: x.clone().resize_as_(x[:, 1:]), X),
    "set_": (lambda x: [x.clone().set_(x[1:].clone()), x.clone().set_()], X),
    "chunk_cat": (lambda x: torch._chunk_cat([x, x[1:, :2], x[:1]], 0, 4), X),
    "chunk_cat inside": (lambda x: torch._chunk_cat([x, x[:, :3]], 1, 2), ints(4, 5, 3)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_by_memory(name):
    f, *inputs = VIEWS[name]
    for shape, limit in (((2,), 3), ((2, 2), 2)):
        check(f, *inputs, mesh=virtual(*shape), limit=limit, mixed=False)


@pytest.mark.parametrize("name", SIZES)
def test_other_sizes(name):
    f, *inputs = SIZES[name]
    for shape, limit in (((2,), 3), ((2, 2), 2)):
        check(f, *inputs, mesh=virtual(*shape), limit=limit, grad=False)


def test_a_tensor_keeps_its_layout():
    x = sw.distribute_tensor(X, virtual(2), [Shard(0)])
    assert x.resize_(10, 3).placements == (Shard(0),)
    assert x.as_strided_((4, 2), (2, 1)).placements == (Shard(0),)
    assert x.t_().placements == (Shard(1),)
    with pytest.raises(LayoutError, match="is a view"):
        x.resize_(8)
    x = sw.distribute_tensor(X.t().contiguous(), virtual(2), [Shard(1)])
    assert x.resize_(8).placements == (Replicate(),)


def test_a_change_of_shape_in_place_moves_nothing():
    x = sw.distribute_tensor(X, virtual(2), [Shard(0)])
    with sw.communication("error", fallback="error"), sw.CommDebugMode() as comm:
        x.t_().unsqueeze_(0).transpose_(0, 1)
        x.data = x.squeeze(1) * 2
    assert not comm.bytes
    assert x.full_tensor().equal(2 * X.t())


def test_memory_that_is_not_the_tensors_is_an_error():
    x = sw.distribute_tensor(X, virtual(2), [Shard(0)])
    with pytest.raises(LayoutError, match="knows only the memory of its own elements"):
        x[2:].as_strided((2,), (1,), 0)  # on one device these are elements of x
    with pytest.raises(LayoutError, match="knows only the memory of its own elements"):
        x[:, ::2].as_strided((2,), (1,))
    with pytest.raises(LayoutError, match="is a view"):
        x[2:].resize_(2)
    with pytest.raises(LayoutError, match="no storage of its own"):
        x.set_(torch.zeros(3).untyped_storage())


@pytest.mark.parametrize("shard", [Replicate(), Shard(0), Shard(1)])
def test_strides_of_a_slice_count_from_the_slice(shard):
    """Its offsets count from the memory of the base: right, or an error."""
    mesh, part = virtual(2), -numbers(2, 5, seed=1)
    for place in (Replicate(), Shard(0), Shard(1)):
        given = [sw.distribute_tensor(t, mesh, [p]) for t, p in ((X, place), (part, shard))]
        for offset in ((), (0,), (5,), (7,)):
            size = (2, 5), (5, 1)
            want = torch.as_strided_scatter(X[1:], part, *size, *offset)
            try:
                made = torch.as_strided_scatter(given[0][1:], given[1], *size, *offset)
            except LayoutError:
                continue
            assert made.full_tensor().equal(want), (place, offset)
