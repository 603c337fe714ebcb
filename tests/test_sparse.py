"""Sparse tensors among DTensors: what plain PyTorch gives, and the optimizers that step by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from shardwise import CommDebugMode, Partial, Replicate, Shard, plain_tensors
from shardwise.errors import PlainTensorError

from .compare import ints, numbers, spread, virtual

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # PyTorch warns of them when it meets one
R, S0, S1 = Replicate(), Shard(0), Shard(1)
SPARSE = numbers(6, 5) * (numbers(6, 5, seed=1) > 0)
X = numbers(5, 4, seed=2)
PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "coo @ x": lambda x: SPARSE.to_sparse() @ x,
    "csr @ x": lambda x: SPARSE.to_sparse_csr() @ x,
    "x @ coo": lambda x: x.t() @ SPARSE.t().to_sparse(),
    "x @ csr": lambda x: x.t() @ SPARSE.t().to_sparse_csr(),
    "mm": lambda x: torch.sparse.mm(SPARSE.to_sparse(), x),
    "addmm": lambda x: torch.sparse.addmm(
        x[:1].expand(6, 4), SPARSE.to_sparse(), x, beta=2, alpha=3
    ),
    "amax": lambda x: torch.sparse.mm(SPARSE.to_sparse_csr(), x, reduce="amax"),
    "mean": lambda x: torch.sparse.mm(SPARSE.to_sparse_csr(), x, reduce="mean"),
    "sampled": lambda x: torch.sparse.sampled_addmm(
        torch.eye(5, dtype=x.dtype).to_sparse_csr(), x, x.t()
    ).to_dense(),
    "add": lambda x: x + SPARSE[:5, :4].to_sparse(),
    "add alpha": lambda x: torch.add(x, SPARSE[:5, :4].to_sparse(), alpha=-2.5),
    "rows": lambda x: x + SPARSE[:5, :4].to_sparse(1),
    "add in place": lambda x: (x * 2).add_(SPARSE[:5, :4].to_sparse()),
    "mul": lambda x: (x * SPARSE[:5, :4].to_sparse()).to_dense(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operators(name: str) -> None:
    """A sparse result is plain; a dense one is a DTensor with the strides of one device's."""
    plain = X.clone().requires_grad_()
    wanted = PRODUCTS[name](plain)
    cotangent = numbers(*wanted.shape, seed=4)
    wanted.backward(cotangent)
    for shape, places in (
        ((2,), (R,)),
        ((2,), (S0,)),
        ((3,), (S1,)),
        ((2, 2), (S0, S1)),
        ((2,), (Partial(),)),
    ):
        mesh = virtual(*shape)
        x = spread(X, mesh, places).requires_grad_()
        made: Any = PRODUCTS[name](x)
        whole = made.full_tensor() if hasattr(made, "full_tensor") else made
        torch.testing.assert_close(whole, wanted)
        assert made.stride() == wanted.stride()
        made.backward(spread(cotangent, mesh, [R] * mesh.ndim) if whole is not made else cotangent)
        if plain.grad is not None and plain.grad.is_sparse:
            torch.testing.assert_close(x.grad.to_dense(), plain.grad.to_dense())
        else:
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
            assert x.grad.placements == tuple(R if p.is_partial() else p for p in places)


def test_columns_of_a_product_stay_where_they_are() -> None:
    x = spread(X, virtual(2), [S1])
    with CommDebugMode() as comm:
        made = SPARSE.to_sparse() @ x
    assert made.placements == (S1,)
    assert comm.get_total_counts() == 0


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SparseAdam": lambda p: optim.SparseAdam(p, lr=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.1, foreach=True),
}
TABLE, WORDS = numbers(7, 3), ints(2, 4, high=7)


def stepped(name: str, table: Any, words: Any, bags: bool) -> Any:
    weight = nn.Parameter(table)
    optimizer = OPTIMIZERS[name]([weight])
    for _ in range(3):
        optimizer.zero_grad()
        if bags:
            made = F.embedding_bag(words, weight, mode="mean", sparse=True)
        else:
            made = F.embedding(words, weight, padding_idx=3, sparse=True)
        made.pow(2).sum().backward()
        assert weight.grad is not None and weight.grad.is_sparse
        optimizer.step()
    return weight


def check_sparse_steps(name: str, mesh: Any, table: Any, words: Any) -> None:
    for bags in (False, True):
        wanted = stepped(name, TABLE.clone(), WORDS, bags)
        given = WORDS if words is None else spread(WORDS, mesh, words)
        made = stepped(name, spread(TABLE, mesh, table), given, bags)
        assert made.placements == tuple(table)
        torch.testing.assert_close(made.full_tensor(), wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_gradients(name: str) -> None:
    check_sparse_steps(name, virtual(2), [S0], [R])
    check_sparse_steps(name, virtual(4), [S0], None)
    check_sparse_steps(name, virtual(2), [S1], [S0])
    check_sparse_steps(name, virtual(2, 2), [S0, S1], [S1, S0])


def test_a_sparse_gradient_goes_through_a_redistribution() -> None:
    weight = spread(TABLE, virtual(2), [S0]).requires_grad_()
    F.embedding(WORDS, weight.redistribute(placements=[R]), sparse=True).sum().backward()
    plain = TABLE.clone().requires_grad_()
    F.embedding(WORDS, plain, sparse=True).sum().backward()
    assert plain.grad is not None
    torch.testing.assert_close(weight.grad.to_dense(), plain.grad.to_dense())


def test_plain_tensors_can_be_forbidden() -> None:
    x = spread(X, virtual(2), [S0])
    with (
        plain_tensors("error"),
        pytest.raises(PlainTensorError, match=r"plain tensor of shape \[6, 5\]"),
    ):
        SPARSE.to_sparse() @ x
