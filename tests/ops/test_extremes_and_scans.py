"""Extremes, sorted elements and running totals, also along sharded dims, are one device's."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise import Shard

from ..compare import assert_same, check, ints, numbers, received, virtual

NAN = float("nan")
TIES = ints(7, 5, low=-2, high=3).double()
HOLES = TIES.clone()
HOLES[2, 1] = HOLES[5, 1] = HOLES[6, 3] = NAN
X, WHOLE = numbers(7, 5), ints(5, 3, low=-4)


def extremes(x):
    return [*x.max(0), *x.max(1, keepdim=True), *x.min(-1), *x.min(0, True), x.t().argmax(0)]


def places(x):
    return [x.argmax(0), x.argmin(1, keepdim=True), x.argmax(), x.argmin(), x.argmax(keepdim=True)]


def running(x):
    return [*x.cummax(0), *x.cummax(1), *x.cummin(0), *x.cummin(-1)]


def sums(x):
    return [x.cumsum(0), x.cumsum(1), x.cumprod(0), x.cumprod(-1), x.logcumsumexp(0)]


CASES = {
    "extremes": (extremes, TIES),
    "extremes with NaN": (extremes, HOLES),
    "places": (places, TIES),
    "places with NaN": (places, HOLES),
    "places in one row": (places, TIES[:1].clone()),
    "running extremes": (running, TIES),
    "running extremes with NaN": (running, HOLES),
    "running extremes of one row": (running, TIES[:1].clone()),
    "running sums": (sums, X),
    "running sums of one row": (sums, X[:1].clone()),
    "running sums of a transposed": (lambda x: sums(x.t()), X),
    "running sums in place": (lambda x: [x.clone().cumsum_(0), x.clone().cumprod_(-1)], X),
    "running sums of complex": (sums, torch.complex(X, X.flip(0))),
    "integers": (
        lambda x: [x.cumsum(0), x.cumprod(1), x.int().cumsum(0), x.cumsum(0, dtype=torch.float64)],
        WHOLE,
    ),
    "extremes of integers": (lambda x: [*x.max(0), x.argmin(), *x.cummin(0)], WHOLE),
    "no rows": (lambda x: [x.cumsum(0), *x.cummax(0), *x.max(1), x.argmax(1)], numbers(0, 3)),
    "no dims": (
        lambda x: [x.cumsum(0), *x.cummax(0), *x.max(0), x.argmax(), *x.topk(1, 0)],
        X[0, 0].clone(),
    ),
    "aminmax": (
        lambda x: [*x.aminmax(), *x.aminmax(dim=0), *x.aminmax(dim=1, keepdim=True)],
        HOLES,
    ),
    "topk": (lambda x: [*x.topk(2), *x.topk(3, 0), *x.topk(1, 0, largest=False), *x.topk(7, 0)], X),
    "diff": (lambda x: [x.diff(dim=0), x.diff(n=2, dim=0), x.diff(dim=1, prepend=x[:, :1])], X),
}
RAGGED = [((0, 5, 2), None), ((1, 0, 6), None), ((7, 0, 0), None)]


@pytest.mark.parametrize("name", CASES)
def test_along_every_dim(name):
    f, *inputs = CASES[name]
    for shape, limit in (((2,), 2), ((3,), 1), ((2, 2), 3)):
        check(f, *inputs, mesh=virtual(*shape), limit=limit)


@pytest.mark.parametrize("cuts", RAGGED, ids=str)
def test_along_ragged_cuts(cuts):
    for f in (extremes, places, running):
        assert_same(f, [HOLES], [(Shard(0),)], virtual(3), cuts=[cuts], grad=False)
    assert_same(sums, [X], [(Shard(0),)], virtual(3), cuts=[cuts])


@pytest.mark.parametrize("op", ["max", "min", "avg"])
def test_what_is_pending_is_reduced_first(op):
    check(lambda x: [*x.max(0), x.cumsum(0)], X, mesh=virtual(2, 2), ops=(op,), limit=6, grad=False)


@pytest.mark.parametrize(
    ("f", "most"),
    [
        (lambda x: x.max(0), 4 * 6 * (8 + 8)),
        (lambda x: x.argmin(0), 4 * 6 * (8 + 8)),
        (lambda x: x.aminmax(dim=0), 0),  # left pending
        (lambda x: x.topk(3, 0), 4 * 3 * 6 * (8 + 8)),
        (lambda x: x.diff(dim=0), 6 * 8),  # a row of the neighbour
    ],
)
def test_only_statistics_move(f, most):
    for rows in (40, 39, 400):
        x = sw.distribute_tensor(numbers(rows, 6), virtual(4), [Shard(0)])
        with sw.communication("auto", fallback="error"):
            assert received(lambda x=x: f(x)) <= most


@pytest.mark.parametrize(
    "f",
    [lambda x: x.max(0), lambda x: x.cumsum(0), lambda x: x.roll(1, 0), lambda x: x.repeat(2, 1)],
)
def test_what_moves_can_be_forbidden(f):
    x = sw.distribute_tensor(X, virtual(2), [Shard(0)])
    with sw.communication("error"), pytest.raises(sw.errors.CommunicationError, match="B received"):
        f(x)


def test_second_derivatives_of_running_sums():
    def slope(x):
        return torch.autograd.grad(x.cumsum(0).pow(3).sum(), [x], create_graph=True)[0]

    check(slope, X, mesh=virtual(3), limit=4)
    assert_same(slope, [X], [(Shard(0),)], virtual(4), cuts=[((0, 5, 1, 1), None)])


def test_the_gradient_of_running_sums_of_blocks():
    """A view may leave pieces of every block on each rank."""
    assert_same(lambda x: x.reshape(8, 3).cumsum(0), [numbers(2, 4, 3)], [(Shard(1),)], virtual(2))
