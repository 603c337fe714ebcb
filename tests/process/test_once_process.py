"""Pending sums that several calls use, on real processes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise import CommDebugMode, Partial, Replicate, Shard, init_device_mesh

from ..compare import numbers, spread
from ..test_once import PROGRAMS, Reductions, of_all, pending
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
P, R, S0 = Partial(), Replicate(), Shard(0)


def one_axis() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, program in PROGRAMS.items():
        p, want = pending(mesh, (P,)), program(pending(mesh, (P,)).full_tensor())
        with Reductions(p.numel()) as found:
            got = of_all(program(p))
        for mine, theirs in zip(got, of_all(want), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert len(found.seen) == 1, name


def two_axes() -> None:
    """An infinity in the shard of two ranks: they reduce once for two products, the others never;
    then all reduce for what all need."""
    mesh = init_device_mesh("cpu", (2, 2))
    x, y = numbers(4, 6), numbers(4, 6, seed=1)
    y[0, 0] = float("inf")
    p, factor = spread(x, mesh, (P, S0)), spread(y, mesh, (R, S0))
    with CommDebugMode() as comm:
        made = [p * factor, p * factor]
    assert comm.get_total_counts() == (torch.distributed.get_rank() in (0, 2))
    with CommDebugMode() as comm:
        gate = p.sigmoid() * p
    assert comm.get_comm_counts() == {"all_reduce": 1}
    for each in made:
        torch.testing.assert_close(each.full_tensor(), x * y)
    torch.testing.assert_close(gate.full_tensor(), x.sigmoid() * x)
    everywhere = spread(y, mesh, (R, R))
    q = spread(x, mesh, (P, R))
    with CommDebugMode() as comm:
        made = [q * everywhere, q * everywhere, q.sigmoid() * y]
    assert comm.get_comm_counts() == {"all_reduce": 1}
    for each, want in zip(made, (x * y, x * y, x.sigmoid() * y), strict=True):
        torch.testing.assert_close(each.full_tensor(), want)


def one_rank_looks() -> None:
    """What all ranks have reduced stays good on the one that looks at its local tensor."""
    mesh, x, w = init_device_mesh("cpu", (2,)), numbers(6, 4), numbers(4, 3, seed=1)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            p = spread(x, mesh, (Shard(1),)) @ spread(w, mesh, (S0,))
            p.cos()
            if torch.distributed.get_rank() == 0:
                p.to_local().sum()
            with CommDebugMode() as comm:
                made = [p * p, p.mT.exp()]
            assert comm.get_total_counts() == 0
            torch.testing.assert_close(made[0].full_tensor(), (x @ w) ** 2)
            torch.testing.assert_close(made[1].full_tensor(), (x @ w).mT.exp())


def test_one_rank_looks(processes: Pools) -> None:
    processes(2).run(one_rank_looks, timeout=60)


def test_one_axis(processes: Pools) -> None:
    processes(2).run(one_axis, timeout=120)


def test_two_axes(processes: Pools) -> None:
    processes(4).run(two_axes, timeout=120)
