"""Gradients of products are those of plain tensors, at zeros too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from shardwise import Partial, Replicate, Shard

from ..compare import numbers, spread, virtual
from ..tier import some

R, S0, S1 = Replicate(), Shard(0), Shard(1)
PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "all": lambda x: x.prod(),
    "dim 0": lambda x: x.prod(0),
    "last dim": lambda x: torch.prod(x, -1, keepdim=True),
    "dtype": lambda x: x.prod(1, dtype=torch.float32),
    "running 0": lambda x: x.cumprod(0),
    "running 1": lambda x: torch.cumprod(x, -1),
    "running in place": lambda x: (x * 1).cumprod_(0),
}


def salted(*places: tuple[int, int, float]) -> torch.Tensor:
    x = numbers(5, 4)
    for row, column, value in places:
        x[row, column] = value
    return x


VALUES = {
    "plain": salted(),
    "one zero": salted((3, 0, 0)),
    "zeros": salted((1, 1, 0), (3, 1, 0), (4, 3, 0)),
    "empty": numbers(0, 4),
    "one row": numbers(1, 4),
}


def derivatives(product: Callable[[Any], Any], x: Any, near: Any, far: Any) -> list[Any]:
    """The value, the gradient, the same as part of a graph, and the gradient of that."""
    result = product(x)
    (alone,) = torch.autograd.grad(result, x, near, retain_graph=True)
    (first,) = torch.autograd.grad(result, x, near, create_graph=True)
    # Autograd may know that it is zero.
    second = torch.autograd.grad(first, x, far)[0] if first.requires_grad else torch.zeros_like(x)
    return [result, alone, first, second]


def check_products(mesh: Any, layouts: list[Any], names: Any = PRODUCTS) -> None:
    for name in names:
        for value in some(list(VALUES.values()), 0.5, (name, mesh.shape)):
            plain = value.clone().requires_grad_()
            near, far = (torch.randn_like(t) for t in (PRODUCTS[name](plain), plain))
            theirs = derivatives(PRODUCTS[name], plain, near, far)
            for places in layouts:
                x = spread(value, mesh, places).requires_grad_()
                whole = [spread(t, mesh, [R] * mesh.ndim) for t in (near, far)]
                ours = derivatives(PRODUCTS[name], x, *whole)
                for a, b in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(
                        a.full_tensor(), b, rtol=1e-5, atol=1e-5, equal_nan=True
                    )
                    assert a.stride() == b.stride() or not b.numel()


QUICK = ("all", "dim 0", "running 0")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.thorough) for n in PRODUCTS]
)
def test_gradients_of_products(name: str) -> None:
    torch.manual_seed(0)
    check_products(virtual(2), [(S0,), (S1,), (Partial(),)], [name])
    check_products(virtual(2, 2), [(S0, S0)], [name])


def test_other_subclasses_are_served_as_before() -> None:
    """The kernels that DTensors get are at a key that other subclasses and modes have too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(3, requires_grad=True)
        (x.prod() + x.prod(0) + x.cumprod(0)).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (3,)
    y = numbers(3, 2).requires_grad_()
    traced = torch.compile(PRODUCTS["all"], backend="aot_eager")(y)
    torch.testing.assert_close(traced, y.prod())
    rows = torch.func.vmap(torch.func.grad(lambda row: row.prod()))(y.detach())
    torch.testing.assert_close(rows, y.detach().flip(1))


def test_forward_mode() -> None:
    mesh, direction = virtual(2), numbers(5, 4, seed=1)
    plain = numbers(5, 4).requires_grad_()
    x = spread(numbers(5, 4), mesh, [S0]).requires_grad_()
    for name in ("all", "dim 0", "running 0"):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(plain, direction)
            wanted = forward_ad.unpack_dual(PRODUCTS[name](dual)).tangent
            dual = forward_ad.make_dual(x, spread(direction, mesh, [S0]))
            made: Any = forward_ad.unpack_dual(PRODUCTS[name](dual)).tangent
        torch.testing.assert_close(made.full_tensor(), wanted)
