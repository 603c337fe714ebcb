"""Operators on tensors without elements give what plain tensors give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard

from ..compare import assert_same, numbers, spread, virtual

PLACES = [Replicate(), Shard(0), Shard(1), Shard(2), Partial()]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("mesh", [(2,), (4,)], ids=str)
def test_convolution_of_no_channels(mesh: Any, batch: int, groups: int, biased: bool) -> None:
    def convolved(x: Any, weight: Any, bias: Any = None) -> Any:
        return F.conv2d(x, weight, bias, padding=1, groups=groups)

    given = [numbers(batch, 0, 5, 5), numbers(4, 0, 3, 3)] + [numbers(4)] * biased
    for place in PLACES:
        for of_weight in (Replicate(), Shard(0), Shard(2)):
            where = [(place,), (of_weight,), (Shard(0),)][: len(given)]
            assert_same(convolved, given, where, virtual(*mesh))


@pytest.mark.parametrize("dims", [1, 3])
def test_convolution_of_no_channels_in_other_dims(dims: int) -> None:
    convolved = getattr(F, f"conv{dims}d")
    given = [numbers(2, 0, *[4] * dims), numbers(3, 0, *[1] * dims)]
    for place in PLACES:
        assert_same(convolved, given, [(place,), (Shard(0),)], virtual(2))


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_views_of_a_dim_of_no_places(dim: int, mesh: Any) -> None:
    shape = [3, 4, 5]
    shape[dim] = 0
    x = torch.randn(shape)
    for place in PLACES:
        given = spread(x, virtual(*mesh), (place,) * len(mesh))
        assert given.unbind(dim) == x.unbind(dim) == ()
