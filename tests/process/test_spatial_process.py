"""Operators on images on real processes: edges of shards move, and a small network learns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise import Replicate, Shard, init_device_mesh

from ..compare import assert_same, check
from ..ops import test_convolution
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]

NAMES = [
    "avg 2d",
    "max 2d",
    "adaptive max 1d",
    "reflect 2d",
    "constant",
    "circular",
    "unfold",
    "tensor.unfold",
    "grid_sample",
    "bilinear 2d",
]


def images() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for name in NAMES:
        f, *inputs = test_convolution.OTHERS[name]
        check(f, *inputs, mesh=mesh, limit=3)
    for run in test_convolution.RESAMPLED.values():
        assert_same(run, [test_convolution.TALL], [(Shard(2),)], mesh)


def convolutions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for name in ("2d", "2d, stride", "2d, groups", "transposed 2d", "2d, large kernel"):
        f, *inputs = test_convolution.CONVOLUTIONS[name]
        check(f, *inputs, mesh=mesh, limit=3)
        whole = (Replicate(), Replicate())
        where = [(Shard(2), Shard(2)), *[whole] * (len(inputs) - 1)]
        assert_same(f, inputs, where, mesh)


@pytest.mark.parametrize("run", [images, convolutions], ids=lambda run: run.__name__)
def test_images(processes: Pools, run: Callable[[], None]) -> None:
    processes(4).run(run, timeout=120)


def learning() -> None:
    for layout in test_convolution.NETWORKS:
        test_convolution.learns(init_device_mesh("cpu", (2,)), layout)


def test_a_network_learns(processes: Pools) -> None:
    processes(2).run(learning, timeout=120)
