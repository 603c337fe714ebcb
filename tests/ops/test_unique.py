"""The different elements and runs of sharded tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from shardwise import Replicate, Shard, ragged_results

from ..compare import eager, ints, numbers, spread, virtual

NAN = float("nan")
EVERY = partial(torch.unique, return_inverse=True, return_counts=True)
ZEROS = numbers(400).round(decimals=1)
TENSORS: dict[str, torch.Tensor] = {
    "all different": numbers(500, dtype=torch.float32),
    "pairs in all shards": ints(250, high=10**6).repeat(2),
    "zeros of both signs": torch.where(ZEROS == 0, -0.0, ZEROS),
    "bfloat16": numbers(2, 300).bfloat16(),
    "int16": ints(600, low=-(1 << 15), high=1 << 15).to(torch.int16),
    "matrix": ints(3, 200, high=1 << 40),
}
LAYOUTS: list[tuple[tuple[int, ...], Any]] = [
    ((8,), (Shard(-1),)),
    ((2, 4), (Shard(-1), Shard(0))),
    ((2, 4), (Replicate(), Shard(-1))),
]


def assert_unique(x: torch.Tensor, mesh: Any, where: Any) -> None:
    """Values, inverse and counts are those of one device."""
    with ragged_results():
        made = EVERY(spread(x, mesh, where))
        alone = torch.unique(spread(x, mesh, where))
    for got, want in zip((*made, alone), (*EVERY(x), x.unique()), strict=True):
        assert got.dtype == want.dtype and got.full_tensor().equal(want)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str) -> None:
    for shape, where in LAYOUTS:
        assert_unique(TENSORS[name], eager(*shape), where)


def test_every_nan_is_another() -> None:
    x = numbers(300)
    x[::3] = NAN
    with ragged_results():
        values, where, counts = (e.full_tensor() for e in EVERY(spread(x, eager(8), [Shard(0)])))
    want = EVERY(x)
    torch.testing.assert_close(values, want[0], equal_nan=True)
    torch.testing.assert_close(values[where], x, equal_nan=True)
    assert counts.equal(want[2]) and len(where.unique()) == len(x)


@pytest.mark.parametrize("shape", [(1, 60), (1, 1, 20, 3)], ids=str)
def test_runs_in_a_tensor_that_is_one_row(shape: tuple[int, ...]) -> None:
    x = ints(*shape, high=3)
    run = partial(torch.unique_consecutive, return_inverse=True, return_counts=True)
    dim = shape.index(max(shape))
    for cuts in (None, [(1, 0, shape[dim] - 2, 1) if d == dim else None for d in range(x.ndim)]):
        ours = spread(x, virtual(4), [Shard(dim)], cuts)
        with ragged_results():
            made = run(ours)
        for got, want, plain in zip(made, run(x), run(ours), strict=True):
            assert got.full_tensor().equal(want) and plain.full_tensor().equal(want)
            assert plain.stride() == want.stride()


@pytest.mark.parametrize("shape", [(2, 400), (3, 2, 90, 2), (2, 3)], ids=str)
def test_runs_in_rows_that_are_cut(shape: tuple[int, ...]) -> None:
    run = partial(torch.unique_consecutive, return_inverse=True, return_counts=True)
    dim = shape.index(max(shape))
    cuts = [(1, 0, shape[dim] - 2, 1) if d == dim else None for d in range(len(shape))]
    few = torch.arange(shape[0] * shape[1]).view(shape[0], -1)
    few = (few // 70).to(torch.float64) if len(shape) == 2 else torch.zeros(shape)
    for x in (ints(*shape, high=2), few):
        for where in (None, cuts):
            ours = spread(x, virtual(4), [Shard(dim)], where)
            made = run(ours)
            for got, want in zip(made, run(x), strict=True):
                assert got.full_tensor().equal(want) and got.stride() == want.stride()
    x = numbers(2, 400).round()
    x[:, ::7] = NAN
    got, want = run(spread(x, virtual(2, 2), [Shard(1), Shard(1)])), run(x)
    for value, other in zip(got, want, strict=True):
        torch.testing.assert_close(value.full_tensor(), other, equal_nan=True)


def test_runs_of_a_vector_along_its_dim() -> None:
    """What was not asked for is not given, so that it need not move; along other dims it is."""
    x = ints(400, high=2)
    ours, op = spread(x, virtual(4), [Shard(0)]), torch.ops.aten.unique_consecutive.default
    for flags in ((False, False), (True, False), (False, True), (True, True)):
        for dim in (None, 0, -1):
            for got, want in zip(op(ours, *flags, dim), op(x, *flags, dim), strict=True):
                assert got.full_tensor().equal(want)
