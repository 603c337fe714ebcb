"""Pending maxima, minima, averages and products: whatever is done with them is right."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    per_rank,
)
from shardwise.comm.dtypes import identity

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


@pytest.mark.parametrize("number", [1e39, -1e39, 1e-39, 1e-60, -1e-60])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_a_number_that_single_precision_does_not_hold_waits(op: str, number: float) -> None:
    """1e39 is infinite there, and an infinity times 1e-60, which is zero, no number: the plan of 2
    is of no use."""
    mesh = init_device_mesh("cpu", (2,))
    parts = torch.tensor([3.0, 0.0, 2.0]), torch.tensor([-1.0, 5.0, identity(op, torch.float32)])
    for run in (
        lambda x, n: x * n,
        lambda x, n: x / n,
        lambda x, n: torch._foreach_mul([x], n)[0],
        lambda x, n: x + n,
        lambda x, n: torch.rsub(x, 1, alpha=n if abs(n) < 1 else 2),  # PyTorch refuses others
        lambda x, n: F.leaky_relu(x, n if abs(n) < 1 else 2),
    ):
        for each in (2.0, -2.0, number):
            held = per_rank(mesh, lambda coord: parts[coord[0]].clone())
            x = DTensor.from_local(held, mesh, [Partial(op)])
            want = run(DTensor.from_local(held, mesh, [Partial(op)]).full_tensor(), each)
            torch.testing.assert_close(run(x, each).full_tensor(), want, equal_nan=True)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_aliases_have_the_layout_of_what_they_alias(op: str) -> None:
    mesh = virtual(2)
    x = DTensor.from_local(per_rank(mesh, lambda coord: X + coord[0]), mesh, [Partial(op)])
    for same in (x.detach(), x.data, x.clone(), x.redistribute(placements=[Partial(op)])):
        assert same.placements == x.placements


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


@pytest.mark.parametrize("f", [torch.gt, torch.ge, torch.lt, torch.le])
def test_a_number_that_is_cast_to_fewer_bits_is_compared_whole(f: Any) -> None:
    """The larger of 2**32 + 1 and 5 is 1 beside int32."""
    mesh, x = virtual(2), torch.tensor([3], dtype=torch.int32)
    for kind, other in itertools.product(("max", "min"), (2**32 + 1, -(2**32) + 4)):
        held = per_rank(mesh, lambda coord, other=other: torch.tensor((other, 3)[coord[0]]))
        y = DTensor.from_local(held, mesh, [Partial(kind)])
        whole = DTensor.from_local(held, mesh, [Partial(kind)]).full_tensor()
        assert f(x, y).full_tensor().equal(f(x, whole))
        assert f(y, x).full_tensor().equal(f(whole, x))


CAST = {
    "slice": lambda x, y: x.slice_scatter(y[:2], 0, 1, 3),
    "place": lambda x, y: x.select_scatter(y[1], 0, 1),
    "diagonal": lambda x, y: x.diagonal_scatter(y.diagonal()),
    "rows": lambda x, y: x.index_fill(0, torch.tensor([0, 2]), y[0, 1]),
    "rows in place": lambda x, y: x.clone().index_fill_(1, torch.tensor([1]), y[0, 1]),
    "copy": lambda x, y: x.clone().copy_(y),
    "joined": lambda x, y: torch.cat([x, y]),
}


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("name", CAST)
def test_what_is_cast_as_it_is_written_is_reduced_before(name: str, kind: str) -> None:
    """Of 1.5 and 1.5 there is no more than 2 if they are integers first."""
    mesh, x = virtual(2), ints(3, 3)
    y = DTensor.from_local(per_rank(mesh, lambda coord: X[:3, :3] + 1.5), mesh, [Partial(kind)])
    whole = {"sum": 2 * (X + 1.5), "product": (X + 1.5) ** 2}.get(kind, X + 1.5)[:3, :3]
    for place in (Replicate(), Partial()):
        made = CAST[name](spread(x, mesh, [place]), y)
        torch.testing.assert_close(made.full_tensor(), CAST[name](x, whole))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_are_added_up_before_they_are_floats(dtype: torch.dtype) -> None:
    """They are exact, and wrap around; floats are not, and do not."""
    mesh, large = virtual(2), torch.iinfo(dtype).max
    parts = torch.tensor([[2**24 + 1, large], [-(2**24), large]]).to(dtype)
    x = DTensor.from_local(per_rank(mesh, lambda coord: parts[coord[0]]), mesh, [Partial()])
    for f in (torch.Tensor.float, torch.Tensor.double, lambda t: t * 1.0, lambda t: t / 1):
        torch.testing.assert_close(f(x).full_tensor(), f(torch.tensor([1, -2])), rtol=0, atol=0)


def test_integers_without_a_sign_are_cast() -> None:
    """PyTorch promotes them to no other integers, and cannot reduce uint64."""
    every = torch.uint8, torch.uint16, torch.uint32, torch.int32, torch.int64
    for src, dst in itertools.product(every, (*every, torch.uint64)):
        for kind in ("sum", "max", "min", "product"):
            x, mesh = torch.tensor([1, 5, 70000, 2]).to(src), virtual(2)
            held = per_rank(mesh, lambda coord, x=x: x.roll(coord[0]))
            made = DTensor.from_local(held, mesh, [Partial(kind)]).to(dst).full_tensor()
            want = DTensor.from_local(held, mesh, [Partial(kind)]).full_tensor().to(dst)
            assert made.dtype is dst and made.equal(want)


INF = float("inf")
ODD = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 0.5, INF, -INF, float("nan")])
FACTORS = ODD[ints(6, 4, high=len(ODD), seed=5)].double()
ROWS = torch.tensor([0, 3])
MASK = ints(6, 4, high=2, seed=3).bool()
JOIN = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
PENDING: list[tuple[tuple[int, ...], Callable[[Placement], tuple[Placement, ...]]]] = [
    ((3,), lambda kind: (kind,)),
    ((2, 2), lambda kind: (kind, kind)),
    ((2, 2), lambda kind: (Replicate(), kind)),
]
NUMBERS = {
    "fill rows": lambda x: [x.index_fill(0, ROWS, 2), x.index_fill(1, ROWS, -INF)],
    "fill rows in place": lambda x: x.clone().index_fill_(1, ROWS, 3.5),
    "scatter": lambda x: [
        x.scatter(0, ROWS.view(1, 2), 2.5),
        x.clone().scatter_(1, MASK[:2] * 2, 0),
    ],
    "fill": lambda x: [x.masked_fill(MASK, 2), x.masked_fill(MASK, -INF), x.clone().fill_(INF)],
    "fill with a tensor": lambda x: x.masked_fill(MASK, x.new_tensor(-1.5)),
    "choose": lambda x: torch.where(MASK, x, x.new_tensor(-1.5)),
    "pad": lambda x: [F.pad(x, (1, 0), value=v) for v in (0, 2, -INF)],
    "copies": lambda x: [x.clone().zero_(), torch.ops.aten.alias_copy(x)],
    "places": lambda x: [
        torch.ops.aten.slice_backward(x, [6, 5], 1, 0, 4, 1),
        torch.ops.aten.select_backward(x, [2, 6, 4], 0, 1),
    ],
}
ADDED = {
    "add": lambda x: [x + 1.5, 1.5 - x, x - INF, x + INF],
    "lists": lambda x: [*torch._foreach_add([x, x * 2], 1.5), *torch._foreach_sub([x], [INF])],
    "lists in place": lambda x: _in_place(torch._foreach_add_, x, [1.5, -2]),
    "quotients": lambda x: [
        x.addcdiv(FACTORS, WHOLE),
        x.clone().addcdiv_(WHOLE, FACTORS, value=-2),
    ],
    "gradient": lambda x: [
        torch.ops.aten._softmax_backward_data(x, X.softmax(1), 1, x.dtype),
        torch.ops.aten._log_softmax_backward_data(x, X.log_softmax(0), 0, x.dtype),
    ],
    "lists and a tensor": lambda x: [
        *torch._foreach_add([x, x[1:]], x.new_tensor(2.0), alpha=-3),
        *torch._foreach_add([x], x.new_tensor(INF)),
        *torch._foreach_addcdiv([x, x.clone()], [WHOLE, FACTORS], [FACTORS, X], 2.0),
        *_written(torch._foreach_add_, [x.clone()], x.new_tensor(INF)),
        *_written(torch._foreach_addcdiv_, [x.clone(), x * 2], [WHOLE, X], [FACTORS, WHOLE]),
    ],
    "list and whole": lambda x: torch._foreach_sub([x, x.new_ones(6, 4), x[1:]], 3),
}
TIMES = {
    "scale": lambda x: [x * 2, x * -2, x * 0, x * INF, x / 3, x / -0.5, x / 0, x / INF],
    "multiply": lambda x: [x * FACTORS, FACTORS * x, x / FACTORS, x * x.clone(), x / x.clone()],
    "signs": lambda x: [-x, x.abs(), x.clone().neg_()],
    "invert": lambda x: [x.reciprocal(), 2 * x.reciprocal()],
    "in place": lambda x: [x.clone().mul_(-2), x.clone().div_(3), x.clone().mul_(FACTORS)],
    "views": lambda x: [x.t() * 2, -x[1:3], (x.view(3, 8) / 3).t()],
    "lists": lambda x: [
        *torch._foreach_mul([x, x.clone()], [2.0, -2.0]),
        *torch._foreach_div([x], 3),
        *torch._foreach_mul([x, x], [FACTORS, x.clone()]),
        *torch._foreach_abs([x]),
        *torch._foreach_neg([x, x.new_ones(3)]),
        *torch._foreach_mul([x, x.new_ones(3)], x.new_tensor(-INF)),
        *torch._foreach_div([x, x.t()], x.new_tensor(4)),
        *_written(torch._foreach_neg_, [x.clone(), x[1:].clone()]),
    ],
    "lists in place": lambda x: _in_place(torch._foreach_mul_, x, [1.5, -2]),
}
WHOLES = {
    "scale": lambda x: [x * 3, -x, x**3, x**0, x.prod(0), x.prod(), x.cumprod(1)],
    "multiply": lambda x: [x * MASK.to(x.dtype), x.square(), x * x.clone()],
    "lists": lambda x: [*torch._foreach_mul([x, x.t()], 3), *torch._foreach_pow([x], 2)],
}


RISING = {
    "bounds": lambda x: [x.clamp(WHOLE, WHOLE + 2), x.clamp(max=FACTORS), x.clamp_min(WHOLE)],
    "as bounds": lambda x: [torch.clamp(WHOLE, x, FACTORS), torch.clamp_max(FACTORS, x)],
    "activations": lambda x: [F.elu(x), F.celu(x, 2.0), F.selu(x), F.hardtanh(x, -2, 1)],
    "shrinks": lambda x: [F.softshrink(x), F.hardshrink(x, 1.0), F.leaky_relu(x, 0.3)],
    "specials": lambda x: [torch.special.log_ndtr(x), torch.special.erfcx(x), torch.erfc(x)],
    "beside": lambda x: [torch.logaddexp(x, FACTORS), torch.logaddexp2(FACTORS, x)],
    "nan": lambda x: x.isnan(),
    "lists": lambda x: torch._foreach_mul([x, x], [2.0, -2.0]),
}
ONE_WAY = {
    "greater": (lambda x: [x > 1, x >= FACTORS, x > FACTORS, x >= FACTORS], "min"),
    "less": (lambda x: [x < 1, x <= FACTORS, x < FACTORS, x <= FACTORS], "max"),
    "largest": (lambda x: [torch.fmax(x, FACTORS), torch.fmax(FACTORS, x)], "min"),
    "least": (lambda x: [torch.fmin(x, FACTORS), torch.fmin(FACTORS, x)], "max"),
    "all infinite": (lambda x: x.isneginf(), "max"),
    "none infinite": (lambda x: x.isposinf(), "min"),
    "from one": (torch.acosh, "min"),
}
COUNTS = {
    "compare": lambda x: [x > 1, x >= x.new_tensor(2), x > 2, x <= x.new_ones(6, 4), x < 0],
    "turn": lambda x: [~x, x.sign(), x.signbit(), x.sgn(), x.erfc()],
}


def _in_place(f: Callable[..., Any], x: Any, numbers: Sequence[float]) -> list[Any]:
    return _written(f, [x.clone(), x.t().clone()], numbers)


def _written(f: Callable[..., Any], tensors: list[Any], *args: Any) -> list[Any]:
    f(tensors, *args)
    return tensors


def _odd(coord: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank holds: zeros, infinities and NaN among numbers, or small integers."""
    seed = 7 + sum(c * 10**i for i, c in enumerate(coord))
    if dtype is torch.bool:
        return ints(6, 4, high=2, seed=seed).bool()
    if not dtype.is_floating_point:
        return ints(6, 4, low=-5, high=6, seed=seed).to(dtype)
    odd = ODD[ints(6, 4, high=len(ODD), seed=seed)].to(dtype)
    return torch.where(ints(6, 4, high=3, seed=seed + 1) > 0, numbers(6, 4, seed=seed), odd)


