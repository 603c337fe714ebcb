"""A pending sum times an infinity on real processes: those that meet it reduce among themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise import CommDebugMode, Partial, Replicate, Shard, init_device_mesh

from ..compare import assert_same, numbers, spread
from ..test_infinite import NO_GRADIENT, ONE_AXIS, PRODUCTS, TWO_AXES, salted
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def one_axis() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, product in PRODUCTS.items():
        for where in ONE_AXIS:
            assert_same(
                product, [numbers(4, 6), salted(4, 6)], where, mesh, grad=name not in NO_GRADIENT
            )


def two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for name in ("mul", "mul_", "mm", "addmm", "foreach_"):
        product = PRODUCTS[name]
        for where in TWO_AXES:
            assert_same(
                product, [numbers(4, 6), salted(4, 6)], where, mesh, grad=name not in NO_GRADIENT
            )
    check_one_row(mesh)


def check_one_row(mesh: object) -> None:
    """An infinity in the shard of two ranks: the other two know nothing of it."""
    x, y = numbers(4, 6), numbers(4, 6, seed=1)
    y[0, 0] = float("inf")
    given = spread(x, mesh, (Partial(), Shard(0)))  # type: ignore[arg-type]
    with CommDebugMode() as comm:
        made = given * spread(y, mesh, (Replicate(), Shard(0)))  # type: ignore[arg-type]
    assert comm.get_total_counts() == (torch.distributed.get_rank() in (0, 2))
    torch.testing.assert_close(made.full_tensor(), x * y)


def test_one_axis(processes: Pools) -> None:
    processes(2).run(one_axis, timeout=120)


def test_two_axes(processes: Pools) -> None:
    processes(4).run(two_axes, timeout=120)
