"""Which elements are in a set, both in shards: each value goes to one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from shardwise import CommDebugMode, Partial, Replicate, Shard, communication
from shardwise.forms import membership

from .compare import assert_same, eager, ints, numbers, spread, virtual

NAN, INF = float("nan"), float("inf")
ODD = torch.tensor([NAN, 0.0, INF, -INF, 2.5, -0.0, NAN, 3.0])
FEW, MANY = ints(23, low=-3, high=5), ints(40, low=-9, high=9, seed=1)
PAIRS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "integers": (FEW, MANY),
    "wide integers": (MANY * (1 << 59), FEW * (1 << 59)),
    "NaN, infinities and zeros": (ODD, torch.tensor([-0.0, NAN, -INF, 7.0])),
    "integers among floats": (FEW, MANY / 2),
    "floats among bytes": (FEW.bfloat16() / 2, (MANY + 9).to(torch.uint8)),
    "bytes": ((FEW + 3).to(torch.uint8) * 40, (MANY + 9).to(torch.uint8) * 10),
    "bytes with and without sign": (FEW.to(torch.int8), (MANY + 9).to(torch.uint8)),
    "doubles among floats": (MANY.double() / 3, FEW.float() / 3),
    "half": (FEW.half(), MANY.half() / 2),
    "matrices": (MANY.view(5, 8).t(), FEW[:21].view(3, 7)),
    "all alike": (torch.ones(9), torch.ones(7)),
    "one": (torch.ones(1), torch.ones(1)),
}
LAYOUTS: list[tuple[tuple[int, ...], Any, Any]] = [
    ((4,), (Shard(0),), (Shard(0),)),
    ((2, 2), (Shard(0), Shard(0)), (Replicate(), Shard(0))),
    ((2, 3), (Replicate(), Shard(0)), (Shard(0), Shard(0))),
    ((2, 3), (Partial(), Shard(0)), (Shard(0), Shard(0))),
]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    elements, tests = PAIRS[name]
    for shape, a, b in LAYOUTS:
        ours = [spread(t, virtual(*shape), at) for t, at in ((elements, a), (tests, b))]
        for invert in (False, True):
            made = membership.isin(*ours, invert=invert)
            assert made.full_tensor().equal(torch.isin(elements, tests, invert=invert)), (a, b)
            assert all(made.placements[axis] == at for axis, at in enumerate(a) if at.is_shard())


@pytest.mark.parametrize("cuts", [(0, 20, 3, 0), (0, 0, 0, 23)])
def test_shards_without_elements(cuts: tuple[int, ...]) -> None:
    tests = spread(MANY, virtual(4), [Shard(0)], [(0, 39, 0, 1)])
    made = membership.isin(spread(FEW, virtual(4), [Shard(0)], [cuts]), tests)
    assert made.cuts == (cuts,)
    assert made.full_tensor().equal(torch.isin(FEW, MANY))


CALLS: dict[str, Any] = {
    "in": torch.isin,
    "not in": partial(torch.isin, invert=True),
    "unique": lambda a, b: torch.isin(a.unique(), b.unique(), assume_unique=True),
    "turned": lambda a, b: torch.isin(a.view(16, -1).t(), b.view(16, -1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    given = [ints(800, high=3000), ints(640, high=3000, seed=1)]
    for shape, where in (((8,), (Shard(0),)), ((2, 4), (Shard(0), Shard(0)))):
        assert_same(CALLS[name], given, [where, where], eager(*shape), grad=False)


def test_neither_elements_nor_set_are_gathered() -> None:
    """Each goes to one rank, and one byte comes back."""
    size = 1 << 16
    elements, tests = (ints(size, high=3 * size, seed=seed).int() for seed in (0, 1))
    ours = [spread(t, virtual(8), [Shard(0)]) for t in (elements, tests)]
    with CommDebugMode() as comm:
        made = torch.isin(*ours)
    assert made.full_tensor().equal(torch.isin(elements, tests))
    assert made.placements == (Shard(0),)
    assert sum(comm.bytes.values()) < 1.1 * 9 * size // 8


def test_values_that_are_alike_are_sent_once() -> None:
    size = 1 << 16
    elements, tests = (ints(size, high=50, seed=seed) for seed in (0, 1))
    with CommDebugMode() as comm:
        torch.isin(*(spread(t, virtual(8), [Shard(0)]) for t in (elements, tests)))
    assert sum(comm.bytes.values()) < 16 * 8 * 8 + 8 * 50 * 17


def test_a_small_set_is_gathered() -> None:
    ours = [spread(t, virtual(8), [Shard(0)]) for t in (numbers(1 << 12), numbers(64))]
    with CommDebugMode() as comm:
        torch.isin(*ours)
    assert sum(comm.bytes.values()) == 64 * 8 * 7 // 8


def test_parts_that_are_not_contiguous() -> None:
    """PyTorch looks for many elements among few in another way, which wants them in one piece."""
    elements, tests = ints(3, 2, 7, high=40), ints(40, 2, high=40, seed=1).t()
    where = [(Replicate(),), (Shard(1),)]
    assert_same(torch.isin, [elements, tests], where, virtual(8), grad=False)


def test_elements_in_blocks_stay_where_they_are() -> None:
    x, few = ints(12, 3), ints(4)
    elements = spread(x, virtual(2), [Shard(0, 3)])
    with communication("error"):
        got = torch.isin(elements, spread(few, virtual(2), [Replicate()]))
    assert got.placements == elements.placements
    assert torch.equal(got.full_tensor(), torch.isin(x, few))
