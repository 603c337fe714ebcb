"""Resampled and padded planes are those of PyTorch's kernels, place by place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard

from ..compare import assert_same, numbers, spread, virtual

SIZES = [
    ((1, 2, 8, 54), (110, 57)),
    ((2, 8, 54, 8), (57, 110)),
    ((3, 4, 30, 49), (41, 100)),
    ((2, 2, 64, 8), (128, 110)),
]


def last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_nearest_places_are_those_of_the_kernel(sizes: Any, mode: str, dim: int) -> None:
    shape, out = sizes
    for dtype in (torch.float64, torch.float32, torch.uint8):
        for format_of in (torch.Tensor.contiguous, last):
            x = format_of((numbers(*shape) * 40 + 128).clamp(0, 255).to(dtype))
            made = F.interpolate(spread(x, virtual(4), (Shard(dim),)), out, mode=mode)
            assert torch.equal(made.full_tensor(), F.interpolate(x, out, mode=mode)), dtype


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_nearest_places_by_a_factor(mode: str) -> None:
    x = numbers(1, 2, 54, 48)
    for factor in ((4 / 3, 2.0), (0.61, 0.75), (2.0, 1.9)):
        want = F.interpolate(x, scale_factor=factor, mode=mode)
        for dim in (2, 3):
            given = spread(x, virtual(3), (Shard(dim),))
            made = F.interpolate(given, scale_factor=factor, mode=mode)
            assert torch.equal(made.full_tensor(), want), (factor, dim)


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Shard(2), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
def test_no_images(mode: str, place: Any) -> None:
    def resized(x: Any) -> Any:
        return F.interpolate(x, (4, 6), mode=mode)

    assert_same(resized, [numbers(0, 3, 8, 8)], [(place,)], virtual(2))


@pytest.mark.parametrize("cuts", [None, (0, 7, 1, 4)], ids=str)
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_of_every_dim(mode: str, cuts: Any) -> None:
    x = numbers(2, 3, 12)
    for place in (Shard(2), Shard(1), Shard(0), Partial()):
        own = [(None, None, cuts)] if place == Shard(2) and cuts is not None else None
        mesh = virtual(4)
        assert_same(lambda v: F.pad(v, (5, 11), mode=mode), [x], [(place,)], mesh, cuts=own)
