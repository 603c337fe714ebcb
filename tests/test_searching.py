"""Places in a sorted sequence, sequence and values in shards: each value asks one shard."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from shardwise import (
    CommDebugMode,
    Partial,
    Replicate,
    Shard,
)
from shardwise.forms import searching

from .compare import assert_same, eager, ints, layouts, numbers, spread, virtual

NAN, INF = float("nan"), float("inf")
TIES = ints(17, low=-3, high=4).sort().values
ASKED = torch.tensor([-9, -3, -2, -1, 0, 1, 2, 3, 4, 9, 0, -3])
ODD = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.5, NAN, 3.0, -3.0, -4.0])
PAIRS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "ties": (TIES.double(), ASKED.double()),
    "NaN and infinities": (TIES.double(), ODD.double()),
    "infinite ends": (torch.tensor([-INF, -INF, 0.0, 0.0, INF, INF]), ODD),
    "integers among floats": (TIES.double(), ASKED),
    "floats among integers": (TIES, ODD),
    "bfloat16": (TIES.bfloat16(), ODD.bfloat16()),
    "int8": (TIES.to(torch.int8), ASKED.to(torch.int8)),
    "all alike": (torch.ones(9), torch.tensor([1.0, 0.0, 2.0, 1.0])),
    "one element": (torch.zeros(1), ODD),
    "one value": (TIES, ASKED[:1]),
    "values of two dims": (TIES, ASKED.view(4, 3).t()),
    "rows": (ints(3, 11, low=-3, high=4).sort().values, ints(3, 7, low=-4, high=5, seed=1)),
    "few long rows": (numbers(2, 29).sort().values, numbers(2, 5, seed=1)),
    "matrices of rows": (numbers(2, 3, 9).sort().values, numbers(2, 3, 4, seed=1)),
    "one row": (numbers(1, 13).sort().values, numbers(1, 6, seed=1)),
}


def laid(sequence: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> list[Any]:
    """Layouts in which values can be sent to the shards of a sequence."""
    mesh, drawn = virtual(*shape), random.Random(0)
    pairs = [
        (a, b)
        for a in layouts(sequence, mesh.ndim)
        for b in layouts(values, mesh.ndim)
        if Shard(sequence.ndim - 1) in a and all(p is None or p.split == 1 for p in shards(a, b))
    ]
    found = []
    for a, b in drawn.sample(pairs, min(len(pairs), 60)):
        specs = [spread(t, mesh, w)._spec.reduced for t, w in ((sequence, a), (values, b))]
        if searching._laid(*specs) is not None:
            found.append((a, b))
    return found[:9]


def shards(*layouts: Any) -> list[Any]:
    return [place for layout in layouts for place in layout if isinstance(place, Shard)]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    sequence, values = PAIRS[name]
    for shape in ((3,), (4,), (2, 2)):
        where = laid(sequence, values, shape)
        assert where
        for right in (False, True):
            want = torch.searchsorted(sequence, values.contiguous(), right=right)
            for a, b in where:
                given = [spread(t, virtual(*shape), w) for t, w in ((sequence, a), (values, b))]
                made = searching.searchsorted(*given, right=right)
                assert made.full_tensor().equal(want), (shape, a, b, right)
                if sequence.ndim == 1:
                    made = searching.bucketize(*reversed(given), right=right)
                    assert made.full_tensor().equal(want)


CUTS = [(0, 10, 7, 0), (17, 0, 0, 0), (0, 0, 0, 17), (5, 0, 11, 1)]


@pytest.mark.parametrize("cuts", CUTS)
def test_shards_without_elements(cuts: tuple[int, ...]) -> None:
    values = numbers(17, seed=3) * 3
    for own in CUTS:
        a = spread(TIES.double(), virtual(4), [Shard(0)], [cuts])
        b = spread(values, virtual(4), [Shard(0)], [own])
        made = searching.searchsorted(a, b, side="right")
        assert made.cuts == b.cuts
        assert made.full_tensor().equal(torch.searchsorted(TIES.double(), values, right=True))


LINE, LOOKED = numbers(1 << 10).sort().values, numbers(1 << 10, seed=1)
UNSORTED = (numbers(1 << 10), LOOKED, numbers(1 << 10).argsort())
CALLS: dict[str, tuple[Any, ...]] = {
    "searchsorted": (torch.searchsorted, LINE, LOOKED),
    "out_int32": (partial(torch.searchsorted, out_int32=True, side="right"), LINE, LOOKED),
    "bucketize": (lambda s, v: torch.bucketize(v, s, right=True), LINE, LOOKED.view(8, -1)),
    "not contiguous": (lambda s, v: torch.bucketize(v, s), LINE, LOOKED.view(8, -1).t()),
    "sorter": (lambda s, v, o: torch.searchsorted(s, v, sorter=o), *UNSORTED),
    "sorter, a number": (lambda s, o: torch.searchsorted(s, 0.25, sorter=o), *UNSORTED[::2]),
}


@pytest.mark.filterwarnings("ignore:torch.searchsorted.*non-contiguous")
@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call, *given = CALLS[name]
    for shape, where in (
        ((4,), (Shard(0),)),
        ((2, 2), (Shard(0), Shard(0))),
        ((2, 4), (Replicate(), Shard(0))),
    ):
        assert_same(call, given, [where] * len(given), eager(*shape), grad=False)
    where = (Partial(), Shard(0))
    assert_same(call, given, [where] * len(given), eager(2, 4), grad=False)


def received(call: Any, *given: Any) -> tuple[int, Any]:
    with CommDebugMode() as comm:
        made = call(*given)
    return sum(comm.bytes.values()), made


def test_neither_sequence_nor_values_are_gathered() -> None:
    size, mesh = 1 << 16, virtual(8)
    line, asked = numbers(size, dtype=torch.float32), numbers(size, seed=1, dtype=torch.float32)
    order = line.argsort()
    ours = [spread(t, mesh, [Shard(0)]) for t in (line.sort().values, asked, line, order)]
    got, made = received(torch.searchsorted, *ours[:2])
    assert made.placements == (Shard(0),)
    assert got < size * 8 // 8 + 1000
    assert made.full_tensor().equal(torch.searchsorted(line.sort().values, asked))
    got, made = received(lambda v, s, o: torch.searchsorted(s, v, sorter=o), *ours[1:])
    assert got < 2 * size * 8 // 8 + 2000
    assert made.full_tensor().equal(torch.searchsorted(line, asked, sorter=order))


ROWS = numbers(2, 1 << 10)
SORTERS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "rows": (ROWS, numbers(2, 1 << 9, seed=1)),
    "one row": (ROWS[:1], numbers(1, 1 << 9, seed=1)),
    "matrices of rows": (ROWS.view(2, 2, -1), numbers(2, 2, 300, seed=1)),
}


@pytest.mark.parametrize("name", SORTERS)
def test_rows_that_are_not_in_order(name: str) -> None:
    """They are put in the order that is given; other dims may be in shards."""
    line, asked = SORTERS[name]
    order, last = line.argsort(-1), line.ndim - 1

    def call(s: Any, v: Any, o: Any) -> Any:
        return torch.searchsorted(s, v, sorter=o, right=True)

    for shape, where in (
        ((8,), (Shard(last),)),
        ((2, 4), (Shard(last), Shard(last))),
        ((2, 4), (Shard(0), Shard(last))),
        ((4, 2), (Shard(last), Replicate())),
    ):
        mesh = eager(*shape)
        assert_same(call, [line, asked, order], [where] * 3, mesh, grad=False)
        assert_same(call, [line, asked, order], [where, None, where], mesh, grad=False)


def test_rows_and_their_order_are_not_gathered() -> None:
    size = 1 << 16
    line, asked = numbers(2, size // 2), numbers(2, size // 2, seed=1)
    order = line.argsort(-1)
    ours = [spread(t, virtual(8), [Shard(1)]) for t in (line, asked, order)]
    got, made = received(lambda s, v, o: torch.searchsorted(s, v, sorter=o), *ours)
    assert made.full_tensor().equal(torch.searchsorted(line, asked, sorter=order))
    # A place and an element, then a value, its row and its place.
    assert got < 1.05 * 28 * size // 8


def test_a_short_sequence_is_gathered() -> None:
    mesh = virtual(8)
    few, many = numbers(64).sort().values, numbers(1 << 12, seed=1)
    got, _ = received(torch.searchsorted, *(spread(t, mesh, [Shard(0)]) for t in (few, many)))
    assert got == 64 * 8 * 7 // 8


def test_rows_that_a_rank_lacks_are_brought_first() -> None:
    line, asked = numbers(4, 300).sort().values, numbers(4, 300, seed=1)
    where = [(Shard(0), Shard(1)), (Shard(1), Shard(0))]
    assert_same(torch.searchsorted, [line, asked], where, eager(2, 2), grad=False)
