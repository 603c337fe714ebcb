"""Elements that change their place: joins, turns, repeats, triangles and diagonals."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard

from ..compare import assert_same, check, ints, numbers, virtual

X, B, I64 = numbers(7, 5), numbers(3, 4, 5), ints(7, 5)
Y, SQUARE = numbers(7, 5, seed=3), numbers(5, 5)


def turned(x):
    return [x.flip(0), x.flip(0, 1), x.flip(-1), x.flip(()), x.t().flip(0), x.rot90(), x.fliplr()]


def turned_repeats(x):
    """What kernels make of a tensor that repeats itself is contiguous: it can be viewed."""
    wide = x.expand(3, *x.shape)
    return [wide.flip(1).view(-1), wide.flip(0, 2).view(-1), wide.transpose(1, 2).roll(1, 1)]


def rolled(x):
    some = [x.roll(1, 0), x.roll(-3, 0), x.roll((2, 1), (0, 1)), x.roll(2), x.roll(9, 1)]
    return [*some, x.t().roll(2, 0), x.roll((1, 2), (0, 0)), x.roll(0, 0), torch.fft.fftshift(x)]


def diagonals(x):
    some = [x.diagonal(), x.diagonal(1), x.diagonal(-2), x.diagonal(9), x.diag(), x.trace()]
    return [*some, x.t().diagonal(-1), torch.diagonal_copy(x, 1), x.t().trace()]


def write_diagonals(x):
    y = x.clone()
    y.diagonal(1).mul_(2).add_(1)
    y.diagonal(-1).copy_(y.diagonal()[:1].expand(y.diagonal(-1).shape))
    pair = torch.stack([y, y])
    pair[1].fill_diagonal_(4.0, wrap=True)  # of a view: the first is left alone
    return [y, y.fill_diagonal_(3.0), pair]


CASES = {
    "turned repeats": (turned_repeats, X),
    "turned": (turned, X),
    "turned integers": (turned, I64),
    "rolled": (rolled, X),
    "rolled, one row": (rolled, X[:1].clone()),
    "rolled, no rows": (lambda x: [x.roll(1, 0), x.roll(1, 1)], numbers(0, 3)),
    "repeated": (lambda x: [x.repeat(2, 1), x.repeat(1, 3), x.repeat(2, 2, 2), x.tile(3)], X),
    "repeated often": (
        lambda x: [x.repeat(5, 1), x.repeat(0, 2), x.repeat(3, 1, 1)],
        X[:2].clone(),
    ),
    "cat": (lambda x, y: [torch.cat([y, x, y]), torch.cat([x[1:3], y[2:]])], X, numbers(4, 5)),
    "cat of columns": (lambda x, y: [torch.cat([x, y], 1), torch.cat([x, y[:, :0]], 1)], X, Y),
    "cat of transposed": (lambda x, y: torch.cat([x.t(), y.t()]), SQUARE, numbers(5, 5, seed=1)),
    "cat of dtypes": (lambda x, y: torch.cat([x, y]), X, I64),
    "cat of nothing": (lambda x, y: torch.cat([x, y]), X, numbers(0)),
    "stacks": (
        lambda x, y: [torch.hstack([x, y]), torch.dstack([x, y]), torch.vstack([x, y])],
        X,
        Y,
    ),
    "triangles": (lambda x: [x.tril(), x.triu(1), x.tril(-2), x.clone().triu_(-1)], B),
    "diagonals": (diagonals, X),
    "diagonals of integers": (diagonals, I64),
    "diagonals of many": (lambda x: [x.diagonal(), x.diagonal(1, 1, 2), x.diagonal(-2, 2, 0)], B),
    "onto a diagonal": (
        lambda x: [torch.diag_embed(x), torch.diag_embed(x, -2, 0, 2), torch.diagflat(x[0], 1)],
        X,
    ),
    "a diagonal replaced": (
        lambda x, y: [x.diagonal_scatter(y), x.t().diagonal_scatter(y[:4], -1)],
        X,
        numbers(5),
    ),
    "a place replaced": (lambda x, y: x.select_scatter(y, 0, 4), X, numbers(5)),
    "a diagonal written": (write_diagonals, X),
    "cross": (
        lambda x, y: [torch.cross(x, y, dim=1), torch.linalg.cross(x, y[:1], dim=1)],
        numbers(5, 3, 2),
        numbers(5, 3, 2, seed=4),
    ),
    "products": (
        lambda x, y: [torch.kron(x, y), torch.block_diag(x, y)],
        numbers(3, 4),
        numbers(2, 5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_in_every_layout(name):
    f, *inputs = CASES[name]
    for shape, limit in (((2,), 2), ((3,), 1), ((2, 2), 3)):
        check(f, *inputs, mesh=virtual(*shape), limit=limit)


@pytest.mark.parametrize("cuts", [((0, 5, 2), None), ((1, 0, 6), None), ((7, 0, 0), None)], ids=str)
def test_along_ragged_cuts(cuts):
    for f in (turned, rolled, diagonals, lambda x: [x.repeat(2, 1), x.tril()]):
        assert_same(f, [X], [(Shard(0),)], virtual(3), cuts=[cuts])
    own = [cuts, ((2, 2, 3), None)]
    assert_same(lambda x, y: torch.cat([x, y]), [X, Y], [(Shard(0),)] * 2, virtual(3), cuts=own)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_pending_values_stay_pending(op):
    x = sw.distribute_tensor(X, virtual(2), [Replicate()]).redistribute(placements=[sw.Partial(op)])
    with sw.communication("error", fallback="error"):
        made = [x.flip(0), x.roll(1, 0), x.tril(), x.diagonal(1), x.repeat(2, 1), x[0].clone()]
    for have, want in zip(
        made,
        [X.flip(0), X.roll(1, 0), X.tril(), X.diagonal(1), X.repeat(2, 1), X[0]],
        strict=True,
    ):
        assert have.placements == (sw.Partial(op),)
        assert have.full_tensor().allclose(want)


def share(rows):
    return -(-rows // 4) * 6 * 8


X40 = numbers(40, 6)


@pytest.mark.parametrize(
    ("f", "most"),
    [
        (lambda x: x[3:37:2], 0),
        (lambda x: x[17] * 2, 6 * 8),
        (lambda x: x.split(7), 0),
        (lambda x: x.chunk(3), 0),
        (lambda x: torch.cat([x, x]), share(80)),
        (lambda x: torch.cat([x[:10], x[10:]]), 0),  # nothing changes its owner
        (lambda x: torch.stack([x, x]), 0),
        (lambda x: x.flip(1), 0),
        (lambda x: x.roll(2, 1), 0),
        (lambda x: x.slice_scatter(x[1:], 0, 0, 39), share(4)),
        (lambda x: x.tril(), 0),
        (lambda x: x.triu_(2), 0),
        (lambda x: x.diagonal(-3), 0),
        (lambda x: x[:, 0].diag_embed(), 0),
    ],
)
def test_only_what_changes_owner_moves(f, most):
    x = sw.distribute_tensor(X40, virtual(4), [Shard(0)])
    with sw.CommDebugMode() as comm, sw.communication("auto", fallback="error"):
        f(x)
    assert sum(comm.bytes.values()) <= most


def test_a_join_of_shards_is_in_equal_shards():
    x = sw.distribute_tensor(numbers(6, 2), virtual(2), [Shard(0)])
    y = sw.distribute_tensor(numbers(2, 2), virtual(2), [Replicate()])
    for made in (torch.cat([x, y]), torch.cat([y, x])):
        assert made.placements == (Shard(0),)
        assert made.cuts == (None, None)


@pytest.mark.parametrize("turned", range(3))
def test_pieces_in_other_memory_orders_are_joined_where_they_are(turned: int) -> None:
    """Attention with dropout gives the gradient of the keys transposed; `split` joins it so."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = [numbers(4, 6, 5, seed=seed) for seed in range(3)]
    whole[turned] = whole[turned].transpose(1, 2).contiguous().transpose(1, 2)
    given = [sw.distribute_tensor(x, mesh, {"dp": Shard(0), "tp": Shard(1)}) for x in whole]
    assert given[turned].stride() == whole[turned].stride()
    with sw.communication("error"):
        joined = torch.cat(given, 1)
    assert joined.placements == (Shard(0), Shard(1, split=3))
    assert torch.equal(joined.full_tensor(), torch.cat(whole, 1))
    assert joined.stride() == torch.cat(whole, 1).stride()
