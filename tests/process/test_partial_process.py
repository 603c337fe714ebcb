"""Pending values on real processes: ranks agree on what is cached."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import DTensor, Partial, Replicate, Shard, init_device_mesh
from shardwise.errors import CommunicationError

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


Change = Callable[[Any], Any]
READS: dict[str, tuple[Any, Change, Change]] = {
    "a Partial": (P, lambda x: x, lambda x: x.relu()),
    "its cached sum": (P, lambda x: x, lambda x: x * 3),
    "a view of a Partial": (P, lambda x: x.mT, lambda x: x.exp()),
    "a row of one rank": (S0, lambda x: x[1], lambda x: x),
    "conjugates": (S0, lambda x: torch.complex(x, x).conj(), lambda x: x.resolve_conj()),
}
"""The layout of a tensor, what a program holds of it, and what it reads of that."""


def some_ranks_write(name: str, writers: tuple[int, ...]) -> tuple[str, float]:
    """What a rank is told if `writers` write into local tensors of what all have read before."""
    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    place, hold, read = READS[name]
    full, more = numbers(6, 4), numbers(6, 4, seed=1)
    x, other = spread(full, mesh, (place,)), spread(more, mesh, (P,))
    held = hold(x)
    held.relu() if place is P else read(held).full_tensor()
    root = held if name == "conjugates" else x
    if rank in writers:
        root.to_local().mul_(2)
    started = time.monotonic()
    try:
        made = read(held).full_tensor()
        torch.testing.assert_close(other.relu().full_tensor(), more.relu())
    except CommunicationError as error:
        return str(error), time.monotonic() - started
    written = [part * (1 + (at in writers)) for at, part in enumerate(full.chunk(2))]
    torch.testing.assert_close(made, read(hold(torch.cat(written))))
    return "", time.monotonic() - started


@pytest.mark.parametrize("name", READS)
def test_ranks_that_all_write_into_their_local_tensors(processes: Pools, name: str) -> None:
    for text, _ in processes(2).run(some_ranks_write, name, (0, 1)):
        assert text == ""


@pytest.mark.parametrize("name", ["a Partial", "a view of a Partial", "a row of one rank"])
def test_a_rank_that_alone_writes_into_its_local_tensor(name: str) -> None:
    """The other has a cached value and need not talk: no collective may meet one of another."""
    pool = ProcessPool(2)  # of its own: ranks cannot talk after one has failed
    try:
        (own, seconds), (other, _) = pool.run(some_ranks_write, name, (0,), timeout=80)
    finally:
        pool.stop()
    assert "rank 1 did not come within 5 seconds" in own and seconds < 10
    assert "a local tensor was written into after the value" in own and "local.add_(0)" in own
    assert other, "the other rank has used an old value"


def test_a_rank_may_write_alone_what_takes_no_collective_to_read(processes: Pools) -> None:
    for text, _ in processes(2).run(some_ranks_write, "conjugates", (0,)):
        assert text == ""


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
