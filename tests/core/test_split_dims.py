"""Dims that are sharded block by block: what a view of a merged sharded dim leaves where it is."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, per_rank
from shardwise.errors import LayoutError
from shardwise.layout.split_dims import common, merge_dims, split_dims

from ..compare import assert_same, check, numbers, spread, virtual
from ..layouts import assert_holds, by_coord, scatter, spec_of, stored, whole_numbers

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def sharded(full: torch.Tensor, *placements: Placement, mesh: Any = None) -> Any:
    return distribute_tensor(full, mesh or virtual(4), placements)


def test_a_view_that_merges_a_sharded_dim_moves_nothing() -> None:
    full = torch.arange(64.0).view(4, 16)
    x = sharded(full, S1)
    with sw.CommDebugMode() as comm:
        flat = x.view(64)
        back = (flat * 2 + 1).view(4, 16)
    assert comm.get_total_counts() == 0
    assert flat.placements == (Shard(0, split=4),)
    assert back.placements == (S1,)
    assert torch.equal(flat.full_tensor(), full.view(64))
    assert torch.equal(back.full_tensor(), full * 2 + 1)
    assert torch.equal(flat.to_local().at((1,)), full[:, 4:8].reshape(-1))


def test_the_view_shares_memory() -> None:
    x = sharded(torch.zeros(4, 16), S1)
    flat = x.view(64)
    flat.add_(1)
    flat[5:9] = 7
    flat[63] = -1
    want = torch.ones(64)
    want[5:9], want[63] = 7, -1
    assert torch.equal(x.full_tensor(), want.view(4, 16))
    assert torch.equal(flat.full_tensor(), want)


VIEWS = {
    "merge": ((4, 6), (24,)),
    "merge three": ((2, 4, 6), (48,)),
    "merge the last two": ((3, 4, 6), (3, 24)),
    "merge and split": ((4, 6), (8, 3)),
    "merge and split elsewhere": ((4, 6), (2, 12)),
    "ends that do not meet": ((4, 6), (3, 8)),
    "with ones": ((4, 1, 6), (1, 24)),
}


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_views_and_back(name: str, mesh: tuple[int, ...]) -> None:
    before, after = VIEWS[name]
    check(lambda x: (x.reshape(after) * 3).reshape(before), numbers(*before), mesh=virtual(*mesh))
    check(lambda x: x.reshape(after).sum(0), numbers(*before), mesh=virtual(*mesh))
    check(lambda x: x.reshape(after).cumsum(-1), numbers(*before), mesh=virtual(*mesh))


def test_heads_stay_with_their_ranks_in_matmul() -> None:
    q, k = numbers(2, 4, 3, 5), numbers(2, 4, 5, 3, seed=1)
    mesh = virtual(2, 2)
    with sw.CommDebugMode() as comm:
        a, b = (distribute_tensor(t, mesh, [S0, S1]) for t in (q, k))
        made = a @ b
    assert comm.get_total_counts() == 0
    assert made.placements == (S0, S1)
    assert torch.allclose(made.full_tensor(), q @ k)


def test_a_batch_second_stays_in_place_when_rows_are_merged() -> None:
    x, w = numbers(3, 4, 5), numbers(6, 5, seed=1)
    mesh = virtual(2)
    given = distribute_tensor(x, mesh, [S1]).requires_grad_()
    weight = distribute_tensor(w, mesh, [R])
    with sw.CommDebugMode() as comm:
        made = (given.reshape(12, 5) @ weight.t()).relu().view(3, 4, 6)
        made.backward(torch.ones_like(made))
    assert comm.get_total_counts() == 0
    assert made.placements == (S1,)
    assert given.grad.placements == (S1,)


# --- every pair of layouts ----------------------------------------------------------------------

KINDS: list[Placement] = [R, S0, S1, P, Shard(0, 2), Shard(0, 4), Shard(1, 3)]


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_all_pairs(shape: tuple[int, ...]) -> None:
    mesh = virtual(*shape)
    full = whole_numbers((8, 6), dtype=torch.float64)
    every = list(itertools.product(KINDS, repeat=len(shape)))
    pairs = list(itertools.product(every, every))
    for src, dst in pairs[:: 1 if len(shape) == 1 else 17]:
        a, b = (
            spec_of(mesh, src, full.shape, full.dtype),
            spec_of(mesh, dst, full.shape, full.dtype),
        )
        held = stored(a, scatter(a, full))
        x = DTensor.from_local(
            per_rank(mesh, lambda c, a=a, held=held: held[a.slot(c)]), mesh, src, run_check=True
        )
        assert x._spec is a
        assert_holds(b, by_coord(b, x.redistribute(placements=dst)._locals), full, f"from {a}")


def test_inner_axis_first() -> None:
    """With blocks an inner axis can cut a dim before an outer one does."""
    mesh = virtual(2, 2)
    x = distribute_tensor(torch.arange(8), mesh, [Shard(0, 2), S0])
    held = [x.to_local().at(c).tolist() for c in itertools.product(range(2), repeat=2)]
    assert held == [[0, 1], [4, 5], [2, 3], [6, 7]]


# --- all that one does with a tensor ------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
def test_a_parameter_in_blocks_trains(foreach: bool) -> None:
    mesh = virtual(2)
    weight = numbers(6, 4)
    plain = nn.Parameter(weight.clone())
    ours = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0, 3)]))
    for p in (plain, ours):
        opt = torch.optim.AdamW([p], lr=0.1, foreach=foreach)
        for _ in range(3):
            opt.zero_grad()
            (p.t().sin().sum(0) ** 2).sum().backward()
            nn.utils.clip_grad_norm_([p], 0.5, foreach=foreach)
            opt.step()
    assert ours.placements == ours.grad.placements == (Shard(0, 3),)
    torch.testing.assert_close(ours.full_tensor(), plain, check_stride=False)


def test_masks_and_fallbacks() -> None:
    blocks = [(Shard(0, 2),)]
    x = numbers(8, 6)
    for f in (
        lambda t: t[t > 0],
        lambda t: t.unique(),
        lambda t: t.sort(0).values,
        lambda t: torch.linalg.svdvals(t),
        lambda t: torch.nonzero(t > 1),
        lambda t: t.roll(3, 0),
        lambda t: nn.functional.pad(t, (1, 2, 3, 1)),
        lambda t: torch.cat([t, t * 2]),
        lambda t: torch.split(t, [3, 5]),
        lambda t: torch.stack([t, t], 1),
        lambda t: t.argmax(0),
        lambda t: t.softmax(0),
        lambda t: t.chunk(3, 1),
        lambda t: t[2],
        lambda t: t[:, 1:5:2],
        lambda t: t.clone().squeeze_(),
        lambda t: t.clone().index_fill_(0, torch.tensor([1, 6]), 2.0),
    ):
        assert_same(f, [x], blocks, virtual(4), grad=False)


ALIASES = {
    "unbind": lambda t: t.unbind(0),
    "split": lambda t: t.split([1, 5, 2]),
    "select": lambda t: (t[3], t[-1], t[:, 2]),
    "diagonal": lambda t: (t.diagonal(),),
    "as_strided": lambda t: (t.as_strided((3, 2), (6, 1), 1),),
    "step": lambda t: (t[1::3],),
    "another split": lambda t: (t.view(4, 2, 3, 2),),
    "flat": lambda t: (t.view(48)[5:31], t.view(48)),
}


@pytest.mark.parametrize("name", ALIASES)
def test_views_alias(name: str) -> None:
    full = numbers(8, 6)
    for places in ((Shard(0, 2), S0), (Shard(0, 4), Shard(1, 3)), (Shard(1, 2), R)):
        plain, ours = full.clone(), distribute_tensor(full, virtual(2, 2), places)
        pairs = list(zip(ALIASES[name](plain), ALIASES[name](ours), strict=True))
        for number, (want, got) in enumerate(pairs):
            assert got.stride() == want.stride()
            want.mul_(-1).add_(number)
            got.mul_(-1).add_(number)
        assert torch.equal(ours.full_tensor(), plain)
        plain.sin_(), ours.sin_()
        for want, got in pairs:
            assert torch.equal(got.full_tensor(), want)


def test_factors_without_rows() -> None:
    """A mean of all rows has no rows of its own: the pieces are made consecutive."""

    def f(x: Any, w: Any, t: Any) -> Any:
        return nn.functional.linear_cross_entropy(x, w, t)

    x, w, t = numbers(8, 3), numbers(4, 3, seed=1), torch.arange(8) % 4
    assert_same(f, [x, w, t], [(Shard(0, 2),), (R,), (Shard(0, 2),)], virtual(2))


def test_copies_and_pickles() -> None:
    x = distribute_tensor(torch.arange(12), virtual(3), [Shard(0, 2)])
    assert Shard(0, 2) is pickle.loads(pickle.dumps(Shard(0, 2)))
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.clone()):
        assert other.placements == x.placements
        assert torch.equal(other.full_tensor(), x.full_tensor())
    again = DTensor.from_local(x.to_local(), x.device_mesh, x.placements, run_check=True)
    assert again._spec is x._spec
    assert torch.equal(again.full_tensor(), x.full_tensor())


@pytest.mark.parametrize(
    ("placements", "cuts"),
    [
        ([Shard(0, 2), S1], [None, None, (1, 4)]),
        ([Shard(0, 2), S1], [None, (1, 3), (0, 5)]),
        ([Shard(0, 2), Shard(0, 2)], [None, (1, 0, 3, 0), None]),
    ],
)
def test_local_tensors_of_ragged_blocks_are_taken_back(placements: Any, cuts: Any) -> None:
    x = distribute_tensor(numbers(8, 5), virtual(2, 2), placements, cuts=cuts)
    again = DTensor.from_local(x.to_local(), x.device_mesh, x.placements, run_check=True)
    assert again._spec is x._spec


def test_texts() -> None:
    x = distribute_tensor(torch.arange(12), virtual(2), [Shard(0, 3)])
    assert repr(x).endswith("9, 10, 11], int64[12@0(split=3)] on (2))")
    assert sw.picture(x).splitlines()[1].startswith("0:2,4:6,8:10  | 0 |")
    ragged = distribute_tensor(torch.arange(12), virtual(2), [Shard(0, 3)], cuts=[None, (1, 3)])
    assert ragged._spec.layout_text() == "[S(0, split=3)] cuts(0.1)=[1, 3]"
    assert torch.equal(ragged.full_tensor(), torch.arange(12))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Shard(0, 0), "the split must be at least 1, but got 0"),
        (lambda: Shard(0, 1.5), "the split must be an int, but got 1.5"),  # type: ignore[arg-type]
        (lambda: sharded(torch.zeros(6), Shard(0, 4)), "dim 0 of size 6 cannot be seen as 4 equal"),
        (
            lambda: sharded(torch.zeros(4), Shard(0, 4)),
            "A split must divide the size, .* without a split, takes any",
        ),
        (
            lambda: sharded(torch.zeros(12), Shard(0, 2), Shard(0, 3), mesh=virtual(2, 2)),
            "one split the next",
        ),
        (
            lambda: spec_of(virtual(2), [Shard(0, 2)], (8,)).dim_cuts,
            r"Redistribute to \[S\(0\)\] first",
        ),
    ],
)
def test_errors(make: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()


def test_finer_and_coarser_shapes() -> None:
    assert common(((4, 16),), ((2, 32),)) == ((2, 2, 16),)
    assert common(((4, 6),), ((6, 4),)) is None
    spec = spec_of(virtual(2, 2), [S0, Shard(0, 4)], (64,))
    fine = split_dims(spec, ((4, 4, 4),))
    assert fine is not None
    assert fine.placements == (S0, S1)
    assert merge_dims(fine, ((4, 4, 4),), spec.meta) is spec
    assert split_dims(spec, ((8, 8),)) is None
    x = spread(torch.arange(64), virtual(2, 2), (P, Shard(0, 4)))
    assert torch.equal(x.full_tensor(), torch.arange(64))


@pytest.mark.parametrize("mode", ["exact", "counter"])
def test_draws_in_both_modes(mode: Any) -> None:
    blocks, whole = (
        distribute_tensor(numbers(8, 6), virtual(2, 2), where)
        for where in ([Shard(0, 2), Shard(1, 3)], [R, R])
    )
    for draw in (
        lambda t: torch.dropout(t, 0.4, True),
        lambda t: torch.bernoulli(t.sigmoid()),
        lambda t: torch.rand_like(t),
        lambda t: t.clone().normal_(1, 2),
        lambda t: torch.poisson(t.abs()),
        lambda t: torch.multinomial(t.abs(), 3, replacement=True),
        lambda t: torch.multinomial(t.abs(), 2),
    ):
        with sw.random.mode(mode):
            made = []
            for x in (blocks, whole):
                torch.manual_seed(5)
                made.append(draw(x).full_tensor())
        assert torch.equal(*made)


def test_factories() -> None:
    mesh, blocks = virtual(2), [Shard(0, 2)]
    for made, want in (
        (sw.arange(8, device_mesh=mesh, placements=blocks), torch.arange(8)),
        (sw.eye(8, device_mesh=mesh, placements=blocks), torch.eye(8)),
        (sw.linspace(0, 1, 8, device_mesh=mesh, placements=blocks), torch.linspace(0, 1, 8)),
    ):
        assert made.placements == tuple(blocks)
        assert torch.equal(made.full_tensor(), want)
    torch.manual_seed(1)
    made = sw.randperm(8, device_mesh=mesh, placements=blocks)
    torch.manual_seed(1)
    assert torch.equal(made.full_tensor(), torch.randperm(8))


SEQUENCE = {
    "cross_entropy": lambda x, t: nn.functional.cross_entropy(
        x.view(-1, 10), t.view(-1), ignore_index=3
    ),
    "mse": lambda x, t: nn.functional.mse_loss(x.view(-1), x.view(-1).sin()),
    "layer_norm": lambda x, t: nn.functional.layer_norm(x.view(-1, 10), (10,)),
    "norm": lambda x, t: x.view(-1).norm(),
    "var": lambda x, t: x.view(-1).var(),
    "largest": lambda x, t: x.view(-1).amax(),
    "embedding": lambda x, t: nn.functional.embedding(t.view(-1), x[0, :, :4].clone()),
    "gather": lambda x, t: x.view(-1, 10).gather(1, t.view(-1, 1)),
    "accuracy": lambda x, t: (x.view(-1, 10).argmax(-1) == t.view(-1)).double().mean(),
    "one_hot": lambda x, t: nn.functional.one_hot(t.view(-1), 12),
    "tril": lambda x, t: x.view(-1, 5, 2).tril(),
}


@pytest.mark.parametrize("name", SEQUENCE)
def test_what_is_done_with_merged_rows(name: str) -> None:
    x, t = numbers(3, 4, 10), torch.arange(12).view(3, 4) % 4
    for where in ((S1,), (Shard(1),), (Shard(1, 2),)):
        assert_same(SEQUENCE[name], [x, t], [where, where], virtual(2))


def test_a_loss_of_merged_rows_moves_statistics_only() -> None:
    """The sequence is sharded: rows of all sentences are merged where they are."""
    x = distribute_tensor(numbers(3, 4, 10), virtual(2), [S1]).requires_grad_()
    t = distribute_tensor(torch.arange(12).view(3, 4) % 10, virtual(2), [S1])
    with sw.CommDebugMode() as comm:
        nn.functional.cross_entropy(x.view(-1, 10), t.view(-1)).backward()
    assert comm.bytes == {"all_reduce": 16}


# --- in small buffers -----------------------------------------------------------------------------

APART = {
    "blocks to pieces": ((96,), [Shard(0, split=3)], [S0]),
    "pieces to blocks": ((96, 2), [S0], [Shard(0, split=8)]),
    "few blocks to many": ((96,), [Shard(0, split=2)], [Shard(0, split=24)]),
    "blocks that share no end": ((60,), [Shard(0, split=4)], [Shard(0, split=15)]),
    "another dim": ((12, 50), [Shard(0, split=3)], [Shard(0, split=2)]),
    "a dim that is sharded too": ((12, 50), [Shard(0, split=3)], [S1]),
    "ends whole": ((96,), [Shard(0, split=8)], [Shard(0, split=6)]),
    "fewer blocks than ranks": ((96, 2), [Shard(0, split=2)], [S0]),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("ranks", [3, 4])
def test_blocks_move_with_any_buffer(name: str, ranks: int) -> None:
    shape, src, dst = APART[name]
    mesh, full = virtual(ranks), torch.arange(float(torch.Size(shape).numel())).view(shape)
    x = distribute_tensor(full, mesh, src)
    goal = spec_of(mesh, dst, shape)
    for room in (100, 10**6):
        with sw.exchange_buffer(room):
            assert_holds(goal, by_coord(goal, x.redistribute(placements=dst)._locals), full)
            later = x.redistribute(placements=dst, async_op=True)
            assert torch.equal(later.full_tensor(), full)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape, dim, blocks", [((4, 6, 24), 2, 3), ((5, 21), 1, 3), ((24,), 0, 4)])
def test_blocks_are_split_and_joined_where_they_are(
    ranks: int, shape: tuple[int, ...], dim: int, blocks: int
) -> None:
    """Queries, keys and values of one layer, and their gradients."""
    plain = numbers(*shape).requires_grad_()
    x = distribute_tensor(plain.detach(), virtual(ranks), [Shard(dim, blocks)]).requires_grad_()
    size = shape[dim] // blocks

    def loss(whole: Any) -> Any:
        parts = [*whole.split(size, dim), *whole.chunk(blocks, dim)]
        again = torch.cat(parts[blocks:], dim)
        return [(i + 1) * part * part for i, part in enumerate([*parts, again])]

    with sw.CommDebugMode() as seen:
        made = loss(x)
        torch.autograd.backward(made, [torch.ones_like(each) for each in made])
    expected = loss(plain)
    torch.autograd.backward(expected, [torch.ones_like(each) for each in expected])
    assert seen.get_total_counts() == 0
    for found, right in zip(made, expected, strict=True):
        torch.testing.assert_close(found.full_tensor(), right.detach())
    assert made[0].placements == (Shard(dim),)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def test_slices_across_blocks_are_those_of_one_device() -> None:
    plain = numbers(3, 24)
    x = distribute_tensor(plain, virtual(2), [Shard(1, 3)])
    for part in (slice(0, 12), slice(4, 16), slice(8, 8), slice(0, 24, 8), slice(8, 24)):
        assert torch.equal(x[:, part].full_tensor(), plain[:, part])
    x[:, 8:16] = -1.0
    plain[:, 8:16] = -1.0
    assert torch.equal(x.full_tensor(), plain)
