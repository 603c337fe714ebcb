"""Sample calls of operators on batches of matrices, and of Fourier transforms."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from .samples import C128, F64, Sample, aten, call, x

_BATCHES: tuple[tuple[int, ...], ...] = ((5,), (3, 2), (), (0,), (1,))


def matrix(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> torch.Tensor:
    """A matrix, or many, of which none is singular."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=dtype)


def definite(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    """Positive definite matrices."""
    a = matrix(*shape, dtype=dtype, seed=1)
    return a @ a.mH + torch.eye(shape[-1], dtype=dtype)


def _of_one() -> Iterator[Sample]:
    for batch, dtype in (*product(_BATCHES, (F64,)), ((5,), C128)):
        square, tall = matrix(*batch, 3, 3, dtype=dtype), matrix(*batch, 4, 3, dtype=dtype)
        spd = definite(*batch, 3, 3, dtype=dtype)
        for name in ("_linalg_det", "_linalg_slogdet", "linalg_inv_ex", "linalg_matrix_exp"):
            yield call(getattr(aten, name).default, square)
        for name in ("linalg_eig", "_linalg_eigvals"):
            yield call(getattr(aten, name).default, square)
        for upper in (False, True):
            yield call(aten.linalg_cholesky_ex.default, spd, upper=upper)
            if hasattr(aten, "cholesky"):  # newer versions have linalg_cholesky_ex alone
                yield call(aten.cholesky.default, spd, upper)
            factor = torch.linalg.cholesky_ex(spd, upper=upper).L
            yield call(aten.cholesky_inverse.default, factor, upper)
            yield call(aten._linalg_eigh.default, spd, "U" if upper else "L", upper)
        for a in (square, tall, tall.mT):
            yield call(aten.linalg_lu_factor_ex.default, a)
            for mode in ("reduced", "complete", "r"):
                yield call(aten.linalg_qr.default, a, mode)
            for full, vectors in ((False, True), (True, True), (False, False)):
                yield call(aten._linalg_svd.default, a, full, vectors)


def _of_factors(batch: tuple[int, ...], other: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Calls with a factored matrix; its batch and that of the other side broadcast."""
    square = matrix(*batch, 3, 3, dtype=dtype)
    spd = definite(*batch, 3, 3, dtype=dtype)
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(square)
    for left in (True, False):
        b = matrix(*other, 3, 2, dtype=dtype, seed=2)
        b = b if left else b.mT.contiguous()
        yield call(aten._linalg_solve_ex.default, square, b, left=left)
        yield call(aten.linalg_lu_solve.default, lu, pivots, b, left=left)
        yield call(aten.linalg_solve_triangular.default, square, b, upper=True, left=left)
    b = matrix(*other, 3, 2, dtype=dtype, seed=2)
    yield call(aten.linalg_lu_solve.default, lu, pivots, b, adjoint=True)
    yield call(aten.cholesky_solve.default, b, torch.linalg.cholesky_ex(spd).L)


def _of_two() -> Iterator[Sample]:
    for batch, other in (((5,), (5,)), ((5,), ()), ((), (5,)), ((1, 3), (2, 1)), ((0,), (0,))):
        yield from _of_factors(batch, other, F64)
    yield from _of_factors((3,), (3,), C128)
    for vectors in (matrix(3), matrix(5, 3)):
        yield call(aten._linalg_solve_ex.default, matrix(5, 3, 3), vectors)


def _products() -> Iterator[Sample]:
    for dim, keep in product(([0], [0, -1], None), (False, True)):
        yield call(aten.linalg__powsum.default, x(5, 3), 3, dim, keep)


def _transforms() -> Iterator[Sample]:
    for dims, norm in product(([0], [1], [0, 2], [2, 1], [0, 1, 2]), (0, 1, 2)):
        value, real = x(5, 3, 4, dtype=C128), x(5, 3, 4)
        for forward in (True, False):
            yield call(aten._fft_c2c.default, value, dims, norm, forward)
        for onesided in (True, False):
            yield call(aten._fft_r2c.default, real, dims, norm, onesided)
        last = 2 * (value.shape[dims[-1]] - 1)
        for size in (last, last + 1):
            yield call(aten._fft_c2r.default, value, dims, norm, size)


def matrix_samples() -> Iterator[Sample]:
    """All samples of this file."""
    for part in (_of_one, _of_two, _products, _transforms):
        yield from part()