def assert_right(
    run: Callable[[Any], Any], kind: str, dtype: torch.dtype = torch.float64, given: Any = None
) -> None:
    """A function of a pending value gives what it gives on one device."""
    for shape, pending in PENDING:
        if given is not None and shape != tuple(given.shape):
            continue
        mesh, places = given or virtual(*shape), pending(Partial(kind))
        sizes = [n if place.is_partial() else 1 for n, place in zip(shape, places, strict=True)]
        parts = [_odd(coord, dtype) for coord in itertools.product(*map(range, sizes))]
        whole = reduce(JOIN["sum" if kind == "avg" else kind], parts)
        whole = whole / len(parts) if kind == "avg" else whole
        held = per_rank(
            mesh,
            lambda coord, sizes=sizes: _odd(
                tuple([c % n for c, n in zip(coord, sizes, strict=True)]), dtype
            ),
        )
        made = run(DTensor.from_local(held, mesh, places))
        want = run(whole)
        pairs = zip(made, want, strict=True) if isinstance(want, (list, tuple)) else [(made, want)]
        for ours, theirs in pairs:
            assert ours.dtype is theirs.dtype and ours.stride() == theirs.stride()
            torch.testing.assert_close(ours.full_tensor(), theirs, equal_nan=True)


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_put_into_what_is_pending(name: str, kind: str) -> None:
    """One rank has the number if all would count, and an infinite one stays what it is."""
    assert_right(NUMBERS[name], kind)


