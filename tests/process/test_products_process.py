"""Gradients of products on real processes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise import Shard, init_device_mesh

from ..ops.test_prod import check_products
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def sample() -> None:
    torch.manual_seed(0)
    check_products(init_device_mesh("cpu", (2,)), [(Shard(0),)], ["all", "dim 0", "running 0"])


def test_products(processes: Pools) -> None:
    processes(2).run(sample, timeout=120)
