"""Fourier transforms of sharded dims are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import Partial, Shard

from ..compare import assert_same, eager, numbers

fft = torch.fft
REAL = numbers(1440)
COMPLEX = torch.complex(numbers(1440), numbers(1440, seed=1))
HALF = COMPLEX[:721]
CALLS: dict[str, tuple[Any, torch.Tensor]] = {
    "fft": (fft.fft, COMPLEX),
    "ifft": (lambda x: fft.ifft(x, norm="ortho"), COMPLEX),
    "fft of real": (lambda x: fft.fft(x, norm="forward"), REAL),
    "rfft": (fft.rfft, REAL),
    "irfft": (fft.irfft, HALF),
    "irfft, odd": (lambda x: fft.irfft(x, 1225, norm="ortho"), HALF),
    "rfft, odd and padded": (lambda x: fft.rfft(x, 1485), REAL),
    "hfft": (lambda x: fft.hfft(x, norm="ortho"), HALF),
    "ihfft": (fft.ihfft, REAL),
    "a prime": (lambda x: fft.fft(x[:1439]), COMPLEX),
}


@pytest.mark.parametrize("name", CALLS)
def test_vectors(name: str) -> None:
    call, x = CALLS[name]
    size = x.numel()
    assert_same(call, [x], [(Shard(0),)], eager(4))
    assert_same(call, [x], [(Shard(0),)], eager(7))
    assert_same(call, [x], [(Shard(0), Partial(), Shard(0))], eager(2, 2, 3))
    assert_same(
        call, [x], [(Shard(0),)], eager(6), cuts=[[(0, 7, size - 17, 0, 10, 0)]], tolerance=1e-9
    )


def test_pending_maxima_come_first() -> None:
    assert_same(fft.rfft, [REAL], [(Shard(0), Partial("max"))], eager(4, 2))
    assert_same(fft.fft, [COMPLEX], [(Partial("avg"), Shard(0))], eager(2, 4))


@pytest.mark.parametrize("name", ["fft", "rfft", "irfft", "fft of real"])
def test_a_second_derivative(name: str) -> None:
    call, x = CALLS[name]

    def twice(x: Any) -> Any:
        (first,) = torch.autograd.grad(call(x).abs().pow(3).sum(), x, create_graph=True)
        return first

    assert_same(twice, [x], [(Shard(0),)], eager(8), stride=False)


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_dims_among_others_that_are_few(dim: int) -> None:
    shape = [2, 3, 1]
    shape[dim] = 640
    x, mesh = numbers(*shape), eager(8)
    for call in (fft.rfft, fft.fft, lambda x, dim: fft.irfft(fft.rfft(x, dim=dim), 639, dim=dim)):
        assert_same(lambda x, call=call: call(x, dim=dim), [x], [(Shard(dim % 3),)], mesh)
    assert_same(lambda x: fft.rfftn(x), [x], [(Shard(dim % 3),)], mesh)


def test_strides_of_dims_of_one_element() -> None:
    for shape in ((5, 3, 1), (5, 1, 3), (5, 1, 3, 1), (2, 5, 1, 3)):
        for dim in range(len(shape)):
            assert_same(
                lambda x, d=dim: fft.rfft(x, dim=d), [numbers(*shape)], [(Shard(0),)], eager(2)
            )