@pytest.mark.parametrize("kind", ["sum", "avg"])
@pytest.mark.parametrize("name", ADDED)
def test_numbers_are_added_to_what_is_pending(name: str, kind: str) -> None:
    assert_right(ADDED[name], kind)


@pytest.mark.parametrize("shapes", [((4,), (1, 4)), ((1, 0), (3, 0)), ((2, 1), (2, 4))], ids=str)
def test_quotients_that_are_larger_than_the_sum(shapes: tuple[tuple[int, ...], ...]) -> None:
    """What ranks keep would have another shape than what one of them makes."""
    own, other = numbers(*shapes[0]), numbers(*shapes[1])
    for run in (
        lambda x: x.addcdiv(other, other + 3),
        lambda x: torch._foreach_addcdiv([x], [other], [other + 3])[0],
    ):
        made, want = run(spread(own, virtual(2), [Partial()])), run(own)
        torch.testing.assert_close(made.full_tensor(), want)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("name", RISING)
def test_order_is_kept_or_turned(name: str, kind: str) -> None:
    """NaN, infinities and ties among the parts."""
    assert_right(RISING[name], kind)


@pytest.mark.parametrize("name", ONE_WAY)
def test_what_nan_does_not_change(name: str) -> None:
    """What is false of NaN passes where all parts must be true, and is reduced where one must."""
    run, kind = ONE_WAY[name]
    assert_right(run, kind)
    assert_right(run, "max" if kind == "min" else "min")


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("name", COUNTS)
def test_integers_are_compared_before_they_are_reduced(name: str, kind: str) -> None:
    assert_right(COUNTS[name], kind, torch.int64)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_truths_are_joined_before_they_are_reduced(kind: str) -> None:
    def run(x: Any) -> list[Any]:
        joined = x | x.flip(0) if kind == "max" else x & x.flip(0)
        return [joined, x & MASK, MASK | x, x.logical_not(), ~x, torch.logical_and(MASK, x)]

    assert_right(run, kind, torch.bool)


