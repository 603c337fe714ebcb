"""A sample of matrix operators and transforms on real processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardwise import Shard, distribute_tensor, init_device_mesh

from ..compare import assert_same, check, eager, numbers
from ..ops import test_fourier, test_linalg
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def matrices() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in ("cholesky", "slogdet", "svdvals", "qr", "pinv"):
        check(test_linalg.OF_ONE[name], test_linalg.A, mesh=mesh, limit=2)
    for name in ("solve", "solve_of_one_matrix", "lstsq", "cross"):
        check(test_linalg.OF_TWO[name], test_linalg.A, test_linalg.B, mesh=mesh, limit=2)
    for name in ("fft2", "rfftn", "irfftn"):
        check(test_linalg.TRANSFORMS[name], numbers(5, 3, 4), mesh=mesh, limit=2)


def test_matrices_and_transforms(processes: Pools) -> None:
    processes(2).run(matrices, timeout=60)


def singular() -> None:
    a = test_linalg.A.clone()
    a[4] = 0
    with pytest.raises(torch.linalg.LinAlgError, match=r"Batch element 4"):
        torch.linalg.inv(distribute_tensor(a, init_device_mesh("cpu", (2,)), [Shard(0)]))


def test_every_rank_hears_of_a_singular_matrix(processes: Pools) -> None:
    processes(2).run(singular, timeout=60)


def long_transforms() -> None:
    mesh = eager(4)
    for name in ("fft", "rfft", "irfft, odd", "fft of real"):
        call, x = test_fourier.CALLS[name]
        assert_same(call, [x], [(Shard(0),)], mesh)


def test_long_transforms(processes: Pools) -> None:
    processes(4).run(long_transforms, timeout=60)
