"""What `benchmarks/measure.py` counts is what hand-written collectives move, and none is missed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.measure import Cost, Watch
from benchmarks.programs import GOLDEN, compared, named
from benchmarks.running import on_processes

from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


@pytest.mark.parametrize(
    "name", ["gpt, data parallel", "vit with LayerScale, tensor parallel", "optimizer: Adafactor"]
)
def test_a_program_costs_no_more_than_the_golden_table_says(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    found = on_processes(named, name)
    assert compared(name, found, golden) == []


def collectives() -> dict[str, tuple[Cost, torch.Tensor]]:
    """What each collective cost this rank, and what it gave: 24 floats, which are 96 bytes."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    x = torch.arange(24.0) * (rank + 1)
    quarter, all_rows = torch.empty(6), torch.empty(96)
    splits = [0, 6, 6, 12]
    ragged = torch.empty(n * splits[rank])

    def pass_on() -> torch.Tensor:
        ahead, behind = (rank + 1) % n, (rank - 1) % n
        got = torch.empty(24)
        ops = [dist.P2POp(dist.isend, x, ahead), dist.P2POp(dist.irecv, got, behind)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return got

    def done(out: torch.Tensor, work: Any) -> torch.Tensor:
        if work is not None:
            work.wait()
        return out

    def listed() -> torch.Tensor:
        rows = [torch.empty(24) for _ in range(n)]
        dist.all_gather(rows, x)
        return torch.stack(rows)

    calls: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: done(c := x.clone(), dist.all_reduce(c)),
        "all_reduce later": lambda: done(c := x.clone(), dist.all_reduce(c, async_op=True)),
        "all_reduce of a pair": lambda: done(c := x.clone(), dist.all_reduce(c, group=pair)),
        "all_reduce of the group": lambda: done(c := x.clone(), pair.allreduce([c])),
        "all_gather_single": lambda: done(all_rows, dist.all_gather_single(all_rows, x)),
        "all_gather": listed,
        "reduce_scatter": lambda: done(quarter, dist.reduce_scatter_single(quarter, x)),
        "all_to_all": lambda: done(c := torch.empty(24), dist.all_to_all_single(c, x)),
        "all_to_all, ragged": lambda: done(
            ragged, dist.all_to_all_single(ragged, x, [splits[rank]] * n, splits)
        ),
        "broadcast": lambda: done(c := x.clone(), dist.broadcast(c, 2)),
        "messages": pass_on,
    }
    found = {}
    for name, call in calls.items():
        with Watch() as watch:
            value = call()
        found[name] = (watch.cost(), value)
    return found


Found = list[dict[str, tuple[Cost, torch.Tensor]]]


@pytest.fixture(scope="module")
def ranks(processes: Pools) -> Found:
    return processes(4).run(collectives)


def test_bytes_are_those_of_hand_written_collectives(ranks: Found) -> None:
    for rank, found in enumerate(ranks):
        bytes_of = {name: cost.bytes for name, (cost, _) in found.items()}
        assert bytes_of == {
            "all_reduce": 144,
            "all_reduce later": 144,
            "all_reduce of a pair": 96,
            "all_reduce of the group": 96,
            "all_gather_single": 288,
            "all_gather": 288,
            "reduce_scatter": 72,
            "all_to_all": 72,
            "all_to_all, ragged": [0, 72, 72, 144][rank],
            "broadcast": 0 if rank == 2 else 96,
            "messages": 96,
        }
        counts = {name: cost.collectives for name, (cost, _) in found.items()}
        assert counts == {**dict.fromkeys(counts, 1), "messages": 2}


def test_watched_collectives_do_what_they_do_unwatched(ranks: Found) -> None:
    x = torch.arange(24.0)
    for rank, found in enumerate(ranks):
        values = {name: value for name, (_, value) in found.items()}
        assert torch.equal(values["all_reduce"], 10 * x)
        assert torch.equal(values["all_reduce later"], 10 * x)
        assert torch.equal(values["all_reduce of a pair"], (3 if rank < 2 else 7) * x)
        assert torch.equal(values["all_gather"], torch.stack([k * x for k in range(1, 5)]))
        assert torch.equal(values["all_gather_single"], values["all_gather"].view(-1))
        mine = x.view(4, 6)[rank]
        assert torch.equal(values["reduce_scatter"], 10 * mine)
        assert torch.equal(values["all_to_all"], torch.cat([k * mine for k in range(1, 5)]))
        assert torch.equal(values["broadcast"], 3 * x)
        assert torch.equal(values["messages"], (rank or 4) * x)


def hidden() -> str:
    """A collective in a thread, which the mode of this one does not see."""
    with pytest.raises(AssertionError) as raised, Watch():
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2)))
        thread.start()
        thread.join()
    return str(raised.value)


def test_a_collective_that_is_not_seen_is_an_error(processes: Pools) -> None:
    assert processes(4).run(hidden) == ["counted 0 collectives, but 1 were run"] * 4


def peaks() -> list[int]:
    found = []
    before = torch.ones(1000)
    with Watch() as watch:
        a = before + 1  # 4000
        b = a.view(10, 100)[2:]  # the same memory
        c = before.double()  # 8000 more
        del a, c
        d = b + 1  # 4000, of which b holds on to all, and 3200
        d.untyped_storage().resize_(0)
        dist.all_reduce(before)
        before.add_(1)
    found.append(watch.peak)
    x = torch.ones(1000, requires_grad=True)
    with Watch() as watch:
        (x.exp().exp()).sum().backward()
    found.append(watch.peak)
    return found


def test_peak_is_the_memory_in_use_at_one_time(processes: Pools) -> None:
    ranks = processes(4).run(peaks)
    assert [rank[0] for rank in ranks] == [12000] * 4
    # two results, the sum, and in backward the gradients: expanded ones hold one number
    assert all(8004 < rank[1] <= 16008 for rank in ranks)
    assert len({rank[1] for rank in ranks}) == 1
