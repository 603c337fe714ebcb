"""`register_sharding`: rows of placements for one mesh axis, as PyTorch's users write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor
from shardwise.dispatch import dispatch
from shardwise.errors import RuleError
from shardwise.experimental import register_sharding
from shardwise.rules import REGISTERED

from ..compare import numbers, virtual

aten = torch.ops.aten
R = Replicate()


@pytest.fixture(autouse=True)
def _forget_rules() -> Iterator[None]:
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)
    dispatch.clear()


def softmax_sharding(x: Any, dim: int, half_to_float: bool) -> Any:
    rows = [([R], [R, None, None])]
    for place in range(x.ndim):
        if place != dim % x.ndim:
            rows.append(([Shard(place)], [Shard(place), None, None]))
    return rows


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("sharded", [0, 1, 2])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_softmax(dim: int, sharded: int, mesh: tuple[int, ...]) -> None:
    register_sharding(aten._softmax.default)(softmax_sharding)
    whole = numbers(5, 7, 4)
    x = distribute_tensor(whole, virtual(*mesh), [Shard(sharded)] * len(mesh))
    y = torch.softmax(x, dim)
    torch.testing.assert_close(y.full_tensor(), whole.softmax(dim))
    if dim % 3 != sharded:
        assert set(y.placements) == {Shard(sharded)}
    else:  # one of the other ways, whichever is cheaper to reach
        assert Shard(sharded) not in y.placements


def test_another_dim_is_another_call() -> None:
    """The numbers of a call are part of what its layouts are remembered by."""
    register_sharding(aten._softmax.default)(softmax_sharding)
    whole = numbers(4, 6)
    x = distribute_tensor(whole, virtual(2), [Shard(0)])
    for dim in (0, 1, 0):
        torch.testing.assert_close(torch.softmax(x, dim).full_tensor(), whole.softmax(dim))


def test_an_optional_number() -> None:
    asked = []

    @register_sharding(aten.argmax.default)
    def sharding(x: Any, dim: int | None, keepdim: bool) -> Any:
        asked.append((dim, keepdim))
        rows = [([R], [R, None, None])]
        if keepdim:
            others = [place for place in range(x.ndim) if place != dim]
            rows += [([Shard(place)], [Shard(place), None, None]) for place in others]
        return rows

    whole = numbers(8, 12)
    x = distribute_tensor(whole, virtual(2), [Shard(0)])
    kept = torch.argmax(x, dim=1, keepdim=True)
    assert kept.placements == (Shard(0),)
    assert torch.equal(kept.full_tensor(), whole.argmax(1, keepdim=True))
    assert torch.equal(torch.argmax(x).full_tensor(), whole.argmax())
    assert asked == [(1, True), (None, False)]  # what the call left out has its default


def test_tensors_among_the_named_arguments() -> None:
    @register_sharding(aten.min.dim_min)
    def sharding(x: Any, dim: int, keepdim: bool, min: Any, min_indices: Any) -> Any:
        return [([R, R], [R, None, None, R, R])]

    whole, mesh = numbers(4, 4), virtual(2)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    out = tuple(
        distribute_tensor(torch.zeros(4, 1, dtype=kind), mesh, [R])
        for kind in (torch.float64, torch.int64)
    )
    found = torch.min(x, dim=1, keepdim=True, out=out)
    for ours, expected, given in zip(found, whole.min(1, keepdim=True), out, strict=True):
        assert isinstance(ours, DTensor) and ours.placements == (R,)
        assert torch.equal(ours.full_tensor(), expected)
        assert torch.equal(given.full_tensor(), expected)


@torch.library.custom_op("shardwise_test::named_first", mutates_args=())
def named_first(name: str, x: torch.Tensor, rest: list[torch.Tensor]) -> torch.Tensor:
    return x + sum(rest)


@named_first.register_fake
def _(name: str, x: torch.Tensor, rest: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_first_argument_that_is_no_tensor_and_a_list_of_tensors() -> None:
    @register_sharding(torch.ops.shardwise_test.named_first.default)
    def sharding(name: str, x: Any, rest: list[Any]) -> Any:
        assert name == "any" and len(rest) == 2
        return [
            ([R], [None, R, R, R]),
            ([Shard(0)], [None, Shard(0), Shard(0), Shard(0)]),
            ([Partial()], [None, Partial(), Partial(), Partial()]),
        ]

    whole, mesh = numbers(5, 4), virtual(2)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    y = torch.ops.shardwise_test.named_first("any", x, [x, x])
    assert y.placements == (Shard(0),)
    torch.testing.assert_close(y.full_tensor(), 3 * whole)
    cut = distribute_tensor(whole, mesh, [Shard(1)])
    y = torch.ops.shardwise_test.named_first("any", cut, [x, x])
    torch.testing.assert_close(y.full_tensor(), 3 * whole)


def test_one_function_for_several_operators() -> None:
    @register_sharding([aten.sin.default, aten.cos.default])
    def sharding(x: Any) -> Any:
        return [([R], [R])]

    whole = numbers(4)
    x = distribute_tensor(whole, virtual(2), [Shard(0)])
    for function in (torch.sin, torch.cos):
        assert function(x).placements == (R,)
        torch.testing.assert_close(function(x).full_tensor(), function(whole))


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([], "at least one pair"),
        ([[R]], "Write"),
        ([([R], [R, R])], "2 operands"),
        ([(["R"], [R])], "neither a placement nor None"),
        ([([Shard(1)], [Shard(0)])], "local shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_cannot_be(pairs: Any, words: str) -> None:
    register_sharding(aten.sin.default)(lambda x: pairs)
    with pytest.raises(RuleError, match=words):
        distribute_tensor(numbers(4, 6), virtual(2), [Shard(0)]).sin()


def test_what_is_no_operator() -> None:
    with pytest.raises(RuleError, match="not an operator"):
        register_sharding(torch.softmax)
