"""embedding_bag with rows, indices and offsets in shards: no bag is taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import CommDebugMode, Partial, Replicate, Shard, keep_partial_grads
from shardwise.errors import OutOfRangeError

from .compare import assert_same, eager, ints, numbers, spread, virtual

R, S = Replicate(), Shard
# Of few different numbers many are the largest: the first counts, as its gradient tells.
TABLE = ints(900, 5, low=-2, high=3).double()
WORDS, STARTS = ints(300, high=900, seed=1), ints(39, high=300, seed=2).sort().values
STARTS = torch.cat([torch.zeros(1, dtype=torch.int64), STARTS])  # some bags are empty


def bags(weight: Any, words: Any, starts: Any, mode: str = "max", **options: Any) -> Any:
    return F.embedding_bag(words, weight, starts, mode=mode, **options)


def parts(weight: Any, words: Any, starts: Any, mode: int) -> Any:
    return torch.ops.aten._embedding_bag(weight, words, starts, False, mode, False, None, False, 3)


CALLS: dict[str, tuple[Any, ...]] = {
    "bags": (bags, TABLE, WORDS, STARTS),
    "padding": (lambda w, i, o: bags(w, i, o, padding_idx=3), TABLE, WORDS % 7, STARTS),
    "the last offset": (
        lambda w, i, o: bags(w, i, o, include_last_offset=True),
        TABLE, WORDS, torch.cat([STARTS, torch.tensor([300])]),
    ),
    "rows of indices": (lambda w, i: F.embedding_bag(i, w, mode="max"), TABLE, WORDS.view(30, 10)),
    "a small table": (bags, TABLE[:60], WORDS % 60, STARTS),
    "few bags": (bags, TABLE, WORDS, torch.tensor([0, 0, 200])),
    "short integers": (bags, TABLE, WORDS.int(), STARTS.int()),
    "two kinds of integers": (bags, TABLE, WORDS.int(), STARTS),
    "sums": (lambda w, i, o: bags(w, i, o, "sum", padding_idx=3), TABLE, WORDS % 7, STARTS),
    "means": (lambda w, i, o: bags(w, i, o, "mean", padding_idx=3), TABLE, WORDS % 7, STARTS),
    "weights": (
        lambda w, i, o, p: bags(w, i, o, "sum", per_sample_weights=p),
        TABLE, WORDS, STARTS, numbers(300),
    ),
    "by frequency": (
        lambda w, i, o: bags(w, i, o, "sum", scale_grad_by_freq=True), TABLE, WORDS, STARTS
    ),
    "means by frequency": (
        lambda w, i, o: bags(w, i, o, "mean", scale_grad_by_freq=True, padding_idx=3),
        TABLE, WORDS % 7, STARTS,
    ),
    "weights by frequency": (
        lambda w, i, o, p: bags(
            w, i, o, "sum", per_sample_weights=p.detach(), scale_grad_by_freq=True
        ),
        TABLE, WORDS % 60, STARTS, numbers(300),
    ),
    "rows by frequency": (
        lambda w, i: F.embedding(i, w, padding_idx=3, scale_grad_by_freq=True), TABLE, WORDS % 60
    ),
    "rows of two dims by frequency": (
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), TABLE, (WORDS % 60).view(30, 10)
    ),
    "every other index": (lambda w, i, o: bags(w, i[::2], o // 2), TABLE, WORDS, STARTS),
    "one index": (lambda w, i, o: bags(w, i[:1].expand(300), o, "mean"), TABLE, WORDS, STARTS),
}  # fmt: skip
LAYOUTS = {
    "rows": ((4,), [(S(0),)] * 3),
    "rows of two axes": ((2, 3), [(S(0), S(0))] * 3),
    "rows and columns": ((2, 2), [(S(0), S(1)), (S(0), S(0)), (S(0), R)]),
    "whole indices": ((4,), [(S(0),), (R,), (R,)]),
    "whole rows": ((4,), [(R,), (S(0),), (S(0),)]),
}


@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_bags_as_on_one_device(name: str, where: str) -> None:
    (call, *given), (shape, layouts) = CALLS[name], LAYOUTS[where]
    assert_same(call, given, [*layouts, layouts[1]][: len(given)], eager(*shape))


@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_all_that_the_operator_returns(mode: int, where: str) -> None:
    """The bag of each index, the sizes of bags and the chosen rows; the first counts of equal ones
    and a NaN only if it is the first."""
    table = TABLE.clone()
    if mode == 2:
        table[::7, 1], table[::5, 2], table[1::5, 2] = torch.nan, torch.inf, -torch.inf
    shape, layouts = LAYOUTS[where]
    plain = (table, WORDS, STARTS)
    given = [spread(t, eager(*shape), at) for t, at in zip(plain, layouts, strict=True)]
    for ours, theirs in zip(parts(*given, mode), parts(*plain, mode), strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours.full_tensor(), theirs, equal_nan=True)


def received(call: Any) -> tuple[int, Any]:
    with CommDebugMode() as comm:
        made = call()
    return sum(comm.bytes.values()), made


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_rows_are_asked_for_and_gradients_are_sent(mode: str) -> None:
    """A rank receives a place for each index and the rows of its own, and tables; and so it does
    for the gradient, of which for the largest only the chosen elements are sent."""
    weight, words = numbers(16384, 4, dtype=torch.float32), ints(32768, high=16384)
    starts = torch.arange(0, 32768, 8)
    ours = [spread(t, virtual(8), [S(0)]) for t in (weight, words, starts)]
    ours[0].requires_grad_()
    got, made = received(lambda: bags(*ours, mode))
    assert made.placements == (S(0),)
    share = 32768 // 8 * (4 + 16) + 2000
    assert got < share
    got, _ = received(made.sum().backward)
    assert got < (share if mode != "max" else 4096 * 4 // 8 * 8 + 2000)
    theirs = weight.clone().requires_grad_()
    want = bags(theirs, words, starts, mode)
    want.sum().backward()
    assert theirs.grad is not None
    torch.testing.assert_close(made.full_tensor(), want)
    torch.testing.assert_close(ours[0].grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("mode", ["sum", "mean", "rows"])
def test_indices_are_counted_where_the_rows_are(mode: str) -> None:
    """Besides the rows of the gradient a place and a number for each index, and another table."""
    weight, words = numbers(16384, 4, dtype=torch.float32), ints(32768, high=16384)
    starts = torch.arange(0, 32768, 8)

    def run(weight: Any, words: Any, starts: Any) -> Any:
        if mode == "rows":
            return F.embedding(words, weight, scale_grad_by_freq=True)
        return bags(weight, words, starts, mode, scale_grad_by_freq=True)

    ours = [spread(t, virtual(8), [S(0)]) for t in (weight, words, starts)]
    made = run(ours[0].requires_grad_(), *ours[1:])
    got, _ = received(made.sum().backward)
    assert got < 32768 // 8 * (4 + 16 + 4 + 4) + 2000
    theirs = weight.clone().requires_grad_()
    run(theirs, words, starts).sum().backward()
    torch.testing.assert_close(ours[0].grad.full_tensor(), theirs.grad)


def test_few_indices_are_counted_by_ranks_that_have_columns() -> None:
    """They are less than a number for each row of the table."""
    weight, words, grad, mesh = numbers(4096, 32), ints(64, high=4096), numbers(64, 32), eager(8)
    for run, place in (
        (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), R),
        (lambda w, i: F.embedding_bag(i.view(-1, 1), w, mode="sum", scale_grad_by_freq=True), S(0)),
    ):
        ours, theirs = spread(weight, mesh, [S(1)]).requires_grad_(), weight.clone()
        made, given = run(ours, spread(words, mesh, [S(0)])), spread(grad, mesh, [place])
        got, _ = received(lambda made=made, given=given: made.backward(given))
        assert got < 64 * 32 * 8 // 8 + 4 * 64 * 8
        run(theirs.requires_grad_(), words).backward(grad)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_sums_that_half_precision_cannot_hold_are_divided_first() -> None:
    """Each of 4000 gradients of 100 is divided by 4000 on one device."""
    weight, words = numbers(64, 4, dtype=torch.float16), torch.arange(8000) % 2
    for run in (
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
        lambda w, i: F.embedding_bag(i.view(-1, 1), w, mode="sum", scale_grad_by_freq=True),
    ):
        ours = spread(weight, eager(4), [S(0)]).requires_grad_()
        (run(ours, spread(words, eager(4), [S(0)])) * 100.0).backward(torch.ones(8000, 4).half())
        found = ours.grad.full_tensor()
        torch.testing.assert_close(found[:2], torch.full((2, 4), 100.0).half())
        assert not found[2:].any()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_starts_of_bags_are_made_whole_once_for_columns(mode: str) -> None:
    """Which bag an index is in follows from them, and is not looked up in shards."""
    weight, words = numbers(512, 8), ints(4096, high=512)
    starts = torch.arange(0, 4096, 8)
    layouts = ((weight, S(1)), (words, R), (starts, S(0)))
    ours = [spread(t, virtual(8), [at]) for t, at in layouts]
    made = bags(ours[0].requires_grad_(), *ours[1:], mode)
    got, _ = received(made.sum().backward)
    assert got <= 512 * 8


@pytest.mark.parametrize("place", [S(0), R], ids=str)
def test_gradients_of_weights_are_found_where_the_bags_are(place: Any) -> None:
    """A rank asks for the rows of its own bags, if it has not all of them."""
    weight, words = numbers(16384, 4, dtype=torch.float32), ints(32768, high=16384)
    starts, factors = torch.arange(0, 32768, 8), numbers(32768, dtype=torch.float32)
    plain, mesh = factors.clone().requires_grad_(), virtual(8)
    ours = [spread(weight, mesh, [place]), *(spread(t, mesh, [S(0)]) for t in (words, starts))]
    own = spread(factors, mesh, [S(0)]).requires_grad_()
    made = bags(*ours, "sum", per_sample_weights=own)
    got, _ = received(made.sum().backward)
    assert got < (2000 if place.is_replicate() else 32768 // 8 * (4 + 16) + 2000)
    bags(weight, words, starts, "sum", per_sample_weights=plain).sum().backward()
    torch.testing.assert_close(own.grad.full_tensor(), plain.grad)


def test_a_sum_that_is_divided_by_frequency_stays_pending_where_gradients_are_kept() -> None:
    """Of the table only how often each row is named is shared."""
    weight, words = numbers(64, 4, dtype=torch.float32), ints(4096, high=64)
    starts = torch.arange(0, 4096, 8)
    for run in (
        lambda w, i, o: F.embedding(i, w, scale_grad_by_freq=True),
        lambda w, i, o: bags(w, i, o, "sum", scale_grad_by_freq=True),
    ):
        ours = spread(weight, virtual(8), [R]).requires_grad_()
        made = run(ours, *(spread(t, virtual(8), [S(0)]) for t in (words, starts)))
        with keep_partial_grads():
            got, _ = received(made.sum().backward)
        assert got < 2 * 64 * 4 + 1000
        assert ours.grad.placements == (Partial(),)
        theirs = weight.clone().requires_grad_()
        run(theirs, words, starts).sum().backward()
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_whole_rows_move_few_indices(mode: str) -> None:
    """Data in shards and a table on every rank: tables, and the indices whose bag starts elsewhere;
    sums stay pending where gradients are kept."""
    weight, words = numbers(64, 4, dtype=torch.float32), ints(4096, high=64)
    starts = torch.arange(0, 4096, 8)
    ours = [spread(t, virtual(8), [at]) for t, at in ((weight, R), (words, S(0)), (starts, S(0)))]
    ours[0].requires_grad_()
    got, made = received(lambda: bags(*ours, mode))
    assert made.placements == (S(0),)
    assert got < 1000
    with keep_partial_grads():
        got, _ = received(made.sum().backward)
    assert got < 1000
    assert ours[0].grad.placements == (Partial(),)


def test_indices_of_a_small_table_stay_where_they_are() -> None:
    """Its rows are gathered; of the indices only those move whose bag starts elsewhere."""
    weight, words = numbers(64, 4, dtype=torch.float32), ints(65536, high=64)
    starts = torch.arange(0, 65536, 7)
    ours = [spread(t, virtual(8), [S(0)]) for t in (weight, words, starts)]
    got, made = received(lambda: bags(*ours))
    assert got < 64 * 16 + 65536 // 8 * 2
    assert made.full_tensor().equal(bags(weight, words, starts))


@pytest.mark.parametrize("rows", [60, 900])
def test_what_is_out_of_range_is_told_to_every_rank(rows: int) -> None:
    assert_out_of_range(eager(4), rows)


def assert_out_of_range(mesh: Any, rows: int) -> None:
    """Every rank raises, though one alone has the index or the offset."""
    for bad in (rows, -1):
        words = WORDS % rows
        words[250] = bad
        given = [spread(t, mesh, [S(0)]) for t in (numbers(rows, 2), words, STARTS)]
        with pytest.raises(OutOfRangeError, match=f"index {bad} is out of bounds"):
            bags(*given)
    for place, starts in ((0, STARTS + 1), (-1, torch.cat([STARTS, torch.tensor([301])]))):
        given = [spread(t, mesh, [S(0)]) for t in (numbers(rows, 2), WORDS % rows, starts)]
        with pytest.raises(RuntimeError, match=rf"offsets\[{place}\]"):
            bags(*given)