@pytest.mark.parametrize("name", TIMES)
def test_factors_of_pending_products(name: str) -> None:
    """In any order, infinities, zeros and NaN among them."""
    assert_right(TIMES[name], "product")


@pytest.mark.parametrize("name", WHOLES)
def test_factors_that_are_integers(name: str) -> None:
    assert_right(WHOLES[name], "product", torch.int64)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_integers_wrap_around_in_any_order(dtype: torch.dtype) -> None:
    assert_right(lambda x: [x * 77, -x, x * x.clone(), x**5, x.to(torch.uint8)], "product", dtype)
    assert_right(lambda x: x.to(torch.int8), "sum", dtype)


def test_casts_to_eight_bits() -> None:
    """Such floats are promoted to no other, and have no infinity."""
    for place in (Shard(0), Partial(), Partial("max"), Partial("min"), Partial("product")):
        x = spread(WHOLE, virtual(2), (place,))
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            made = (x * 300).to(dtype)
            assert made.dtype is dtype
            torch.testing.assert_close(
                made.float().full_tensor(), (WHOLE * 300).to(dtype).float(), equal_nan=True
            )


def test_products_in_half_precision_wait_for_no_more_factors() -> None:
    """300 * 300 is infinite there, and 0.001 * 0.001 nearly nothing."""
    mesh, parts = virtual(2), (torch.tensor([300.0, 0.001]), torch.tensor([0.01, 1000.0]))
    held = per_rank(mesh, lambda coord: parts[coord[0]].half())
    whole = parts[0].half() * parts[1].half()
    for run in (
        lambda x: x * 300,
        lambda x: x * 0.001,
        lambda x: x * x.clone(),
        lambda x: x.float(),
    ):
        x = DTensor.from_local(held, mesh, [Partial("product")])
        torch.testing.assert_close(run(x).full_tensor(), run(whole))
    assert_right(lambda x: [-x, x.abs()], "product", torch.float16)


