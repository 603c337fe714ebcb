"""Sorting along a sharded dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import Replicate, Shard

from ..compare import MESHES, assert_same, check, eager, ints, numbers, spread, virtual

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


def assert_sorted(x: torch.Tensor, ours: Any, dim: int) -> None:
    """Values and indices are those of a stable sort."""
    for descending in (False, True):
        want = torch.sort(x, stable=True, dim=dim, descending=descending)
        values, places = torch.sort(ours, stable=True, dim=dim, descending=descending)
        torch.testing.assert_close(values.full_tensor(), want.values, equal_nan=True)
        assert places.full_tensor().equal(want.indices)


@pytest.mark.parametrize("name", [*VECTORS, "bool"])
def test_vectors(name: str) -> None:
    x = VECTORS[name] if name in VECTORS else ints(13, high=2).bool()
    for shape, where, how in LAYOUTS:
        cuts = [(0, x.numel() - 1, 1)] if how else None
        assert_sorted(x, spread(x, virtual(*shape), where, cuts), 0)


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


def test_a_dim_out_of_range_raises() -> None:
    """PyTorch's shape function does not see it."""
    ours = spread(numbers(400), eager(8), [Shard(0)])
    for dim in (1, -2):
        with pytest.raises(IndexError, match="Dimension out of range"):
            torch.sort(ours, dim)


SPECIAL = torch.tensor([2.0, -0.0, NAN, 0.0, INF, -5.5, 2.0, -INF, NAN, 0.0, 1.25]).double()


TABLE = ints(7, 5, low=-3, high=3)


DISTINCT = numbers(7, 5)


SEQUENCE = ints(17, low=-3, high=4).sort().values


ROWS = numbers(3, 11).sort().values


ASKED = torch.tensor([[-9, -3, -2], [-1, 0, 1], [2, 3, 4], [9, 0, -3]])


PLACES = torch.tensor([2, 0, 3, 1])


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "median": (torch.median, (SPECIAL,)),
    "nanmedian": (torch.nanmedian, (SPECIAL,)),
    "median of a dim": (lambda x: x.median(0), (DISTINCT,)),
    "median of the last dim": (lambda x: x.median(-1, keepdim=True), (DISTINCT,)),
    "nanmedian of a dim": (lambda x: x.nanmedian(1), (DISTINCT,)),
    "kthvalue": (lambda x: x.kthvalue(3, 0), (DISTINCT,)),
    "kthvalue of ties": (lambda x: x.kthvalue(4, 0).values, (TABLE,)),
    "quantile": (lambda x: x.quantile(0.3, 0), (DISTINCT,)),
    "quantile of all": (lambda x: x.quantile(torch.tensor([0.0, 0.5, 1.0]).double()), (DISTINCT,)),
    "nanquantile": (lambda x: x.nanquantile(0.77, interpolation="nearest"), (SPECIAL.unique(),)),
    "mode": (lambda x: x.mode(0).values, (TABLE,)),
    "mode of the last dim": (lambda x: x.mode(-1, keepdim=True).values, (TABLE,)),
    "isin": (torch.isin, (TABLE, torch.tensor([2, -3, 7]))),
    "isin, inverted": (
        lambda x, y: torch.isin(x, y, invert=True),
        (SPECIAL, SPECIAL[2:4]),
    ),
    "searchsorted": (torch.searchsorted, (SEQUENCE, ASKED)),
    "searchsorted of rows": (torch.searchsorted, (ROWS, numbers(3, 4, seed=1))),
    "searchsorted, right": (
        lambda s, v: torch.searchsorted(s, v, side="right", out_int32=True),
        (SEQUENCE.double(), SPECIAL.double()),
    ),
    "searchsorted by order": (
        lambda s, v, o: torch.searchsorted(s, v, sorter=o),
        (torch.tensor([3.0, 9.0, -1.0, 4.0]), torch.tensor([3.5, -2.0]), PLACES),
    ),
    "bucketize": (torch.bucketize, (ASKED, SEQUENCE)),
    "cdist": (torch.cdist, (numbers(5, 3), numbers(4, 3, seed=1))),
    "pdist": (torch.pdist, (numbers(5, 3),)),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, shape: tuple[int, ...]) -> None:
    run, inputs = CASES[name]
    finite = all(bool(x.isfinite().all()) for x in inputs)
    check(run, *inputs, mesh=virtual(*shape), ops=("sum",) if finite else ())
