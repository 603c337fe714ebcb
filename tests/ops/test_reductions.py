"""Reductions give what plain tensors give: ties, NaN, kept dims, empty dims, forward and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Shard

from ..compare import MESHES, assert_same, check, ints, numbers, virtual

X = numbers(7, 5)
TIES = ints(7, 5, low=0, high=3).double()
EQUAL = torch.ones(6, 4, dtype=torch.float64)
WITH_NAN = torch.where(TIES == 1, math.nan, X)
B = numbers(3, 4, 5)
COMPLEX = torch.complex(X, X.flip(0))
norm = torch.linalg.vector_norm

SUMS = {
    "sum": (lambda x: x.sum(), X),
    "sum dim 0": (lambda x: x.sum(0), X),
    "sum dim -1 kept": (lambda x: x.sum(-1, keepdim=True), X),
    "sum two dims": (lambda x: x.sum((0, -1)), B),
    "sum to complex": (lambda x: x.detach().sum(0, dtype=torch.complex128), X),
    "sum of a 0-d": (lambda x: x.sum(), X[0, 0].clone()),
    "sum of nothing": (lambda x: [x.sum(), x.sum(0), x.sum(1)], numbers(0, 3)),
    "sum of bools": (lambda x: [(x > 0).sum(), (x > 0).sum(0)], X),
    "sum of a transposed": (lambda x: x.t().sum(0), X),
    "mean": (lambda x: x.mean(), X),
    "mean dim 0": (lambda x: x.mean(0), X),
    "mean dims kept": (lambda x: x.mean((-1, 0), keepdim=True), B),
    "mean of nothing": (lambda x: x.mean(), numbers(0, 3)),
    "nansum": (lambda x: x.nansum(0), WITH_NAN),
    "nanmean": (lambda x: x.nanmean(), WITH_NAN),
    "prod": (lambda x: x.prod(), X),
    "prod dim": (lambda x: x.prod(0), X),
    "var": (lambda x: x.var(), X),
    "var dim": (lambda x: x.var(0, correction=0), X),
    "std": (lambda x: x.std(1, keepdim=True), X),
    "var_mean": (lambda x: torch.var_mean(x, 0), X),
    "norm": (lambda x: x.norm(), X),
    "norm 1": (lambda x: norm(x, 1, dim=1), X),
    "norm 3": (lambda x: norm(x, 3, dim=0), X),
    "norm inf": (lambda x: norm(x, math.inf), X),
    "norm 0": (lambda x: norm(x.detach(), 0, dim=0), TIES),
    "norm at zero": (lambda x: norm(x), torch.zeros(5, 2, dtype=torch.float64)),
    "logsumexp": (lambda x: torch.logsumexp(x, 0), X),
    "logsumexp of -inf": (lambda x: torch.logsumexp(x - math.inf, 0).detach(), X),
    "complex": (lambda x: [x.sum(), x.mean(0), x.abs().sum()], COMPLEX),
}
EXTREMES = {
    "amax": (lambda x: x.amax(0), X),
    "amax with ties": (lambda x: x.amax(0), TIES),
    "amax of all, ties": (lambda x: x.amax(), TIES),
    "amin kept": (lambda x: x.amin((0, 1), keepdim=True), TIES),
    "max": (lambda x: x.max(), X),
    "max with ties": (lambda x: x.max(), TIES),
    "min, all equal": (lambda x: x.min(), EQUAL),
    "max dim": (lambda x: x.max(0), X),
    "max dim with ties": (lambda x: x.max(0), TIES),
    "min dim -1 kept with ties": (lambda x: x.min(-1, keepdim=True), TIES),
    "max with NaN": (
        lambda x: [x.detach().max(), x.detach().amax(0), x.detach().max(0)[0]],
        WITH_NAN,
    ),
    "aminmax": (lambda x: list(torch.aminmax(x, dim=0)), TIES),
    "aminmax of all": (lambda x: list(torch.aminmax(x)), X),
    "argmax": (lambda x: x.argmax(), X),
    "argmax with ties": (lambda x: x.argmax(), EQUAL),
    "argmax dim with ties": (lambda x: x.argmax(0), EQUAL),
    "argmin dim kept": (lambda x: x.argmin(-1, keepdim=True), TIES * 0),
    "any and all": (lambda x: [(x > 0).any(), (x > 0).all(0), (x > 9).any(1), x.all()], X),
    "any and all of nothing": (lambda x: [(x > 0).any(), (x > 0).all(), (x > 0).all(0)], B[:0]),
    "count_nonzero": (lambda x: [torch.count_nonzero(x), torch.count_nonzero(x, 0)], TIES),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = SUMS[name]
    check(f, *inputs, mesh=virtual(*shape))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = EXTREMES[name]
    check(f, *inputs, mesh=virtual(*shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers_reduce_exactly(dtype: torch.dtype) -> None:
    x = ints(7, 5).to(dtype)

    def reduce(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(), x.sum(0), x.prod(1), x.amax(0), x.min(), x.any(), x.argmax(0)]

    if dtype is torch.bool:  # PyTorch has no argmax of bools
        check(lambda x: [x.sum(), x.sum(0), x.amax(0), x.any(1), x.all()], x, mesh=virtual(2))
    else:
        check(reduce, x, mesh=virtual(2))


def test_bfloat16() -> None:
    x = ints(7, 5, low=-3).bfloat16()
    check(lambda x: [x.sum(0), x.mean(), x.amax(1)], x, mesh=virtual(2), tolerance=5e-2)


HALVES: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: (x.abs() * 100).mean(),
    "mean of rows": lambda x: (x.abs() * 100).mean(0),
    "mse_loss": lambda x: F.mse_loss(x, -x) * 16,
    "gradient of mse_loss": lambda x: F.mse_loss(x / 8, -x) * 2048,
    "huber_loss": lambda x: F.huber_loss(x, -x) * 512,
}


@pytest.mark.parametrize("name", HALVES)
def test_means_in_half_precision_do_not_overflow_on_the_way(name: str) -> None:
    x = numbers(64, 200).mul(20).half()
    for place in (Shard(0), Shard(1), Shard(0, 4)):
        assert_same(HALVES[name], [x], [(place,)], virtual(2), tolerance=4e-3)
