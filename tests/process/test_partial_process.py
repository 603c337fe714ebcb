"""Pending values on real processes: ranks agree on what is cached."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise import DTensor, Partial, Replicate, Shard, init_device_mesh

from ..compare import numbers, spread
from ..core.test_partial_kinds import ADDED, NUMBERS, assert_right
from ..core.test_partial_programs import MODES, Program
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
P, R, S0 = Partial(), Replicate(), Shard(0)


def random_programs() -> None:
    """Ranks that would not agree on what is cached would wait for each other."""
    mesh = init_device_mesh("cpu", (2, 2))
    for seed in range(40):
        with MODES["inference" if seed % 2 else ""]():
            Program(seed, mesh).run(6)


def test_random_programs(processes: Pools) -> None:
    processes(4).run(random_programs, timeout=120)


def one_rank_uses_its_memory_again() -> None:
    """A multiple of given tensors stays as it is if one rank alone writes into those later."""
    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    mine = numbers(6, 4, seed=rank)
    p = DTensor.from_local(mine, mesh, (P,))
    made = [p * 2, -p.mT]
    if rank == 0:
        mine.zero_()
    whole = numbers(6, 4) + numbers(6, 4, seed=1)
    for each, want in zip(made, [whole * 2, -whole.mT], strict=True):
        torch.testing.assert_close(each.full_tensor(), want)


def one_rank_looks() -> None:
    """A rank that looks at its local tensor alone still agrees with the others."""
    mesh, x, w = init_device_mesh("cpu", (2,)), numbers(6, 4), numbers(4, 3, seed=1)
    for mode in MODES.values():
        for seen in (lambda p: p, lambda p: p.mT, lambda p: p.detach()):
            with mode():
                p = spread(x, mesh, (Shard(1),)) @ spread(w, mesh, (S0,))
                p.cos()
                if torch.distributed.get_rank() == 0:
                    seen(p).to_local().sum()
                torch.testing.assert_close((p * p).full_tensor(), (x @ w) ** 2)
                torch.testing.assert_close(p.mT.exp().full_tensor(), (x @ w).mT.exp())


def one_rank_looks_at_what_is_seen() -> None:
    """A view that moves elements is not made again on the rank alone that looks at its base."""
    mesh, x = init_device_mesh("cpu", (2,)), numbers(6, 4)
    with torch.inference_mode():
        base = spread(x, mesh, (S0,)) * 1
        row = base[4]
        row.cos()
        if torch.distributed.get_rank() == 0:
            base.to_local().sum()
        torch.testing.assert_close(row.cos().full_tensor(), x[4].cos())
        base.to_local().mul_(2)
        torch.testing.assert_close(row.cos().full_tensor(), (x[4] * 2).cos())


def kinds() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    assert_right(NUMBERS["fill rows"], "sum", given=mesh)
    assert_right(NUMBERS["pad"], "product", given=mesh)
    assert_right(ADDED["lists in place"], "sum", given=mesh)
    assert_right(NUMBERS["fill"], "max", given=mesh)


def test_one_rank_uses_its_memory_again(processes: Pools) -> None:
    processes(2).run(one_rank_uses_its_memory_again, timeout=60)


def test_one_rank_looks(processes: Pools) -> None:
    processes(2).run(one_rank_looks, timeout=60)


def test_one_rank_looks_at_what_is_seen(processes: Pools) -> None:
    processes(2).run(one_rank_looks_at_what_is_seen, timeout=60)


def test_kinds(processes: Pools) -> None:
    processes(4).run(kinds, timeout=120)
