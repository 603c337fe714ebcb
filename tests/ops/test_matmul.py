"""Products of matrices give what plain tensors give, in every layout, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ..compare import MESHES, check, ints, numbers, virtual

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
