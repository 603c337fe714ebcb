"""embedding_bag with rows, columns, indices and offsets sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import CommDebugMode, Partial, Replicate, Shard, keep_partial_grads

from ..compare import assert_same, check, eager, ints, numbers, spread, virtual

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
    "sums of rows": (lambda w, i: F.embedding_bag(i, w, mode="sum"), TABLE, WORDS.view(30, 10)),
    "short integers": (bags, TABLE, WORDS.int(), STARTS.int()),
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
}  # fmt: skip
LAYOUTS = {
    "rows": ((4,), [(S(0),)] * 3),
    "rows and columns": ((2, 2), [(S(0), S(1)), (S(0), S(0)), (S(0), R)]),
    "whole rows": ((4,), [(R,), (S(0),), (S(0),)]),
    "replicated": ((2,), [(R,), (R,), (R,)]),
    "columns": ((2,), [(S(1),), (R,), (R,)]),
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


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_one_size_stay_where_their_indices_are(mode: str) -> None:
    """As in data parallel training. Only the gradient of the table is left to be reduced."""
    weight, words, mesh = numbers(64, 4), ints(32, 3, high=64), virtual(4)
    ours = spread(weight, mesh, [R]).requires_grad_()
    theirs = weight.clone().requires_grad_()
    with keep_partial_grads(), CommDebugMode() as comm:
        made = F.embedding_bag(spread(words, mesh, [S(0)]), ours, mode=mode)
        made.pow(2).sum().backward()
    assert made.placements == (S(0),) and ours.grad.placements == (Partial(),)
    assert comm.get_total_counts() == 0
    want = F.embedding_bag(words, theirs, mode=mode)
    want.pow(2).sum().backward()
    torch.testing.assert_close(made.full_tensor(), want)
    torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("rows", [60, 900])
def test_what_is_out_of_range_raises(rows: int) -> None:
    assert_out_of_range(eager(4), rows)


def assert_out_of_range(mesh: Any, rows: int) -> None:
    """Every rank raises, though one alone has the index or the offset."""
    for bad in (rows, -1):
        words = WORDS % rows
        words[250] = bad
        given = [spread(t, mesh, [S(0)]) for t in (numbers(rows, 2), words, STARTS)]
        with pytest.raises((RuntimeError, IndexError)):
            bags(*given)
    for place, starts in ((0, STARTS + 1), (-1, torch.cat([STARTS, torch.tensor([301])]))):
        given = [spread(t, mesh, [S(0)]) for t in (numbers(rows, 2), WORDS % rows, starts)]
        with pytest.raises(RuntimeError, match=rf"offsets\[{place}\]"):
            bags(*given)


def test_bags_of_the_kernel_that_adds_up_quickly() -> None:
    """In single precision PyTorch does not say which bag an index is in."""

    def run(w: Any, i: Any, o: Any, p: Any) -> Any:
        return F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p)

    inputs = numbers(7, 4).float(), ints(9, high=7), torch.tensor([0, 2, 2, 5]), numbers(9).float()
    check(run, *inputs, mesh=virtual(3), limit=6, tolerance=1e-5)
