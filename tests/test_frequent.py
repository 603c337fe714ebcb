"""The most frequent value along a dim in shards: each value is counted by one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import CommDebugMode, Link, Partial, Replicate, Shard, init_device_mesh
from shardwise.forms import frequent

from .compare import assert_same, ints, numbers, spread, virtual

NAN, INF = float("nan"), float("inf")
TIES = ints(16, low=-3, high=3)
VECTORS: dict[str, torch.Tensor] = {
    "ties": TIES.double(),
    "zeros and infinities": torch.tensor([0.0, -INF, INF, -0.0, -INF, 2.0, 0.0, INF, -0.0]),
    "NaN": torch.tensor([2.0, NAN, 2.0, 1.0, NAN, 1.0, 1.0]),
    "float16": TIES.half(),
    "bfloat16": TIES.bfloat16(),
    "int64": TIES * (1 << 60),
    "int8": TIES.to(torch.int8) * 40,
    "uint8": (TIES + 3).to(torch.uint8) * 50,
    "bool": TIES > 0,
    "all alike": torch.ones(9),
    "all different": numbers(15),
    "one": torch.ones(1),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name: str) -> None:
    """Of so few elements PyTorch tells the last index, too."""
    x = VECTORS[name]
    for shape, where in (
        ((2,), (Shard(0),)),
        ((4,), (Shard(0),)),
        ((2, 3), (Shard(0), Shard(0))),
        ((2, 2), (Replicate(), Shard(0))),
    ):
        for keep in (False, True):
            want = x.mode(0, keep)
            for cuts in (None, [(0, x.numel() - 1, 1, 0)] if shape == (4,) else None):
                got = frequent.mode(spread(x, virtual(*shape), where, cuts), 0, keep)
                for ours, theirs in zip(got, want, strict=True):
                    made = ours.full_tensor()
                    torch.testing.assert_close(made, theirs, rtol=0, atol=0, equal_nan=True)
                    if made.is_floating_point():
                        assert made.signbit().equal(theirs.signbit())


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_columns(dim: int) -> None:
    shape = [2, 3, 1]
    shape[dim] = 14
    mesh = init_device_mesh("cpu", (8,), links=Link(0, 1e9))
    x = ints(*shape, low=-4, high=4).double()
    assert_same(lambda x: list(x.mode(dim)), [x], [(Shard(dim % 3),)], mesh)
    where: Any = (Partial(), Shard(dim % 3))
    got = frequent.mode(spread(x, virtual(2, 3), where), dim, True)
    for ours, theirs in zip(got, x.mode(dim, True), strict=True):
        assert ours.full_tensor().equal(theirs)


LONG = 1 << 16
CALLS = {
    "all different": torch.randperm(LONG, generator=torch.Generator().manual_seed(0)).float(),
    "pairs": torch.arange(LONG // 2).repeat_interleave(2).float(),
    "few": numbers(LONG).round().float(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_receives_a_share_at_most(name: str) -> None:
    assert_shares(CALLS[name], virtual(8), 0 if name == "few" else LONG // 8)


def assert_shares(x: torch.Tensor, mesh: Any, most: int) -> None:
    """No more than so many elements, and some numbers, come to a rank."""
    ours = spread(x, mesh, [Shard(0)]).requires_grad_()
    with CommDebugMode() as comm:
        value, place = ours.mode()
        value.backward()
    assert value.full_tensor() == x.mode().values
    last = (x == value.full_tensor()).nonzero().max()
    assert place.full_tensor() == last
    assert ours.grad.placements == (Shard(0),)
    assert ours.grad.full_tensor().nonzero().flatten().equal(last.view(1))
    assert sum(comm.bytes.values()) < 1.1 * x.itemsize * most + 2000


def test_next_to_nan_the_answer_is_that_of_one_device() -> None:
    x = CALLS["few"].clone()
    x[::5] = NAN
    got = spread(x, virtual(8), [Shard(0)]).mode()
    for ours, theirs in zip(got, x.mode(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, equal_nan=True)
