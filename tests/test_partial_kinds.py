"""Pending maxima, minima, averages and products: whatever is done with them is right."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Shard,
    distribute_tensor,
    init_device_mesh,
    per_rank,
)

from .compare import check, ints, numbers, spread, virtual

X = numbers(6, 4)
WHOLE = ints(6, 4, low=-3, high=4, seed=1).double()

CASES = {
    "add a number": lambda x: [x + 1, 1 - x],
    "scale up": lambda x: x * 2,
    "scale down": lambda x: x * -2,
    "divide": lambda x: [x / 2, x / -3],
    "square": lambda x: x * x,
    "neg": lambda x: -x,
    "relu": torch.relu,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
    "add itself": lambda x: x + x,
    "sum": lambda x: [x.sum(), x.sum(0)],
    "mean": lambda x: x.mean(1),
    "amax": lambda x: [x.amax(0), x.amin(0), x.max()],
    "prod": lambda x: x.prod(0),
    "argmax": lambda x: [x.argmax(), x.argmin(1)],
    "softmax": lambda x: x.softmax(0),
    "matmul": lambda x: x @ x.t(),
    "cat": lambda x: torch.cat([x, x * 2]),
    "where": lambda x: torch.where(x > 0, x, -1.0),
    "cast": lambda x: [x.to(torch.float32).double(), x.to(torch.int64)],
    "views": lambda x: [x.t(), x.view(4, 6), x[1:4], x[2], x.flatten()],
    "clamp": lambda x: [x.clamp(-1, 1), x.clamp_min(0), x.clamp(max=0.5), x.clamp(2, 1)],
    "reverse": lambda x: [torch.rsub(x, 2, alpha=3), torch.rsub(x, 2, alpha=-3), 2 / x.exp()],
    "fill": lambda x: [x.masked_fill(x.detach() > 0, -1.0), torch.where(x > 0, x, x * 2)],
    "scatter": lambda x: [x.slice_scatter(x[1:3] * 2, 0, 2, 4), x.select_scatter(x[:, 1], 1, 0)],
    "stack": lambda x: torch.stack([x, x * 3], 1),
    "lists": lambda x: [*torch._foreach_mul([x, x], [2.0, -2.0]), *torch._foreach_mul([x], -3.0)],
    "maximum": lambda x: [torch.maximum(x, x.detach() * 2), torch.minimum(x, 0 * x.detach())],
    "compare": lambda x: [x > 0, x == 0, torch.sign(x)],
    "clone": lambda x: [x.clone(), x.t().contiguous()],
}


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("op", ["max", "min", "avg", "product"])
@pytest.mark.parametrize("name", CASES)
def test_of_one(name: str, op: str, shape: tuple[int, ...]) -> None:
    check(CASES[name], WHOLE, mesh=virtual(*shape), ops=[op], limit=6, tolerance=1e-6)


STAYING = {
    "add": (lambda x: x + 1, "max"),
    "subtract": (lambda x: x - 1, "max"),
    "subtract from": (lambda x: 1 - x, "min"),
    "scale up": (lambda x: x * 2, "max"),
    "scale down": (lambda x: x * -2, "min"),
    "divide": (lambda x: x / -2, "min"),
    "cast": (lambda x: x.float(), "max"),
    "clamp": (lambda x: x.clamp(-1, 1), "max"),
    "fill": (lambda x: x.masked_fill(torch.ones(6, 4, dtype=torch.bool), 0.5), "max"),
    "cat": (lambda x: torch.cat([x, x]), "max"),
    "stack": (lambda x: torch.stack([x, X.new_zeros(6, 4)]), "max"),
}


@pytest.mark.parametrize("name", STAYING)
def test_maxima_stay_pending(name: str) -> None:
    """Through what is monotone, and through copies, whatever sign the number before had."""
    mesh = virtual(2)
    run, want = STAYING[name]
    held = per_rank(mesh, lambda coord: X * (coord[0] - 0.5))
    x = DTensor.from_local(held, mesh, [Partial("max")])
    with CommDebugMode() as comm:
        made = run(x)
    assert made.placements == (Partial(want),)
    assert comm.get_total_counts() == 0
    torch.testing.assert_close(made.full_tensor(), run(torch.maximum(X * 0.5, X * -0.5)))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "maximum", "cat", "matmul"])
def test_of_two_kinds(name: str) -> None:
    """Sums do not pass through maxima: kinds that do not go together are reduced first."""

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if name == "cat":
            return torch.cat([x, y])
        if name == "matmul":
            return x @ y.t()
        return getattr(torch, name)(x, y)  # type: ignore[no-any-return]

    kinds = ["sum", "avg", "max", "min", "product"]
    check(run, WHOLE, WHOLE.flip(0) * 2, mesh=virtual(2), ops=kinds, limit=24)
    check(run, WHOLE, WHOLE.flip(0) * 2, mesh=virtual(2, 2), ops=kinds, limit=24)


@pytest.mark.parametrize("name", ["scale down", "relu", "sum", "amax", "views", "add a number"])
def test_several_kinds_on_one_tensor(name: str) -> None:
    kinds = ["sum", "avg", "max", "min", "product"]
    check(CASES[name], WHOLE, mesh=virtual(2, 2), ops=kinds, limit=24)


def test_integers_that_pass_their_range_only_in_parts() -> None:
    small = ints(6, 4, high=9).to(torch.uint8)
    check(lambda x: [x.sum(), x.float(), x * 0.5, x + x], small, mesh=virtual(3))


@pytest.mark.parametrize("number", [0, 0.0, float("inf"), 2.0])
def test_a_number_that_makes_parts_infinite_waits_for_the_sum(number: float) -> None:
    """3 and -1 are infinite both ways after a division by 0, but their sum is only one way."""
    mesh = init_device_mesh("cpu", (2,))
    parts = per_rank(mesh, lambda coord: torch.tensor([3.0, 1.0]) - 4 * coord[0])
    pending = DTensor.from_local(parts, mesh, [Partial()])
    whole = pending.full_tensor()
    for ours, theirs in ((pending / number, whole / number), (pending * number, whole * number)):
        torch.testing.assert_close(ours.full_tensor(), theirs, equal_nan=True)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_aliases_have_the_layout_of_what_they_alias(op: str) -> None:
    mesh = virtual(2)
    x = DTensor.from_local(per_rank(mesh, lambda coord: X + coord[0]), mesh, [Partial(op)])
    for same in (x.detach(), x.data, x.clone(), x.redistribute(placements=[Partial(op)])):
        assert same.placements == x.placements


VIEWS = {
    "detach": lambda x: x.detach(),
    "t": lambda x: x.t(),
    "view": lambda x: x.view(2, 12)[None],
    "expand": lambda x: x.expand(3, 6, 4),
}


@pytest.mark.parametrize("first", ["view", "base"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_pending_sum_are_reduced_with_it(name: str, first: str) -> None:
    mesh, view = virtual(2), VIEWS[name]
    x = DTensor.from_local(per_rank(mesh, lambda coord: X * (coord[0] - 2)), mesh, [Partial()])
    whole, seen = X * -3, view(x)
    with CommDebugMode() as comm:
        for value, want in [(seen, view(whole)), (x, whole)][:: 1 if first == "view" else -1]:
            torch.testing.assert_close(value.relu().full_tensor(), want.relu())
        torch.testing.assert_close(x[1:3].exp().full_tensor(), whole[1:3].exp())
        for part, want in zip(x.chunk(2, 1), whole.chunk(2, 1), strict=True):
            torch.testing.assert_close(part.sin().full_tensor(), want.sin())
    assert comm.get_total_counts() == 1
    x[0].zero_()
    whole[0] = 0
    torch.testing.assert_close(seen.relu().full_tensor(), view(whole).relu())


def test_a_view_in_place_is_of_its_own() -> None:
    mesh = virtual(2)
    x = DTensor.from_local(per_rank(mesh, lambda coord: X * (coord[0] - 2)), mesh, [Partial()])
    seen, row = x.detach(), x[1]
    x.exp()
    x.t_()
    torch.testing.assert_close(seen.exp().full_tensor(), (X * -3).exp())
    torch.testing.assert_close(row.exp().full_tensor(), (X[1] * -3).exp())
    torch.testing.assert_close(x.exp().full_tensor(), (X.t() * -3).exp())


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum().detach(),
        lambda x: x.sum(0).detach().view(2, 2),
        lambda x: x.sum().data,
        lambda x: x.view(4, 6).detach(),
        lambda x: x.view(4, 6).t().detach().t(),
    ],
)
def test_what_is_detached_holds_no_history(f: Callable[[Any], Any]) -> None:
    """A list of detached losses must not hold the activations of each step."""
    leaf = distribute_tensor(X, virtual(4), [Shard(0)]).requires_grad_()
    saved = (leaf * 2).exp()
    held, want = weakref.ref(saved._locals[0]), f((X * 2).exp())
    kept = f(saved * 1)
    del saved
    gc.collect()
    assert held() is None
    torch.testing.assert_close(kept.full_tensor(), want)


@pytest.mark.parametrize("f", [torch.maximum, torch.minimum])
def test_a_number_that_is_cast_to_fewer_bits_is_no_extreme(f: Any) -> None:
    """A 0-d int64 tensor beside an int32 one: its smallest number is zero there."""
    mesh, x = virtual(2), torch.tensor([-6, -1, -3, 2], dtype=torch.int32)
    for number, kind in itertools.product((-2, 1, 2**32 + 1), ("max", "min")):
        y = torch.tensor(number)
        for mine in (y, spread(y, mesh, (Partial(kind),))):
            for pair in (
                (spread(x, mesh, (Partial(kind),)), mine),
                (spread(x, mesh, (Shard(0),)), mine),
            ):
                torch.testing.assert_close(f(*pair).full_tensor(), f(x, y), rtol=0, atol=0)
                torch.testing.assert_close(f(*pair[::-1]).full_tensor(), f(y, x), rtol=0, atol=0)
