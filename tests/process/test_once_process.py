"""Pending sums that several calls use, on real processes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise import CommDebugMode, DTensor, Partial, Replicate, Shard, init_device_mesh

from ..compare import numbers, spread
from ..test_once import LATER, PROGRAMS, SEEN, Reductions, of_all, pending
from ..test_once_programs import MODES, Program
from ..test_partial_kinds import ADDED, NUMBERS, RISING, TIMES, WHOLES, passed_on
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
P, R, S0 = Partial(), Replicate(), Shard(0)
LOOKS = {"itself": lambda p: p, "a view": lambda p: p.mT, "an alias": lambda p: p.detach()}


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
    then the others reduce for what all need."""
    mesh = init_device_mesh("cpu", (2, 2))
    x, y = numbers(4, 6), numbers(4, 6, seed=1)
    y[0, 0] = float("inf")
    p, factor = spread(x, mesh, (P, S0)), spread(y, mesh, (R, S0))
    with CommDebugMode() as comm:
        made = [p * factor, p * factor]
    saw = torch.distributed.get_rank() in (0, 2)
    assert comm.get_total_counts() == saw
    with CommDebugMode() as comm:
        gate = p.sigmoid() * p
    assert comm.get_total_counts() == (not saw)
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


def some_ranks_know() -> None:
    """What two ranks reduced for an infinity serves whatever follows, in which the other two talk
    alone; what goes out with others, and what was written since, all reduce."""
    mesh, y = init_device_mesh("cpu", (2, 2)), numbers(4, 6, seed=1)
    y[3, 0] = float("inf")
    saw = torch.distributed.get_rank() in (1, 3)
    x, factor = numbers(4, 6), spread(y, mesh, (R, S0))
    for f in LATER.values():
        p = spread(x, mesh, (P, S0))
        product = p * factor
        with Reductions(1) as found:
            made = f(p)
        assert len(found.seen) == (not saw)
        torch.testing.assert_close(of_all(made)[0], f(x))
        torch.testing.assert_close(product.full_tensor(), x * y)
        p.add_(1)
        product = p * factor
        listed = [*torch._foreach_cos([p, p * 2]), product]
        p.mul_(2)
        listed.append(p.cos())
        wanted = [(x + 1).cos(), (2 * x + 2).cos(), (x + 1) * y, (2 * x + 2).cos()]
        for mine, theirs in zip(listed, wanted, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)


def some_ranks_know_of_a_view() -> None:
    """As `some_ranks_know`, where the infinity is in the factor of a view of the sum."""
    mesh, y, x = init_device_mesh("cpu", (2, 2)), numbers(4, 6, seed=1), numbers(4, 6)
    y[3, 0] = float("inf")
    saw = torch.distributed.get_rank() in (1, 3)
    factor = spread(y, mesh, (R, S0))
    for seen in SEEN.values():
        p = spread(x, mesh, (P, S0))
        with Reductions(1) as found:
            made = [seen(p) * seen(factor), seen(p) * seen(factor)]
        assert len(found.seen) == saw
        with Reductions(1) as found:
            made += [p.cos(), seen(p).cos(), p * 1]
        assert len(found.seen) == (not saw)
        wanted = [seen(x) * seen(y), seen(x) * seen(y), x.cos(), seen(x).cos(), x]
        for mine, theirs in zip(made, wanted, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)


def test_some_ranks_know_of_a_view(processes: Pools) -> None:
    processes(4).run(some_ranks_know_of_a_view, timeout=120)


def test_some_ranks_know(processes: Pools) -> None:
    processes(4).run(some_ranks_know, timeout=120)


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


def one_rank_looks_at_what_a_sum_became() -> None:
    """What all ranks write into next is not in the sum, on the rank that looked neither."""
    mesh, x, w = init_device_mesh("cpu", (2,)), numbers(6, 4), numbers(4, 3, seed=1)
    for place in (R, S0):
        p = spread(x, mesh, (Shard(1),)) @ spread(w, mesh, (S0,))
        q = p.redistribute(mesh, (place,))
        if torch.distributed.get_rank() == 0:
            q.to_local().sum()
        q.mul_(2)
        torch.testing.assert_close(p.cos().full_tensor(), (x @ w).cos())
        torch.testing.assert_close(q.full_tensor(), (x @ w) * 2)


def zeros_stay_zeros() -> None:
    """A write in inference mode that changes nothing on one rank is known there all the same."""
    mesh, x = init_device_mesh("cpu", (2,)), numbers(6, 4)
    with torch.inference_mode():
        mine = x * (torch.distributed.get_rank() == 0)
        p = DTensor.from_local(mine, mesh, (P,))
        view = p.mT
        for factor in (1, 2, 1, -1):
            x, mine = x * factor, mine.mul_(factor)
            made = [p.cos(), view.cos(), p.sigmoid() * p, p * 2]
            for each, want in zip(made, [x.cos(), x.mT.cos(), x.sigmoid() * x, x * 2], strict=True):
                torch.testing.assert_close(each.full_tensor(), want)


