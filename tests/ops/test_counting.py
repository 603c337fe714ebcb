"""Counting, and results whose size depends on values, against plain PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from shardwise import Shard, distribute_tensor, ragged_results

from ..compare import check, ints, numbers, virtual

X, POINTS = numbers(7, 4), numbers(9, 2)
VALUES, LINE = ints(7, 4, high=3), ints(9, high=3)
EDGES = numbers(6, seed=3).sort().values
EVERY = {"return_inverse": True, "return_counts": True}
LONG = ints(2, 90, high=2)
NAN = torch.where(LINE == 1, float("nan"), LINE.to(torch.float64))


def points(x: Any, *rest: Any, **options: Any) -> list[Any]:
    counts, edges = torch.histogramdd(x, *rest, **options)
    return [counts, *edges]


CASES: dict[str, tuple[Any, ...]] = {
    "unique": (torch.unique, VALUES),
    "unique of all": (partial(torch.unique, **EVERY), VALUES),
    "unique of nan": (partial(torch.unique, **EVERY), NAN),
    "unique of nothing": (torch.unique, LINE[:0]),
    "unique along 0": (partial(torch.unique, dim=0, **EVERY), VALUES[:, :2].clone()),
    "unique along -1": (partial(torch.unique, dim=-1, **EVERY), VALUES[:, :2].t().contiguous()),
    "unique_consecutive": (partial(torch.unique_consecutive, **EVERY), VALUES),
    "unique_consecutive of a line": (partial(torch.unique_consecutive, **EVERY), LINE),
    "unique_consecutive of rows": (partial(torch.unique_consecutive, **EVERY), LONG),
    "unique_consecutive along 0": (partial(torch.unique_consecutive, dim=0), VALUES[:, :2].clone()),
    "nonzero_static": (lambda x: torch.ops.aten.nonzero_static(x, size=5), LINE - 1),
    "nonzero_static, filled": (lambda x: torch.ops.aten.nonzero_static(x, size=30), VALUES),
    "bincount": (torch.bincount, LINE),
    "bincount, longer": (partial(torch.bincount, minlength=8), LINE),
    "bincount of weights": (torch.bincount, LINE, numbers(9)),
    "histc": (partial(torch.histc, bins=5), X),
    "histc of a range": (partial(torch.histc, bins=7, min=-1, max=1), X),
    "histc of one value": (partial(torch.histc, bins=3), torch.ones(5)),
    "histogram": (partial(torch.histogram, bins=5), X),
    "histogram of weights": (
        lambda x, w: torch.histogram(x, 5, weight=w, density=True),
        X,
        X.abs(),
    ),
    "histogram of bins": (partial(torch.histogram, density=True), X, EDGES),
    "histogramdd": (lambda x: points(x, [3, 2]), POINTS),
    "histogramdd of weights": (lambda x, w: points(x, [3, 2], weight=w), POINTS, numbers(9)),
    "histogramdd of bins": (lambda x, a: points(x, [a, a], density=True)[0], POINTS, EDGES),
    "repeat_interleave": (torch.repeat_interleave, LINE),
    "repeat_interleave of rows": (lambda x, r: x.repeat_interleave(r, 0), X, LINE[:7]),
}


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_device(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = CASES[name]
    check(f, *inputs, mesh=virtual(*shape), limit=6, grad="rows" in name)


RUNS = torch.tensor([3, 3, 3, 3, 3, 3, 1, 1, 2, 2, 2, 5, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0])


@pytest.mark.parametrize("cuts", [None, (2, 0, 2, 10, 0, 3, 5), (1, 1, 1, 1, 1, 1, 16)])
@pytest.mark.parametrize("name", ["int", "float", "rows"])
def test_runs_over_several_shards(name: str, cuts: Any) -> None:
    """However many shards a run goes through."""
    x = RUNS.double().masked_fill(RUNS == 1, float("nan")) if name == "float" else RUNS
    x = torch.stack([x, x * 2], 1) if name == "rows" else x
    run = partial(torch.unique_consecutive, dim=0 if name == "rows" else None, **EVERY)
    ours = distribute_tensor(
        x, virtual(7), [Shard(0)], cuts=cuts and [cuts, *[None] * (x.ndim - 1)]
    )
    with ragged_results():
        made = run(ours)
    for got, want in zip(made, run(x), strict=True):
        torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)


def test_other_arguments_are_other_calls() -> None:
    """What changes the result is in the key, or read whenever the call is made."""
    x = distribute_tensor(X, virtual(2), [Shard(0)])
    for bins, low, high in [(5, 0, 0), (6, 0, 0), (6, -1.0, 1.0), (6, -2.0, 1.0), (6, 1.0, 1.0)]:
        want = torch.histc(X, bins, low, high)
        torch.testing.assert_close(torch.histc(x, bins, low, high).full_tensor(), want)


def test_bincount_of_negative_numbers_raises() -> None:
    x = distribute_tensor(torch.tensor([1, -1, 2]), virtual(2), [Shard(0)])
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.bincount(x)
