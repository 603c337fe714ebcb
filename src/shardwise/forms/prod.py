"""The gradient of prod as PyTorch computes it for plain tensors: for subclasses it multiplies
running products, which is NaN where one of them overflows."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from ..dispatch.operator import register_differentiable
from ..storage.wrapper import Wrapper

aten = torch.ops.aten


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
    if (x.detach() == 0).any().item():
        return _for_subclasses(grad, x, dim, keepdim)
    if dim is not None and not keepdim:
        grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
    return grad * (result / x).conj()


def _for_subclasses(grad: Any, x: Any, dim: int | None, keepdim: bool) -> Any:
    """The gradient by PyTorch's formula for subclasses, which does not divide by zero."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        x = x if again else x.detach().requires_grad_()
        made = _prod_of(x, dim, keepdim)
    return torch.autograd.grad(made, x, grad, create_graph=again)[0]


def _needs_gradient(x: Any) -> bool:
    """True if reverse mode will ask for the gradient of `x`."""
    needed = isinstance(x, Wrapper) and torch.is_grad_enabled() and x.requires_grad
    return needed and unpack_dual(x).tangent is None


def prod(x: Any, *, dtype: torch.dtype | None = None) -> Any:
    """The product of all elements."""
    if not _needs_gradient(x):
        return _prod(x, dtype=dtype)
    return Prod.apply(x if dtype is None else x.to(dtype), None, False)


def prod_dim(x: Any, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The product along a dim."""
    if not _needs_gradient(x):
        return _prod_dim(x, dim, keepdim, dtype=dtype)
    return Prod.apply(x if dtype is None else x.to(dtype), dim, keepdim)


_prod = register_differentiable(aten.prod.default, prod)
_prod_dim = register_differentiable(aten.prod.dim_int, prod_dim)