def handed_out_zeros() -> None:
    """As `zeros_stay_zeros`, of a sum that an operator made: what `to_local` gives is written."""
    mesh, x, w = init_device_mesh("cpu", (2,)), numbers(6, 4), numbers(4, 3, seed=1)
    x[:, 2:] = 0
    for seen in LOOKS.values():
        with torch.inference_mode():
            p = spread(x, mesh, (Shard(1),)) @ spread(w, mesh, (S0,))
            early, view, held = seen(p).to_local(), p.mT, None
            whole = x @ w
            for turn, factor in enumerate((1, 3, 1, -2)):
                if factor != 1:
                    (early if held is None else held).mul_(factor)
                    whole, held = whole * factor, seen(p).to_local()
                with Reductions(1) as found:
                    made = [p.cos(), view.cos(), p.sigmoid() * p, p * 2]
                assert len(found.seen) == (factor != 1 or not turn)
                wanted = [whole.cos(), whole.mT.cos(), whole.sigmoid() * whole, whole * 2]
                for each, want in zip(made, wanted, strict=True):
                    torch.testing.assert_close(each.full_tensor(), want)


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


def random_programs() -> None:
    """Ranks that would not agree on what is known would wait for each other."""
    mesh = init_device_mesh("cpu", (2, 2))
    for seed in range(40):
        with MODES["inference" if seed % 2 else ""]():
            Program(seed, mesh).run(6)


def test_random_programs(processes: Pools) -> None:
    processes(4).run(random_programs, timeout=120)


def one_rank_uses_its_memory_again() -> None:
    """What was made of given tensors stays as it is if one rank alone writes into those later."""
    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    mine = numbers(6, 4, seed=rank)
    p = DTensor.from_local(mine, mesh, (P,))
    made = [p * 2, -p.mT]
    if rank == 0:
        mine.zero_()
    whole = numbers(6, 4) + numbers(6, 4, seed=1)
    for each, want in zip(made, [whole * 2, -whole.mT], strict=True):
        torch.testing.assert_close(each.full_tensor(), want)


def zeros_of_multiples_stay_zeros() -> None:
    """As `zeros_stay_zeros`, of a multiple that is written through its local tensors."""
    mesh, x = init_device_mesh("cpu", (2,)), numbers(6, 4)
    with torch.inference_mode():
        p = spread(x, mesh, (R,)).redistribute(placements=(P,)) * 1
        double, less = p * 2, -p
        double.to_local().mul_(3)
        made = [double.full_tensor(), less.full_tensor(), p.full_tensor()]
    for each, want in zip(made, [x * 6, -x, x], strict=True):
        torch.testing.assert_close(each, want)


def test_handed_out_zeros(processes: Pools) -> None:
    processes(2).run(handed_out_zeros, timeout=60)


def test_one_rank_looks_at_what_is_seen(processes: Pools) -> None:
    processes(2).run(one_rank_looks_at_what_is_seen, timeout=60)


def test_zeros_of_multiples_stay_zeros(processes: Pools) -> None:
    processes(2).run(zeros_of_multiples_stay_zeros, timeout=60)


def test_one_rank_uses_its_memory_again(processes: Pools) -> None:
    processes(2).run(one_rank_uses_its_memory_again, timeout=60)


def test_zeros_stay_zeros(processes: Pools) -> None:
    processes(2).run(zeros_stay_zeros, timeout=60)


def test_one_rank_looks(processes: Pools) -> None:
    processes(2).run(one_rank_looks, timeout=60)


def test_one_rank_looks_at_what_a_sum_became(processes: Pools) -> None:
    processes(2).run(one_rank_looks_at_what_a_sum_became, timeout=60)


def test_one_axis(processes: Pools) -> None:
    processes(2).run(one_axis, timeout=120)


def test_two_axes(processes: Pools) -> None:
    processes(4).run(two_axes, timeout=120)


def kinds_pass() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    passed_on(NUMBERS["fill rows"], "sum", given=mesh)
    passed_on(NUMBERS["pad"], "product", given=mesh)
    passed_on(ADDED["lists in place"], "sum", given=mesh)
    passed_on(TIMES["in place"], "product", given=mesh)
    passed_on(TIMES["signs"], "product", given=mesh)
    passed_on(WHOLES["lists"], "product", torch.int64, given=mesh)
    passed_on(RISING["bounds"], "max", given=mesh)


def test_kinds_pass(processes: Pools) -> None:
    """What the virtual engine passes on, each rank by itself."""
    processes(4).run(kinds_pass, timeout=120)
