"""Reading and writing by index, tensor and index both sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Placement, Replicate, Shard

from ..compare import assert_same, eager, ints, numbers, spread, virtual

X, SOURCE = numbers(211), numbers(300, seed=1)
INDEX = ints(300, high=210)
ORDER = torch.randperm(211, generator=torch.Generator().manual_seed(0))
WRAPPED = torch.where(INDEX % 3 == 0, INDEX - 211, INDEX)
TABLE, NUMBER = numbers(35, 6), torch.tensor(2.5, dtype=torch.float64)


def scatter_reduce(x: Any, index: Any, source: Any, **how: Any) -> Any:
    return x.scatter_reduce(0, index, source, **how)


CALLS: dict[str, tuple[Any, ...]] = {
    "gather": (lambda x, i: x.gather(0, i), X, INDEX),
    "index_select": (lambda x, i: x.index_select(0, i), X, INDEX),
    "negative places": (lambda x, i: x[i], X, WRAPPED),
    "places of two dims": (lambda x, i: x[i], X, WRAPPED.view(20, 15)),
    "take": (lambda x, i: x.take(i), TABLE, (INDEX - 105).view(30, 10)),
    "scatter": (lambda x, i, s: x.scatter(0, i, s), X, ORDER, SOURCE[:211]),
    "scatter, few": (lambda x, i, s: x.scatter(0, i, s), X, ORDER[:150], SOURCE[:150]),
    "scatter_": (lambda x, i, s: x.clone().scatter_(0, i, s), X, ORDER, SOURCE[:211]),
    "scatter, a number": (lambda x, i: x.scatter(0, i, 2.5), X, INDEX),
    "scatter_, multiplied": (
        lambda x, i: x.detach().clone().scatter_(0, i, 2.5, reduce="multiply"), X, INDEX
    ),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), X, INDEX, SOURCE),
    **{
        f"scatter_reduce, {how}, {self}": (
            partial(scatter_reduce, reduce=how, include_self=self), X, INDEX, SOURCE
        )
        for how in ("sum", "prod", "mean", "amax", "amin")
        for self in (True, False)
    },
    "index_add": (lambda x, i, s: x.index_add(0, i, s, alpha=-2), X, INDEX, SOURCE),
    "index_add_": (lambda x, i, s: x.clone().index_add_(0, i, s), X, INDEX.int(), SOURCE),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s), X, ORDER, SOURCE[:211]),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.5), X, WRAPPED),
    "index_fill, a tensor": (lambda x, i, n: x.index_fill(0, i, n), X, INDEX, NUMBER),
    "index_put": (lambda x, i, s: x.index_put((i,), s), X, ORDER, SOURCE[:211]),
    "index_put, added": (lambda x, i, s: x.index_put((i,), s, True), X, WRAPPED, SOURCE),
    "index_put_, a tensor": (lambda x, i, n: x.clone().index_put_((i,), n), X, WRAPPED, NUMBER),
    "index_put of two dims": (
        lambda x, i, s: x.index_put((i,), s, True), X, WRAPPED.view(30, 10), SOURCE.view(30, 10)
    ),
    "put": (lambda x, i, s: x.put(i, s), TABLE, ORDER[ORDER < 210] - 105, SOURCE[:210]),
    "put_, added": (
        lambda x, i, s: x.clone().put_(i, s, accumulate=True), TABLE, INDEX - 105, SOURCE
    ),
}  # fmt: skip


TALL, PILE = numbers(211, 3), numbers(300, 3, seed=1)
SPOTS = torch.stack([ORDER, ORDER.flip(0), ORDER.roll(7)], 1)
PAIRED = SPOTS // 2 * 2
ROWS: dict[str, tuple[Any, ...]] = {
    "index": (lambda x, i: x[i], TALL, WRAPPED),
    "index of two dims": (lambda x, i: x[i], TALL, WRAPPED.view(60, 5)),
    "index_select": (lambda x, i: x.index_select(0, i), TALL, INDEX),
    "index_select, columns": (lambda x, i: x.index_select(-1, i), TALL.t().contiguous(), INDEX),
    "embedding": (lambda x, i: F.embedding(i, x, padding_idx=3), TALL, INDEX.view(100, 3)),
    "gather": (lambda x, i: x.gather(0, i), TALL, SPOTS[:200]),
    "gather, a dim counted back": (lambda x, i: x.gather(-2, i), TALL, SPOTS[:200]),
    "gather, columns": (lambda x, i: x.gather(1, i), TALL.t(), SPOTS.t()),
    "gather, three dims": (
        lambda x, i: x.gather(1, i), numbers(2, 80, 2), ints(2, 100, 2, high=80)
    ),
    "scatter": (lambda x, i, s: x.scatter(0, i, s), TALL, SPOTS, PILE[:211]),
    "scatter, a dim counted back": (lambda x, i: x.scatter(-2, i, 2.5), TALL, SPOTS),
    "scatter, columns": (lambda x, i: x.scatter(1, i, -1.0), TALL.t(), SPOTS.t()),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), TALL, PAIRED, PILE[:211]),
    "scatter_add_, columns": (
        lambda x, i, s: x.clone().scatter_add_(-1, i, s), TALL.t(), PAIRED.t(), PILE[:211].t()
    ),
    "scatter_reduce": (
        partial(scatter_reduce, reduce="amax", include_self=False), TALL, PAIRED, PILE[:211]
    ),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), TALL, INDEX, PILE),
    "index_add_, columns": (
        lambda x, i, s: x.clone().index_add_(1, i, s, alpha=3), TALL.t(), INDEX, PILE.t()
    ),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s), TALL, ORDER, PILE[:211]),
    "index_fill": (lambda x, i: x.index_fill(1, i, 2.5), TALL.t(), INDEX),
    "index_put": (lambda x, i, s: x.index_put((i,), s), TALL, ORDER - 105, PILE[:211]),
    "index_put_, added": (
        lambda x, i, s: x.clone().index_put_((i,), s, True),
        TALL, WRAPPED.view(75, 4), PILE.view(75, 4, 3),
    ),
    "index_put, a number": (lambda x, i, n: x.index_put((i,), n), TALL, WRAPPED, NUMBER),
}  # fmt: skip


def layouts(given: Any, *where: Any) -> list[Any]:
    """Replicated numbers, and the same shards for all else: those of its longest dim."""

    def place(t: torch.Tensor, at: Any) -> Any:
        return Shard(t.shape.index(max(t.shape))) if t.ndim and at.is_shard() else Replicate()

    return [tuple(place(t, at) for at in where) for t in given]


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("name", CALLS)
def test_elements(name: str) -> None:
    call, *given = CALLS[name]
    assert_same(call, given, layouts(given, Shard(0)), eager(4))
    assert_same(call, given, layouts(given, Replicate(), Shard(0)), eager(2, 5))
    assert_same(call, given, layouts(given, Shard(0), Shard(0)), eager(2, 3))
    if all(t.ndim == 1 for t in given):
        last = given[-1].numel()
        cuts = [[(0, 100, 111, 0)], *[[(90, 0, last - 100, 10)]] * (len(given) - 1)]
        assert_same(call, given, layouts(given, Shard(0)), eager(4), cuts=cuts)


@pytest.mark.parametrize("name", ["scatter", "scatter_add", "index_put, added", "rows: index_add"])
def test_sources_that_every_rank_has(name: str) -> None:
    """As the gradient of a sum, which is the same everywhere."""
    call, *given = ROWS[name[6:]] if name.startswith("rows: ") else CALLS[name]
    assert_same(call, given, [(Shard(0),), (Shard(0),), (Replicate(),)], eager(8))


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    call, *given = ROWS[name]
    assert_same(call, given, layouts(given, Shard(0)), eager(4))
    assert_same(call, given, layouts(given, Shard(0), Shard(0)), eager(2, 3))


BATCHES: dict[str, tuple[Any, ...]] = {
    "gather": (lambda x, i: x.gather(1, i), numbers(3, 2100, 2), ints(3, 1950, 2, high=2100)),
    "scatter": (
        lambda x, i, s: x.scatter(1, i, s),
        numbers(3, 2100, 2),
        numbers(3, 2100, 2, seed=2).argsort(1),
        numbers(3, 2100, 2, seed=1),
    ),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(1, i, s),
        numbers(3, 2100, 2),
        ints(3, 1950, 2, high=2100),
        numbers(3, 1950, 2, seed=1),
    ),
    "scatter, a number": (
        lambda x, i: x.scatter(-2, i, 2.5), numbers(3, 2100, 2), ints(3, 1950, 2, high=2100)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_batches_in_shards(name: str) -> None:
    """Of three batches on two ranks, or two on four, one has more than the other, or none."""
    call, *given = BATCHES[name]
    for shape, where in (
        ((2, 8), (Shard(0), Shard(1))),
        ((8, 4), (Shard(1), Shard(2))),
        ((2, 2, 4), (Shard(2), Shard(0), Shard(1))),
    ):
        mesh = eager(*shape)
        assert_same(call, given, [where] * len(given), mesh)
    assert_same(call, given, [where, where, (Replicate(),) * 3][: len(given)], mesh)


def test_of_several_written_elements_the_last_counts() -> None:
    where = [(Replicate(),), (Shard(0),), (Shard(0),)]
    call = CALLS["scatter"][0]
    assert_same(call, [X, INDEX, SOURCE], where, eager(4), grad=False)


def assert_out_of_range(mesh: Any) -> None:
    """Every rank raises, though one alone has the index."""
    for name in ("index", "index_select"):
        call, x, index, *rest = ROWS[name]
        for bad in (211, -212):
            wrong = index.clone()
            wrong[40] = bad
            given = [spread(t, mesh, [Shard(0)]) for t in (x, wrong, *rest)]
            with pytest.raises(IndexError, match=r"out of (bounds|range)"):
                call(*given)


def test_an_index_out_of_range_raises_on_every_rank() -> None:
    assert_out_of_range(eager(4))


# --- an index that all have, and many elements for one place -------------------------------------

WRITES = ["scatter", "scatter_add", "index_add", "index_copy"]


@pytest.mark.parametrize("target", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_an_index_that_every_rank_has(name: str, target: Placement) -> None:
    call, x, index, source = CALLS[name]
    where = [(target,), (Replicate(),), (Shard(0),)]
    assert_same(call, [x, index, source], where, eager(4))


@pytest.mark.parametrize("padding", [None, 5])
def test_the_gradient_of_a_table(padding: int | None) -> None:
    table, words = numbers(400, 16), ints(64, 9, high=399)

    def call(x: Any, i: Any) -> Any:
        return F.embedding(i, x, padding)

    assert_same(call, [table, words], [(Shard(0),), (Shard(0),)], virtual(4))