def test_powers_of_products_wait_for_the_product() -> None:
    """Of 1e-20 and 1e20 the squares are no numbers of single precision."""
    mesh = virtual(2)
    held = per_rank(mesh, lambda coord: torch.full((2,), (1e-20, 1e20)[coord[0]]))
    x = DTensor.from_local(held, mesh, [Partial("product")])
    for made in (x**3, x.square(), x.prod(), x.cumprod(0), x.double().float() ** 2):
        torch.testing.assert_close(made.full_tensor(), torch.ones(made.shape))


@pytest.mark.parametrize("others", ["sum", "max", "min", "avg"])
@pytest.mark.parametrize("first", [True, False])
def test_products_beside_other_kinds(others: str, first: bool) -> None:
    """The last axis is reduced first, whatever one rank does to a product."""
    mesh, kinds = virtual(2, 2), [others, "product"] if first else ["product", others]
    held = {c: _odd(c, torch.float64) for c in itertools.product(range(2), repeat=2)}
    join = {**JOIN, "avg": lambda a, b: (a + b) / 2}
    rows = [join[kinds[1]](held[i, 0], held[i, 1]) for i in (0, 1)]
    whole = join[kinds[0]](*rows)
    exact = [f for name, f in TIMES.items() if name not in ("multiply", "in place", "lists")]
    for f in (*exact, NUMBERS["fill"], NUMBERS["fill rows"]):
        x = DTensor.from_local(
            per_rank(mesh, lambda coord: held[tuple(coord)]), mesh, list(map(Partial, kinds))
        )
        for ours, theirs in zip(f(x), f(whole), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, equal_nan=True)
