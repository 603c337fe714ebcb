"""Elements of a vector by index, both in shards: each goes straight to its owner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import CommDebugMode, Link, Replicate, Shard, init_device_mesh
from shardwise.errors import OutOfRangeError

from .compare import assert_same, ints, numbers, spread, virtual

X, SOURCE = numbers(211), numbers(300, seed=1)
INDEX = ints(300, high=211)
ORDER = torch.randperm(211, generator=torch.Generator().manual_seed(0))
CALLS: dict[str, tuple[Any, ...]] = {
    "gather": (lambda x, i: x.gather(0, i), X, INDEX),
    "index_select": (lambda x, i: x.index_select(0, i), X, INDEX),
    "negative places": (lambda x, i: x[i], X, torch.where(INDEX % 3 == 0, INDEX - 211, INDEX)),
    "scatter": (lambda x, i, s: x.scatter(0, i, s), X, ORDER, SOURCE[:211]),
    "scatter, few": (lambda x, i, s: x.scatter(0, i, s), X, ORDER[:150], SOURCE[:150]),
    "scatter_": (lambda x, i, s: x.clone().scatter_(0, i, s), X, ORDER, SOURCE[:211]),
}


def eager(*shape: int) -> Any:
    """A mesh whose collectives start at no cost, so that bytes alone decide."""
    return init_device_mesh("cpu", shape, links=Link(0, 1e9))


@pytest.mark.parametrize("name", CALLS)
def test_vectors(name: str) -> None:
    call, *given = CALLS[name]
    count, last = len(given), given[-1].numel()
    assert_same(call, given, [(Shard(0),)] * count, eager(4))
    assert_same(call, given, [(Replicate(), Shard(0))] * count, eager(2, 5))
    assert_same(call, given, [(Shard(0), Shard(0))] * count, eager(2, 3))
    cuts = [[(0, 100, 111, 0)], *[[(90, 0, last - 100, 10)]] * (count - 1)]
    assert_same(call, given, [(Shard(0),)] * count, eager(4), cuts=cuts)


def test_of_several_written_elements_the_last_counts() -> None:
    where = [(Replicate(),), (Shard(0),), (Shard(0),)]
    call = CALLS["scatter"][0]
    assert_same(call, [X, INDEX, SOURCE], where, eager(4), grad=False)


@pytest.mark.parametrize("name", ["gather", "negative places", "scatter"])
def test_a_place_out_of_range_is_told_to_every_rank(name: str) -> None:
    call, x, index, *rest = CALLS[name]
    for bad in (211, -212):
        wrong = index.clone()
        wrong[40] = bad
        given = [spread(t, eager(4), [Shard(0)]) for t in (x, wrong, *rest)]
        with pytest.raises(OutOfRangeError, match=f"index {bad} is out of bounds"):
            call(*given)


def test_neither_index_nor_elements_are_gathered() -> None:
    size = 1 << 16
    mesh, order = virtual(8), torch.randperm(size, generator=torch.Generator().manual_seed(0))
    x, values = numbers(size, dtype=torch.float32), numbers(size, seed=1, dtype=torch.float32)
    ours = [spread(t, mesh, [Shard(0)]) for t in (x, order, values)]
    for call, want in (
        (lambda x, i, s: x[i], x[order]),
        (lambda x, i, s: x.scatter(0, i, s), x.scatter(0, order, values)),
    ):
        with CommDebugMode() as comm:
            made = call(*ours)
        assert made.placements == (Shard(0),)
        assert sum(comm.bytes.values()) < size * 8 // 8 + 1000
        assert made.full_tensor().equal(want)


def test_the_gradient_of_a_sorted_vector_moves_each_element_once() -> None:
    x = torch.randperm(1 << 18, generator=torch.Generator().manual_seed(0)).float()
    ours, theirs = spread(x, virtual(8), [Shard(0)]).requires_grad_(), x.clone().requires_grad_()
    weights = torch.arange(1 << 18, dtype=torch.float32)
    for call in (lambda x: x.sort().values, lambda x: x.topk(1 << 17).values):
        made, want = call(ours), call(theirs)
        want.backward(weights[: want.numel()])
        given = spread(weights[: want.numel()], virtual(8), made.placements, made.cuts)
        with CommDebugMode() as comm:
            made.backward(given)
        assert sum(comm.bytes.values()) < want.numel() * 8 // 8 * 1.1 + 1000
        assert ours.grad.full_tensor().equal(theirs.grad)
        ours.grad = theirs.grad = None
