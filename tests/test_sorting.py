"""Sorting along a dim in shards: each element is moved once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from shardwise import CommDebugMode, Partial, Replicate, Shard
from shardwise.forms import sorting

from .compare import assert_same, eager, ints, numbers, spread, virtual

NAN, INF = float("nan"), float("inf")
TIES = ints(33, low=-3, high=3)
ODD = torch.tensor([2.0, -0.0, NAN, 0.0, INF, -5.5, 2.0, -INF, NAN, 0.0, 1.25])
VECTORS: dict[str, torch.Tensor] = {
    "ties": TIES.double(),
    "NaN, infinities and zeros": ODD,
    "float16": numbers(20).half(),
    "bfloat16": numbers(20).bfloat16(),
    "float64": numbers(29) * 1e9,
    "int64": TIES * (1 << 60),
    "int8": TIES.to(torch.int8) * 40,
    "uint8": (TIES + 3).to(torch.uint8) * 50,
    "one": torch.ones(1),
}
LAYOUTS: list[tuple[tuple[int, ...], Any, Any]] = [
    ((2,), (Shard(0),), None),
    ((4,), (Shard(0),), None),
    ((2, 2), (Shard(0), Shard(0)), None),
    ((2, 2), (Replicate(), Shard(0)), None),
    ((3,), (Shard(0),), "ragged"),
]

FEW_COLUMNS: list[tuple[tuple[int, ...], int]] = [
    ((1, 30), 1),
    ((2, 23), 1),
    ((23, 2), 0),
    ((3, 1, 17), 2),
    ((2, 19, 3), 1),
]


def assert_sorted(x: torch.Tensor, ours: Any, dim: int) -> None:
    """Values and places are those of a stable sort, in the layout that was given."""
    for descending in (False, True):
        want = torch.sort(x, stable=True, dim=dim, descending=descending)
        values, places = sorting.sort(ours, dim, descending)
        torch.testing.assert_close(values.full_tensor(), want.values, equal_nan=True)
        assert places.full_tensor().equal(want.indices)
        settled = tuple(Replicate() if p.is_partial() else p for p in ours.placements)
        assert values.placements == places.placements == settled
        assert values.cuts == places.cuts == ours.cuts


@pytest.mark.parametrize("name", [*VECTORS, "bool"])
def test_vectors(name: str) -> None:
    x = VECTORS[name] if name in VECTORS else ints(13, high=2).bool()
    for shape, where, how in LAYOUTS:
        cuts = [(0, x.numel() - 1, 1)] if how else None
        assert_sorted(x, spread(x, virtual(*shape), where, cuts), 0)


@pytest.mark.parametrize(("shape", "dim"), FEW_COLUMNS, ids=str)
def test_few_columns(shape: tuple[int, ...], dim: int) -> None:
    """Other dims may be in shards too, of which some are empty."""
    x = ints(*shape, low=-4, high=4).double()
    x.flatten()[::7] = NAN
    size = shape[dim]
    for mesh, where in (
        (virtual(8), [Shard(dim)]),
        (virtual(2, 2), [Shard(dim), Shard(dim)]),
        (virtual(2, 3), [Partial(), Shard(dim)]),
        *((virtual(2, 3), [Shard(d), Shard(dim)]) for d in range(x.ndim) if d != dim),
        *((virtual(3, 2), [Shard(dim), Shard(d)]) for d in range(x.ndim) if d != dim),
    ):
        assert_sorted(x, spread(x, mesh, where), dim)
    cuts = [(0, size - 3, 3, 0) if d == dim else None for d in range(x.ndim)]
    assert_sorted(x, spread(x, virtual(4), [Shard(dim)], cuts), dim - x.ndim)


def test_random_columns() -> None:
    """So many elements that samples leave some unknown."""
    drawn = random.Random(3)
    for seed in range(12):
        rows, size = drawn.choice([1, 2, 3]), drawn.choice([150, 400])
        x = numbers(rows, size, seed=seed)
        x = drawn.choice([x, x.round(), x.sort().values, x.bfloat16(), (x * 100).to(torch.int16)])
        mesh, where = drawn.choice(
            [
                (virtual(3), [Shard(1)]),
                (virtual(2, 2), [Shard(1), Shard(1)]),
                (virtual(2, 4), [Shard(0), Shard(1)]),
            ]
        )
        assert_sorted(x, spread(x, mesh, where), 1)


CALLS: dict[str, Any] = {
    "sort": lambda x: list(torch.sort(x, dim=1, stable=True)),
    "argsort": lambda x: torch.argsort(x, dim=-1, descending=True, stable=True),
    "msort": lambda x: torch.msort(x.t()),
    "topk": lambda x: list(x.topk(90, -1)),
    "smallest": lambda x: list(x.topk(200, 1, largest=False)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    """Results, strides and gradients."""
    x = numbers(2, 200)
    for shape, where in (
        ((8,), (Shard(1),)),
        ((2, 4), (Shard(1), Shard(1))),
        ((2, 4), (Shard(0), Shard(1))),
    ):
        assert_same(CALLS[name], [x], [where], eager(*shape))


SIZE = 1 << 16


@pytest.mark.parametrize("shape", [(SIZE,), (1, SIZE), (SIZE, 1), (2, SIZE // 2), (SIZE // 2, 2)])
def test_an_element_is_moved_once(shape: tuple[int, ...]) -> None:
    """Elements of 4 bytes with 2 bytes of place, and samples."""
    x = numbers(*shape, dtype=torch.float32)
    dim = shape.index(max(shape))
    given = spread(x, virtual(8), [Shard(dim)]).requires_grad_()
    with CommDebugMode() as comm:
        made: Any = torch.sort(given, dim=dim, stable=True)
    want = torch.sort(x, dim=dim, stable=True)
    assert made.values.placements == made.indices.placements == (Shard(dim),)
    assert made.values.full_tensor().equal(want.values)
    assert made.indices.full_tensor().equal(want.indices)
    assert sum(comm.bytes.values()) < 1.2 * 6 * SIZE // 8
    with CommDebugMode() as comm:
        made.values.backward(want.values)
    assert sum(comm.bytes.values()) < 1.2 * 8 * SIZE // 8
    assert given.grad.full_tensor().equal(x)


def test_ties_are_spread_over_all_ranks() -> None:
    x = ints(3 * SIZE, high=2).float()
    with CommDebugMode() as comm:
        made: Any = torch.sort(spread(x, virtual(8), [Shard(0)]), stable=True)
    assert made.indices.full_tensor().equal(torch.sort(x, stable=True).indices)
    assert sum(comm.bytes.values()) < 1.2 * 6 * x.numel() // 8


def test_many_of_the_largest_are_the_first_in_order() -> None:
    x = numbers(2, SIZE).float() + torch.arange(SIZE) / 7
    x[0, 5] = NAN
    for k, largest in ((SIZE // 10, True), (SIZE - 1, False), (SIZE, True)):
        with CommDebugMode() as comm:
            made: Any = spread(x, virtual(8), [Shard(1)]).topk(k, largest=largest)
        want = x.topk(k, largest=largest)
        torch.testing.assert_close(made.values.full_tensor(), want.values, equal_nan=True)
        torch.testing.assert_close(
            x.gather(1, made.indices.full_tensor()), want.values, equal_nan=True
        )
        assert sum(comm.bytes.values()) < 1.2 * 6 * x.numel() // 8


def test_few_elements_are_gathered() -> None:
    x = numbers(2, 64)
    with CommDebugMode() as comm:
        torch.sort(spread(x, virtual(8), [Shard(1)]))
    assert comm.get_total_counts() == 1


def test_a_dim_out_of_range_raises() -> None:
    """PyTorch's shape function does not see it."""
    ours = spread(numbers(400), eager(8), [Shard(0)])
    for dim in (1, -2):
        with pytest.raises(IndexError, match="Dimension out of range"):
            torch.sort(ours, dim)
