"""Composite operators of which PyTorch's own decomposition does not work for DTensors: it reads
bits or writes memory that a DTensor does not have."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import run_composite
from ..dispatch.operator import register_composite
from ..dispatch.out_variants import out_form
from ..dispatch.views import is_conjugate, is_negative
from ..storage.wrapper import Wrapper

aten = torch.ops.aten


def vander(x: Any, N: int | None = None, increasing: bool = False) -> Any:
    """Powers of the elements; PyTorch writes them into a plain tensor."""
    count = x.shape[0] if N is None and x.ndim else N
    if not isinstance(x, Wrapper) or x.ndim != 1 or not count or count < 0:
        return aten.vander.default.decompose(x, N, increasing)
    whole = not x.dtype.is_floating_point and not x.dtype.is_complex
    base = (x.to(torch.int64) if whole else x).unsqueeze(1)
    powers = [torch.ones_like(base), base.expand(-1, count - 1).cumprod(1)]
    return torch.cat(powers if increasing else [powers[1].flip(1), powers[0]], 1)


def resolve_conj(x: Any) -> Any:
    """A copy if the tensor is a view of conjugates, else the tensor itself."""
    return x.clone() if is_conjugate(x) else run_composite(aten.resolve_conj.default, x)


def resolve_neg(x: Any) -> Any:
    """A copy if the tensor is a view of negatives, else the tensor itself."""
    return x.clone() if is_negative(x) else run_composite(aten.resolve_neg.default, x)


def real(x: Any) -> Any:
    """The real part of conjugates is that of the tensor that was conjugated."""
    return run_composite(aten.real.default, x.conj() if is_conjugate(x) else x)


def imag(x: Any) -> Any:
    """The imaginary part of conjugates is a view of negatives."""
    if is_conjugate(x):
        return aten._neg_view.default(run_composite(aten.imag.default, x.conj()))
    return run_composite(aten.imag.default, x)


def _into_out(op: Any) -> Any:
    """`op` computed without `out` and copied into it: the decomposition writes into a view of
    `out`."""
    write = out_form(op, ("out",))

    def run(*args: Any, **kwargs: Any) -> Any:
        ours = any(isinstance(value, Wrapper) for value in (*args, *kwargs.values()))
        return write(*args, **kwargs) if ours else op.decompose(*args, **kwargs)

    return run


for _op in (
    aten.kron.out,
    aten.matmul.out,
    aten.linalg_matrix_rank.atol_rtol_float_out,
    aten.linalg_matrix_rank.atol_rtol_tensor_out,
    aten.linalg_matrix_rank.out,
    aten.linalg_matrix_rank.out_tol_tensor,
):
    register_composite(_op, _into_out(_op))
register_composite(aten.vander.default, vander)
register_composite(aten.resolve_conj.default, resolve_conj)
register_composite(aten.resolve_neg.default, resolve_neg)
register_composite(aten.real.default, real)
register_composite(aten.imag.default, imag)
