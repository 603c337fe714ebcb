"""Gradients of products as PyTorch computes them for plain tensors.

For subclasses PyTorch has formulas that never look at values. Where a factor is NaN or infinite
they give other numbers, and they take more steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dispatch.operator import register_differentiable
from ..storage.ragged import reduce_partial
from .scanning import FromHereOn, needs_gradient

__all__ = ["Cumprod", "Prod", "cumprod", "cumprod_", "prod", "prod_dim"]

aten = torch.ops.aten


def _for_subclasses(product: Callable[[Any], Any], x: Any, grad: Any) -> Any:
    """The gradient by PyTorch's formula for subclasses, differentiable if that is asked for."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        x = x if again else x.detach().requires_grad_()
        made = product(x)
    return torch.autograd.grad(made, x, grad, create_graph=again)[0]


class Prod(torch.autograd.Function):
    """The product of all elements, or of those along a dim."""

    @staticmethod
    def forward(ctx: Any, x: Any, dim: int | None, keepdim: bool) -> Any:
        result = _prod_of(x, dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, result = ctx.saved_tensors
        return _prod_backward(grad, x, result, ctx.dim, ctx.keepdim), None, None


def _prod_of(x: Any, dim: int | None, keepdim: bool) -> Any:
    return _prod(x) if dim is None else _prod_dim(x, dim, keepdim)


def _prod_backward(grad: Any, x: Any, result: Any, dim: int | None, keepdim: bool) -> Any:
    if x.ndim == 0:
        return grad
    zeros = (x.detach() == 0).sum().item()
    if dim is None and zeros > 1 and not torch.is_grad_enabled():
        return torch.zeros_like(x)
    if zeros:
        return _for_subclasses(lambda x: _prod_of(x, dim, keepdim), x, grad)
    if dim is not None and not keepdim:
        grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
    return grad * (result / x).conj()


class Cumprod(torch.autograd.Function):
    """Running products along a dim."""

    @staticmethod
    def forward(ctx: Any, x: Any, dim: int) -> Any:
        result = _cumprod(x, dim)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, result = ctx.saved_tensors
        return _cumprod_backward(grad, x, result, ctx.dim), None


def _cumprod_backward(grad: Any, x: Any, result: Any, dim: int) -> Any:
    if x.numel() <= 1 or x.shape[dim] == 1:
        return grad
    weights = result.conj() * grad
    is_zero = x.detach() == 0
    if not is_zero.any().item():
        return FromHereOn.apply(weights, dim) / x.conj()
    if torch.is_grad_enabled():
        return _for_subclasses(lambda x: _cumprod(x, dim), x, grad)
    seen = is_zero.cumsum(dim)
    before, after = seen == 0, (seen == 1) & ~is_zero
    # The factor before the first zero stands in every product up to it; that zero itself, in those
    # up to the next one; what comes later has no influence.
    early = FromHereOn.apply(weights.masked_fill(~before, 0), dim) / x.conj()
    tail = x.conj().masked_fill(~after, 1).cumprod(dim) * grad.masked_fill(seen != 1, 0)
    head = x.conj().masked_fill(~before, 1).prod(dim, True)
    # Reduced before it meets the head: a pending part that is 0 has no product with infinity.
    at_zero = reduce_partial(aten.cumprod.default, tail.sum(dim, True)) * head
    first = is_zero & (seen == 1)
    return early.masked_fill(~before, 0) + torch.where(first, at_zero, 0)


def _in(dtype: torch.dtype | None, x: Any) -> Any:
    return x if dtype is None else x.to(dtype)


def prod(x: Any, *, dtype: torch.dtype | None = None) -> Any:
    """The product of all elements."""
    return Prod.apply(_in(dtype, x), None, False) if needs_gradient(x) else _prod(x, dtype=dtype)


def prod_dim(x: Any, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The product along a dim."""
    if needs_gradient(x):
        return Prod.apply(_in(dtype, x), dim, keepdim)
    return _prod_dim(x, dim, keepdim, dtype=dtype)


def cumprod(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Running products."""
    return Cumprod.apply(_in(dtype, x), dim) if needs_gradient(x) else _cumprod(x, dim, dtype=dtype)


def cumprod_(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Running products in place."""
    if needs_gradient(x):
        return aten.copy_.default(x, cumprod(x.clone(), dim, dtype=dtype))
    return _cumprod_(x, dim, dtype=dtype)


_prod = register_differentiable(aten.prod.default, prod)
_prod_dim = register_differentiable(aten.prod.dim_int, prod_dim)
_cumprod = register_differentiable(aten.cumprod.default, cumprod)
_cumprod_ = register_differentiable(aten.cumprod_.default, cumprod_)
