"""Reading and writing by index and by mask, against plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor

from ..compare import assert_same, check, ints, numbers, received, spread, virtual

X, ROWS = numbers(7, 4), numbers(4, 4, seed=2)
ROW = torch.tensor([0, 3, 6, 3])
ONCE = torch.tensor([5, 0, 3, 1])
EACH = ints(7, 4, high=7)
FEW = torch.tensor([[0, 1], [2, 0], [1, 3]])
MASK = numbers(7, 4, seed=3) > 0
FIRST = MASK[:, 0].clone()
TWO = numbers(1, seed=4).sum()


def put(*where: Any) -> Callable[..., Any]:
    """x[i] = v, where `where` says in which dims the index stands."""

    def run(x: Any, index: Any, value: Any) -> Any:
        y = x.clone()
        y[tuple(index if each is None else each for each in where) if where else index] = value
        return y

    return run


READS = {
    "gather": (lambda x, i: x.gather(0, i), X, EACH),
    "gather, smaller": (lambda x, i: x.gather(1, i), X, FEW),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 0), X, EACH),
    "index_select 0": (lambda x, i: x.index_select(0, i), X, ROW),
    "index_select 1": (lambda x, i: x.index_select(1, i), X, FEW[0]),
    "x[i]": (lambda x, i: x[i], X, ROW - 7),
    "x[:, i]": (lambda x, i: x[:, i], X, FEW),
    "x[i, j]": (lambda x, i, j: x[i, j], X, ROW, ROW % 4),
    "x[i, :, j]": (lambda x, i, j: x.view(7, 2, 2)[i, :, j], X, ROW, ROW % 2),
    "x[mask]": (lambda x, m: x[m], X, MASK),
    "x[rows]": (lambda x, m: x[m], X, FIRST),
    "x.t()[mask]": (lambda x, m: x.t()[m], X, MASK[0].clone()),
    "x[:, mask]": (lambda x, m: x[:, m], X, MASK[0].clone()),
    "x[mask, i]": (lambda x, m, i: x[m, i], X, FIRST, torch.arange(int(FIRST.sum())) % 4),
    "masked_select": (lambda x, m: x.masked_select(m), X, FIRST.view(7, 1)),
    "take": (lambda x, i: x.take(i), X, EACH * 4 - 28),
    "embedding": (lambda w, i: F.embedding(i, w), X, FEW),
    "nonzero": (lambda m: m.nonzero(), MASK),
    "nonzero as a tuple": (lambda m: m.nonzero(as_tuple=True), MASK),
    "argwhere": (lambda m: m.argwhere(), MASK.view(7, 2, 2)),
    "one_hot": (lambda i: F.one_hot(i, 9), EACH),
    "bucketize": (lambda x, b: torch.bucketize(x, b), X, ROWS[0].sort().values),
    "searchsorted": (lambda b, x: torch.searchsorted(b, x), X.sort().values, numbers(7, 3, seed=8)),
    "isin": (lambda a, b: torch.isin(a, b), EACH, ROW),
    "segments": (
        lambda x, n: torch.segment_reduce(x, "max", lengths=n),
        X,
        torch.tensor([3, 0, 4]),
    ),
    "_unsafe_masked_index": (
        lambda x, m, i: torch.ops.aten._unsafe_masked_index(x, m, [i], 0.0),
        X,
        MASK[0].clone(),
        ROW,
    ),
}
WRITES = {
    "scatter": (lambda x, i, v: x.scatter(0, i, v), X, ONCE.view(4, 1).expand(4, 4), ROWS),
    "scatter a number": (lambda x, i: x.scatter(1, i, 2.0), X, FEW),
    "scatter_add": (lambda x, i, v: x.scatter_add(0, i, v), X, EACH, X * 2),
    "index_put, added": (lambda x, i, v: x.index_put((i,), v, accumulate=True), X, ROW, ROWS),
    "masked index_put, added": (
        lambda x, m, v: x.index_put((m,), v, accumulate=True),
        X,
        FIRST,
        numbers(int(FIRST.sum()), 4),
    ),
    "index_add": (lambda x, i, v: x.index_add(0, i, v), X, ROW, ROWS),
    "index_copy": (lambda x, i, v: x.index_copy(0, i, v), X, ONCE, ROWS),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), X, ROW),
    "index_fill a tensor": (lambda x, i, v: x.index_fill(0, i, v), X, ROW, TWO),
    "index_reduce": (lambda x, i, v: x.index_reduce(0, i, v, "mean"), X, ROW, ROWS),
    "masked_fill": (lambda x, m, v: x.masked_fill(m, v), X, MASK, TWO),
    "masked_scatter": (lambda x, m, v: x.masked_scatter(m, v), X, MASK, numbers(8, 4)),
    "put": (lambda x, i, v: x.put(i, v), X, EACH.unique() * 4 - 28, numbers(len(EACH.unique()))),
    "put, added": (lambda x, i, v: x.put(i, v, accumulate=True), X, EACH, X * 2),
}
WRITES |= {
    f"scatter_reduce {how} {keep}": (
        lambda x, i, v, how=how, keep=keep: x.scatter_reduce(0, i, v, how, include_self=keep),
        X,
        EACH,
        X * 2 + 1,
    )
    for how in ("sum", "prod", "mean", "amax", "amin")
    for keep in (True, False)
}
IN_PLACE = {
    "tensor_split": (lambda x, i: torch.tensor_split(x, i), X, torch.tensor([1, 3])),
    "tensor_split in parts": (lambda x, i: torch.tensor_split(x, i, 1), X, torch.tensor(3)),
    "x[i] = v": (put(), X, ONCE, ROWS),
    "x[:, i] = v": (put(slice(None), None), X, FEW[1], numbers(7, 2)),
    "x[mask] = number": (put(), X, MASK, TWO),
    "x[mask] = v": (put(), X, MASK, numbers(int(MASK.sum()))),
    "x[rows] = v": (put(), X, FIRST, numbers(int(FIRST.sum()), 4)),
    "x[rows] = row": (put(), X, FIRST, numbers(1, 4)),
    "x[:, mask] = v": (put(slice(None), None), X, MASK[0], numbers(7, int(MASK[0].sum()))),
    "scatter_, smaller": (lambda x, i, v: x.clone().scatter_(0, i, v), X, FEW, ROWS[:3, :2]),
    "masked_scatter_": (
        lambda x, m, v: x.clone().masked_scatter_(m, v),
        X,
        FIRST.view(7, 1),
        numbers(8, 4),
    ),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@pytest.mark.parametrize("name", [*READS, *WRITES, *IN_PLACE])
def test_as_on_one_device(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = {**READS, **WRITES, **IN_PLACE}[name]
    check(f, *inputs, mesh=virtual(*shape), limit=4, mixed=name not in IN_PLACE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.complex64])
def test_what_is_picked_is_exact(dtype: torch.dtype) -> None:
    """Also what is infinite or not a number comes from one rank, and adds up to itself."""
    x = (numbers(5, 3) * 9).to(dtype)
    if dtype is torch.bfloat16:
        x[0], x[3] = float("nan"), float("inf")
    for f in (lambda x, i: x[i], lambda x, i: x.index_select(0, i), lambda x, i: x.take(i)):
        assert_same(f, [x, ROW % 5], [(Shard(0),), None], virtual(4), grad=False, tolerance=0)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn])
def test_dtypes_that_cannot_be_filled(dtype: torch.dtype) -> None:
    x = (numbers(5, 4).abs() * 9).float().to(dtype)
    got = distribute_tensor(x, virtual(3), [Shard(0)])[ROW % 5].full_tensor()
    assert torch.equal(got.view(torch.uint8), x[ROW % 5].view(torch.uint8))


def test_empty_shards_and_ragged_cuts() -> None:
    for cuts in ((0, 7, 0), (3, 0, 4)):
        for name in ("gather", "x[i, j]", "x[rows]", "take"):
            f, *inputs = READS[name]
            where = [(Shard(0),), *[None] * (len(inputs) - 1)]
            own = [[cuts, None], *[None] * (len(inputs) - 1)]
            assert_same(f, inputs, where, virtual(3), cuts=own)
        f, *inputs = IN_PLACE["x[rows] = v"]
        assert_same(f, inputs, [(Shard(0),), None, None], virtual(3), cuts=[[cuts, None], 0, 0])


OUT_OF_RANGE: list[Callable[..., Any]] = [
    lambda x, i: x[i],
    lambda x, i: x.index_select(0, i),
    lambda x, i: x.gather(0, i.view(-1, 1).expand(2, 4)),
    lambda x, i: x.take(i * 4),
    lambda x, i: F.embedding(i, x),
    lambda x, i: x.index_put((i,), x[0]),
    lambda x, i: x.index_add(0, i, x[:2]),
    lambda x, i: x.index_fill(0, i, 1.0),
    lambda x, i: x.scatter(0, i.view(-1, 1).expand(2, 4), 1.0),
    lambda x, i: x.put(i * 4, x[0, :2]),
]


@pytest.mark.parametrize("f", OUT_OF_RANGE)
def test_an_index_out_of_range_raises(f: Callable[..., Any]) -> None:
    x = distribute_tensor(X, virtual(3), [Shard(0)])
    for bad in (7, -8):
        index = torch.tensor([2, bad])
        with pytest.raises((IndexError, RuntimeError)) as plain:
            f(X, index)
        with pytest.raises(plain.type):
            f(x, index)


# --- bytes -------------------------------------------------------------------------------------


def test_a_few_rows_of_a_sharded_dim_move_nothing() -> None:
    """Each rank picks or writes what lies in its box: a result may be left pending."""
    mesh = virtual(4)
    x = distribute_tensor(numbers(4096, 8), mesh, [Shard(0)])
    some = torch.tensor([4000, 3, 2000])
    wide = some.view(3, 1).expand(3, 8)
    rows = numbers(3, 8)
    assert received(lambda: x.index_select(0, some)) == 0
    assert received(lambda: x[some]) == 0
    assert received(lambda: x.gather(0, wide)) == 0
    assert received(lambda: x.index_put((some,), rows)) == 0
    assert received(lambda: x.index_add(0, some, rows)) == 0
    assert received(lambda: x.index_copy(0, some, rows)) == 0
    assert received(lambda: x.__setitem__(some, rows)) == 0
    assert x[some].placements == (Partial(),)
    # Replicated, it costs what the result's box lacks (twice, for it is reduced), and no operand.
    assert received(lambda: x[some].full_tensor()) <= 2 * 3 * 8 * 8


@pytest.mark.parametrize("rows", [4, 8])
def test_what_every_rank_has_is_cut_as_the_index_is(rows: int) -> None:
    """Nothing moves, also where there are more ranks than rows."""
    mesh = virtual(8)
    x, source = (spread(numbers(rows, 9, seed=seed), mesh, [Replicate()]) for seed in (0, 1))
    index = spread(ints(rows, 9, high=9), mesh, [Shard(0)])
    with shardwise.communication("error"):
        made = [x.gather(1, index), x.scatter_add(1, index, source), x.scatter(1, index, 2.5)]
    assert all(each.placements == (Shard(0),) for each in made)


def test_all_rows_in_another_order_stay_sharded() -> None:
    """A pending sum would hold all rows on every rank; the shards go to another dim instead."""
    mesh = virtual(4)
    whole = numbers(64, 8)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    order = whole[:, 0].argsort()
    shard = 64 * 8 * 8 // 4
    for f in (lambda x: x[order], lambda x: x.index_select(0, order)):
        assert f(x).placements == (Shard(1),)
        assert received(lambda f=f: f(x)) <= shard
        assert_same(f, [whole], [(Shard(0),)], mesh)
    assert F.embedding(order, x).placements == (Partial(),)
    assert x[:, 0][order].placements == (Partial(),)  # there is no other dim


def test_ragged_results_of_masks_move_counts() -> None:
    x = distribute_tensor(numbers(4096), virtual(4), [Shard(0)])
    assert received(lambda: (x > 2).nonzero()) <= x.numel()
    assert received(lambda: x.__setitem__(x > 2, 0.5)) == 0
    with shardwise.ragged_results():
        assert received(lambda: x[x < 0]) <= 4 * 8
        assert received(lambda: (x < 0).nonzero()) <= 4 * 8
        assert received(lambda: x.masked_select(x < 0)) <= 4 * 8


def test_a_mask_of_bytes_writes_a_single_value_on_some_ranks() -> None:
    """PyTorch fills with one value, which it does by a mask of bools alone."""
    mask = torch.tensor([0, 1, 0, 0, 3, 1, 1], dtype=torch.uint8)
    put = torch.ops.aten.index_put.default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # masks of bytes are deprecated
        want = put(numbers(7), [mask], numbers(4, seed=1))
        x, m, v = (
            distribute_tensor(t, virtual(4), [Shard(0)])
            for t in (numbers(7), mask, numbers(4, seed=1))
        )
        assert torch.equal(put(x, [m], v).full_tensor(), want)


@pytest.mark.parametrize("where", [Shard(0), Replicate()], ids=str)
def test_what_does_not_fit_the_tensor_raises(where: Any) -> None:
    """Places of a smaller mask would be in range, and so would those of an index of two dims."""
    one = torch.ones((), dtype=torch.float64)
    calls: list[Callable[..., Any]] = [
        lambda x, m: x[m[:3]],
        lambda x, m: x.t()[:, m[:3]],
        lambda x, m: x.index_put((m[:3],), one),
        lambda x, m: x[m[:3], m[:3].nonzero().flatten()],
        lambda x, m: x.index_select(0, m.nonzero()),
    ]
    given = X, FIRST
    ours = [distribute_tensor(t, virtual(4), [where]) for t in given]
    for call in calls:
        with pytest.raises(IndexError):
            call(*given)
        with pytest.raises(IndexError):
            call(*ours)


def test_ragged_results_are_right_and_differentiable() -> None:
    mesh = virtual(3)
    plain = X.clone().requires_grad_()
    x = distribute_tensor(plain.detach(), mesh, [Shard(0)]).requires_grad_()
    with shardwise.ragged_results():
        got = x[distribute_tensor(FIRST, mesh, [Shard(0)])]
    assert got.placements == (Shard(0),) and got.cuts[0] is not None
    want = plain[FIRST]
    torch.testing.assert_close(got.full_tensor(), want)
    (got * got).sum().backward()
    (want * want).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    with shardwise.ragged_results():
        places = distribute_tensor(MASK, mesh, [Shard(0)]).nonzero()
    assert places.placements == (Shard(0),)
    assert torch.equal(places.full_tensor(), MASK.nonzero())


def test_implicit_moves_of_masks_can_be_forbidden() -> None:
    x = distribute_tensor(X, virtual(2), [Shard(0)])
    with shardwise.communication("error"), pytest.raises(shardwise.errors.CommunicationError):
        x[x > 0]


def test_rows_are_kept_short() -> None:
    mesh = virtual(3)
    plain = X.clone()
    weight = distribute_tensor(X, mesh, [Shard(0)])
    want = F.embedding(FEW, plain, max_norm=0.5)
    got = F.embedding(distribute_tensor(FEW, mesh, [Replicate()]), weight, max_norm=0.5)
    torch.testing.assert_close(got.full_tensor(), want)
    torch.testing.assert_close(weight.full_tensor(), plain)


def test_a_class_out_of_range_raises() -> None:
    i = distribute_tensor(torch.tensor([0, 4, 2]), virtual(2), [Shard(0)])
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        F.one_hot(i, 4)
    with pytest.raises(RuntimeError, match="non-negative"):
        F.one_hot(i - 1)
    assert torch.equal(F.one_hot(i, 5).full_tensor(), F.one_hot(torch.tensor([0, 4, 2]), 5))


@pytest.mark.parametrize("written", ["source", "index", "result", "view of the result"])
def test_writes_after_the_call(written: str) -> None:
    """What was picked stays, what is written counts."""
    x = distribute_tensor(X.clone(), virtual(2), [Shard(0)])
    i = distribute_tensor(ROW.clone(), virtual(2), [Replicate()])
    wanted, made = X[ROW], x[i]
    if written in ("source", "index"):
        (x if written == "source" else i).zero_()
    elif written == "result":
        made.mul_(2)
        wanted.mul_(2)
    else:
        made[1].zero_()
        wanted[1].zero_()
    torch.testing.assert_close(made.full_tensor(), wanted)
