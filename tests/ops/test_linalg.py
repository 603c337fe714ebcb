"""Matrices and Fourier transforms: a batch of them stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import CommDebugMode, Replicate, Shard, communication, distribute_tensor

from ..compare import check, numbers, virtual

A = numbers(5, 3, 3) + 2 * torch.eye(3, dtype=torch.float64)
B = numbers(5, 3, 2, seed=1)
linalg, fft = torch.linalg, torch.fft


def definite(a: torch.Tensor) -> torch.Tensor:
    return a @ a.mT + torch.eye(3, dtype=a.dtype)


OF_ONE: dict[str, Callable[..., Any]] = {
    "cholesky": lambda a: linalg.cholesky(definite(a)),
    "det": linalg.det,
    "slogdet": linalg.slogdet,
    "logdet": lambda a: torch.logdet(definite(a)),
    "inv": linalg.inv,
    "eigh": lambda a: linalg.eigh(definite(a))[0],
    "eigvals": lambda a: linalg.eigvals(definite(a)).real,
    "svd": lambda a: linalg.svd(a)[1],
    "svdvals": linalg.svdvals,
    "qr": linalg.qr,
    "lu": linalg.lu,
    "lu_factor": lambda a: linalg.lu_factor(a)[0],
    "ldl_factor": lambda a: linalg.ldl_factor(definite(a.detach())),
    "matrix_exp": linalg.matrix_exp,
    "matrix_power": lambda a: linalg.matrix_power(a, -3),
    "pinv": linalg.pinv,
    "matrix_rank": linalg.matrix_rank,
    "matrix_norm": lambda a: linalg.matrix_norm(a, "nuc"),
    "cond": linalg.cond,
    "householder": lambda a: linalg.householder_product(*torch.geqrf(a.detach())),
    "cholesky_inverse": lambda a: torch.cholesky_inverse(linalg.cholesky(definite(a))),
    "vander": lambda a: linalg.vander(a[..., 0]),
    "tensorinv": lambda a: linalg.tensorinv(a[0].reshape(3, 3, 1), ind=1),
}
OF_TWO: dict[str, Callable[..., Any]] = {
    "solve": linalg.solve,
    "solve_from_the_right": lambda a, b: linalg.solve(a, b.mT, left=False),
    "solve_of_vectors": lambda a, b: linalg.solve(a, b[..., 0]),
    "solve_of_one_matrix": lambda a, b: linalg.solve(a[0], b),
    "solve_of_one_side": lambda a, b: linalg.solve(a, b[0]),
    "solve_triangular": lambda a, b: linalg.solve_triangular(a, b, upper=True),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, linalg.cholesky(definite(a))),
    "lu_solve": lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b),
    "lstsq": lambda a, b: linalg.lstsq(a, b).solution,
    "cross": lambda a, b: linalg.cross(a, b.mT[:, :1]),
    "multi_dot": lambda a, b: linalg.multi_dot([a[0], a[1], b[0]]),
    "tensorsolve": lambda a, b: linalg.tensorsolve(a[0], b[0, :, 0]),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_of_one_operand(name: str) -> None:
    check(OF_ONE[name], A, mesh=virtual(2), limit=3)
    check(OF_ONE[name], A, mesh=virtual(2, 3), limit=2)


COMPLEX: dict[str, Callable[..., Any]] = {
    "pinv": lambda a, b: linalg.pinv(a),
    "pinv, hermitian": lambda a, b: linalg.pinv(a @ a.mH, hermitian=True),
    "lstsq": lambda a, b: [*linalg.lstsq(a[:, :, :2].detach(), b.detach(), driver="gels")][:2],
    "solve, adjoint": lambda a, b: linalg.solve(a.mH, b),
    "lu_solve, adjoint": lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b, adjoint=True),
    "inv, in place": lambda a, b: linalg.inv(a).conj().clone().mul_(a),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_of_complex_matrices(name: str) -> None:
    """Kernels that conjugate on their way: below a subclass PyTorch forgets to."""
    a, b = torch.complex(A, A.flip(0)), torch.complex(B, -B.flip(1))
    check(COMPLEX[name], a, b, mesh=virtual(2), limit=4, ops=())


@pytest.mark.parametrize("name", OF_TWO)
def test_of_two_operands(name: str) -> None:
    check(OF_TWO[name], A, B, mesh=virtual(2), limit=4)
    check(OF_TWO[name], A, B, mesh=virtual(2, 3), limit=2)


@pytest.mark.parametrize("name", ["det", "inv", "qr", "svdvals", "eigh", "matrix_exp", "cholesky"])
def test_a_batch_of_matrices_does_not_move(name: str) -> None:
    a = distribute_tensor(A, virtual(2), [Shard(0)])
    with communication("error", fallback="error"), CommDebugMode() as comm:
        OF_ONE[name](a)
    assert sum(comm.bytes.values()) <= 1  # whether any matrix was refused


@pytest.mark.parametrize("rows", [2, 3])
def test_a_right_side_is_no_batch_of_vectors_on_a_small_shard(rows: int) -> None:
    """Two matrices of a rank and two rows on the right: PyTorch would take them for a batch."""
    check(
        lambda a, b: linalg.solve(a, b, left=False),
        numbers(2 * rows, 3, 3),
        numbers(rows, 3),
        mesh=virtual(2),
        limit=12,
    )


@pytest.mark.parametrize("function", [linalg.inv, linalg.cholesky, linalg.solve])
def test_a_bad_matrix_is_named_by_its_place_in_the_whole_batch(function: Any) -> None:
    bad = definite(A)
    bad[4] = 0
    given = (bad, bad) if function is linalg.solve else (bad,)
    with pytest.raises(linalg.LinAlgError) as plain:
        function(*given)
    with pytest.raises(linalg.LinAlgError) as ours:
        function(*(distribute_tensor(each, virtual(3), [Shard(0)]) for each in given))
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("place", [Shard(0), Replicate()])
@pytest.mark.parametrize("size", [0, 5])
def test_out_of_the_right_shape_or_empty(place: Any, size: int) -> None:
    out = distribute_tensor(torch.empty(size, 3, 3).double(), virtual(2), [place])
    assert linalg.inv(distribute_tensor(A, virtual(2), [Shard(1)]), out=out) is out
    torch.testing.assert_close(out.full_tensor(), linalg.inv(A))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "fft": lambda x: fft.fft(x, dim=1),
    "ifft_padded": lambda x: fft.ifft(x, 7, dim=1, norm="ortho"),
    "fft2": fft.fft2,
    "fftn": fft.fftn,
    "rfft": lambda x: fft.rfft(x, dim=0),
    "rfftn": lambda x: fft.rfftn(x, norm="ortho").contiguous(),
    "irfftn": lambda x: fft.irfftn(torch.complex(x, x * 2)),
    "irfft_odd": lambda x: fft.irfft(torch.complex(x, x * 2), 5, dim=0),
    "hfft": lambda x: fft.hfft(torch.complex(x, x * 2)),
    "ihfftn": fft.ihfftn,
    "fftshift": lambda x: fft.ifftshift(fft.fftshift(x, dim=1)),
    "stft": lambda x: torch.stft(
        x.reshape(5, 12), 4, 2, window=torch.ones(4, dtype=x.dtype), return_complex=True
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_fourier_transforms(name: str) -> None:
    x = numbers(5, 3, 4)
    check(TRANSFORMS[name], x, mesh=virtual(2), limit=4)
    check(TRANSFORMS[name], x, mesh=virtual(2, 3), limit=3)
