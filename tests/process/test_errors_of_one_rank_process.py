"""Errors in values that one rank has alone: the other ranks hear of them, and none waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shardwise import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.comm.failures import _State
from shardwise.errors import CommunicationError, OutOfRangeError

from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def _calls(index: Any, mesh: Any) -> dict[str, Callable[[], Any]]:
    """Calls that move nothing, with an index in shards, most of them into what is whole."""
    x = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Replicate(), Replicate()])
    rows = index.unsqueeze(1).expand(8, 8)
    mine = x.redistribute(placements=[Replicate(), Shard(0)])
    other = x.redistribute(placements=[Shard(0), Replicate()])
    return {
        "x[i]": lambda: x[index],
        "gather": lambda: x.gather(1, rows),
        "index_select": lambda: x.index_select(1, index),
        "take": lambda: x.take(index),
        "embedding": lambda: F.embedding(index, x),
        "scatter": lambda: mine.scatter(1, rows, 1.0),
        "scatter_add": lambda: mine.scatter_add(1, rows, mine),
        "nll_loss": lambda: F.nll_loss(mine, index, reduction="none"),
        "cross_entropy": lambda: F.cross_entropy(mine, index, reduction="none"),
        "embedding in shards": lambda: F.embedding(index, other),
        "one_hot": lambda: F.one_hot(index, 8),  # the last: where it does not fail it moves
    }


def fail_alone() -> tuple[list[str], int, str]:
    """Which calls failed, how many of them were told, and what the next communication said."""
    mesh = init_device_mesh("cpu", (2, 2))
    places = torch.arange(8)
    places[5] = 99
    index = distribute_tensor(places, mesh, [Replicate(), Shard(0)])
    calls = _calls(index, mesh)
    failed = []
    started = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        for name, call in calls.items():
            try:
                call()
            except (IndexError, RuntimeError) as error:
                if isinstance(error, CommunicationError):
                    raise
                failed.append(name)
        index.redistribute(placements=[Replicate(), Replicate()])
    assert time.monotonic() - started < 45, "it heard of it only when the backend's time was over"
    told = _State.own.counts.get("0,1,2,3", 0)
    assert failed in ([], list(calls))
    return failed, told, str(caught.value)


def test_an_error_of_one_rank_is_heard_of_on_all() -> None:
    pool = ProcessPool(4)  # of its own: ranks cannot talk after one has failed
    try:
        found = pool.run(fail_alone, timeout=90)
    finally:
        pool.stop()
    for failed, told, text in found[0::2]:
        assert not failed and not told
        text = text.replace("rank 3", "rank 1")  # both have that shard
        assert text.startswith("a collective cannot finish: rank 1 failed: IndexError: index 99 is")
    for failed, told, text in found[1::2]:
        assert told == len(failed) == 11, "an operator did not tell"
        assert text.startswith("a call failed on this rank and not on rank 0.")


def fail_alike() -> list[float]:
    """All ranks have the error, catch it and go on, the slowest after the others have looked."""
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    bad = DTensor.from_local(torch.tensor([0, 9]), mesh, [Replicate()], run_check=False)
    made = []
    for _ in range(2):
        with pytest.raises(OutOfRangeError):
            x[bad]
        if dist.get_rank() == 1 and not made:
            time.sleep(2.5)
        made.append(float(x.sum()))
    return made


def _next_sum(slowest: int = -1) -> tuple[str, float]:
    """What is heard after an error that all ranks had, one that ranks 1 and 2 had, and the next
    communication; how long it took."""
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    table = distribute_tensor(torch.arange(8.0), mesh, [Replicate()])
    everywhere = DTensor.from_local(torch.tensor([0, 9]), mesh, [Replicate()], run_check=False)
    alone = distribute_tensor(torch.tensor([0, 99, 99, 0]), mesh, [Shard(0)])
    if dist.get_rank() == slowest:
        time.sleep(5)
    started = time.monotonic()
    with pytest.raises(OutOfRangeError):
        x[everywhere]
    with contextlib.suppress(IndexError):
        table.take(alone)
    with pytest.raises(CommunicationError) as caught:
        x.sum().item()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("slowest", [-1, 2])
def test_an_error_after_one_that_all_had_is_heard_of(slowest: int) -> None:
    """Also if a rank has it when others have heard of it already."""
    pool = ProcessPool(4)
    try:
        found = pool.run(_next_sum, slowest, timeout=50)
    finally:
        pool.stop()
    for rank, (text, seconds) in enumerate(found):
        started = "a call failed on this rank and not" if rank in (1, 2) else "a collective cannot"
        assert text.startswith(started)
        assert seconds < 40, "it heard of it only when the backend's time was over"


def fail_aside() -> float:
    """Some ranks fail alike on a mesh of theirs; the others have long waited when they go on."""
    mesh, ours = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [0, 1])
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Replicate()])
    if dist.get_rank() < 2:
        bad = DTensor.from_local(torch.tensor([0, 9]), ours, [Replicate()], run_check=False)
        with pytest.raises(OutOfRangeError):
            distribute_tensor(torch.arange(8.0), ours, [Shard(0)])[bad]
        time.sleep(3)
    return float(x.sum())


def test_ranks_that_fail_alike_beside_others_go_on(processes: Pools) -> None:
    assert processes(4).run(fail_aside, timeout=60) == [28.0] * 4


def stop_a_checkpoint() -> int:
    """PyTorch ends what a checkpoint runs again by an error of its own."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(1.0, 9.0), mesh, [Shard(0), Replicate()]).requires_grad_()
    before = _State.own.counts.get("0,1,2,3", 0)
    checkpoint(lambda v: v.sin().prod(0), x, use_reentrant=False).backward()
    return _State.own.counts.get("0,1,2,3", 0) - before


def test_the_end_of_a_checkpoint_is_no_error(processes: Pools) -> None:
    assert processes(4).run(stop_a_checkpoint, timeout=60) == [0] * 4


def test_ranks_that_fail_alike_go_on(processes: Pools) -> None:
    assert processes(4).run(fail_alike, timeout=60) == [[28.0, 28.0]] * 4


def fail_where_nothing_is_held() -> list[str]:
    """What calls raise with an index that is out of range, also on the rank without columns."""
    mesh = init_device_mesh("cpu", (2,))
    index = distribute_tensor(torch.tensor([1, 99]), mesh, [Replicate()])
    table = distribute_tensor(torch.ones(6, 1), mesh, [Shard(1)])
    wrong = []
    for name, call in {
        "embedding": lambda: F.embedding(index, table),
        "x[i]": lambda: table[index],
        "index_select": lambda: table.index_select(0, index),
    }.items():
        try:
            call()
        except IndexError:
            continue
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}")
        else:
            wrong.append(name)
    return wrong


def test_an_index_out_of_range_of_an_empty_shard() -> None:
    pool = ProcessPool(2)  # of its own: ranks cannot talk after one has failed
    try:
        assert pool.run(fail_where_nothing_is_held) == [[], []]
    finally:
        pool.stop()
