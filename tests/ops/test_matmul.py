"""Products of matrices give what plain tensors give, in every layout, forward and backward."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Partial, Replicate, Shard

from ..compare import MESHES, assert_same, check, ints, numbers, spread, virtual

X, W, B = numbers(7, 5), numbers(5, 4, seed=1), numbers(3, 4, 5, seed=2)

CASES = {
    "mm": (torch.mm, X, W),
    "mm of a transposed": (lambda x, w: x.t() @ w, numbers(5, 7), W),
    "mm with itself": (lambda x: x @ x.t(), X),
    "linear": (F.linear, X, numbers(4, 5), numbers(4)),
    "linear without bias": (F.linear, B, numbers(4, 5)),
    "bmm": (torch.bmm, B, numbers(3, 5, 2)),
    "matmul 3-d by 2-d": (torch.matmul, B, W),
    "matmul with broadcast": (torch.matmul, numbers(2, 1, 4, 5), numbers(3, 5, 2)),
    "einsum": (lambda a, b: torch.einsum("bij,jk->bik", a, b), B, W),
    "einsum over two": (lambda a, b: torch.einsum("bij,bij->i", a, b), B, B.flip(0)),
    "einsum outer": (lambda a, b: torch.einsum("i,jk->kij", a, b), X[0], W),
    "mv": (torch.mv, X, numbers(5)),
    "dot": (torch.dot, numbers(5), numbers(5, seed=3)),
    "outer": (torch.outer, numbers(5), numbers(7)),
    "addmm": (torch.addmm, numbers(1, 4), X, W),
    "addmm with numbers": (lambda b, x, w: torch.addmm(b, x, w, beta=2, alpha=3), W[0], X, W),
    "baddbmm": (torch.baddbmm, numbers(3, 4, 2), B, numbers(3, 5, 2)),
    "chain": (lambda a, b: a @ b @ b.t(), X, W),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([2], [0])), B, W),
    "complex": (torch.mm, torch.complex(X, X + 1), torch.complex(W, W - 1)),
    "inner size 0": (torch.mm, numbers(3, 0), numbers(0, 4)),
    "no rows": (torch.mm, numbers(0, 5), W),
    "inner size 1": (torch.mm, numbers(3, 1), numbers(1, 4)),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_products(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = CASES[name]
    check(f, *inputs, mesh=virtual(*shape), limit=10)


def test_integers_and_bfloat16() -> None:
    x, w = ints(7, 5, low=-3), ints(5, 4, low=-3, seed=1)
    check(torch.mm, x, w, mesh=virtual(2))
    check(torch.mm, x.bfloat16(), w.bfloat16(), mesh=virtual(2), tolerance=1e-1)


def test_attention() -> None:
    q, k, v = (numbers(2, 2, 4, 3, seed=seed) for seed in range(3))
    check(F.scaled_dot_product_attention, q, k, v, mesh=virtual(2), limit=12)


PLACES = [Replicate(), Partial(), Shard(0), Shard(1), Shard(2)]


ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("wide", [8, 12])
def test_products_of_groups_in_single_precision(wide: int, mesh: Any) -> None:
    """By default models with experts multiply like this; PyTorch's meta kernel takes bfloat16."""
    x, weight = numbers(7, 8, dtype=torch.float32), numbers(3, 8, wide, dtype=torch.float32)
    for of_x, of_weight in product(PLACES[:4], PLACES):
        where = [(of_x,) * len(mesh), (of_weight,) * len(mesh)]
        assert_same(
            lambda x, weight: F.grouped_mm(x, weight, offs=ENDS),
            *([x, weight], where, virtual(*mesh)),
            tolerance=1e-4,
        )


def test_products_of_groups_stay_where_experts_are_sharded() -> None:
    """Columns, or rows, of all experts on each rank, or some experts: nothing moves."""
    x, weight = numbers(7, 8, dtype=torch.float32), numbers(3, 8, 8, dtype=torch.float32)
    for places in ((Replicate(), Shard(2)), (Shard(1), Shard(1)), (Replicate(), Shard(0))):
        with sw.communication("error", fallback="error"):
            given = [spread(v, virtual(2), (p,)) for v, p in zip((x, weight), places, strict=True)]
            made = F.grouped_mm(*given, offs=ENDS)
        torch.testing.assert_close(made.full_tensor(), F.grouped_mm(x, weight, offs=ENDS))


def test_rows_that_are_cut_where_experts_are_stay() -> None:
    """Rows of the experts of a rank, forward and backward: nothing moves, and gradients of experts
    stay with them. Rows may be cut elsewhere if all experts are on every rank."""
    mesh = virtual(3)
    x, weight = numbers(7, 8, dtype=torch.float32), numbers(3, 8, 8, dtype=torch.float32)
    grad = numbers(7, 8, seed=1, dtype=torch.float32)
    wanted = [v.clone().requires_grad_() for v in (x, weight)]
    F.grouped_mm(*wanted, offs=ENDS).backward(grad)
    for cuts, place in (([2, 0, 5], Shard(0)), ([3, 3, 1], Replicate())):
        rows = [spread(v, mesh, [Shard(0)], [cuts, None]) for v in (x, grad)]
        given = [rows[0].requires_grad_(), spread(weight, mesh, [place]).requires_grad_()]
        with sw.communication("error", fallback="error"):
            made = F.grouped_mm(*given, offs=ENDS)
            assert made._spec.dim_cuts[0] == tuple(cuts)
            grads = torch.autograd.grad(made, given, rows[1])
        assert grads[1].placements == (place,)
        for have, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(have.full_tensor(), want.grad)


@pytest.mark.parametrize("wrong", [(3, 12, 8), (4, 8, 8)], ids=str)
@pytest.mark.parametrize("place", [Shard(0), Shard(1), Partial()], ids=str)
def test_products_of_groups_that_do_not_fit(place: Any, wrong: tuple[int, ...]) -> None:
    x, weight = numbers(7, 8, dtype=torch.float32), numbers(*wrong, dtype=torch.float32)
    for given in ((x, weight), [spread(v, virtual(2), (place,)) for v in (x, weight)]):
        with pytest.raises(RuntimeError):
            F.grouped_mm(*given, offs=ENDS)
