"""The life of a process group: what goes with it, and who may not use it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.errors import CommunicationError, MeshError

from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def _initialise(turn: int, port: int) -> None:
    rank = int(os.environ["TEST_RANK"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    prefix = dist.PrefixStore(f"turn{turn}", store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=4)


def _used() -> tuple[int, int]:
    """How many file descriptors and threads this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _train(mesh: Any) -> None:
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Replicate()])
    assert x.sum().item() == 28.0
    y = x.redistribute(placements=[Replicate(), Shard(0)], async_op=True)
    assert torch.equal((y + torch.ones(8)).full_tensor(), torch.arange(8.0) + 1)


def come_and_go() -> tuple[list[tuple[int, int]], bool]:
    """What is held after each of twenty groups, and whether the old hook for errors is back."""
    os.environ["TEST_RANK"] = str(dist.get_rank())
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = store.port
    dist.destroy_process_group()
    held, same = [], True
    for turn in range(20):
        before = sys.excepthook
        _initialise(turn, port)
        ours = sys.excepthook  # PyTorch has set one
        mesh = sw.init_device_mesh("cpu", (2, 2))
        same &= sys.excepthook is not ours
        _train(mesh)
        dist.barrier()
        del mesh
        dist.destroy_process_group()
        same &= sys.excepthook in (before, ours)
        held.append(_used())
    _initialise(20, port)
    return held, same


def test_nothing_of_a_destroyed_group_is_kept() -> None:
    pool = ProcessPool(4)
    try:
        for held, same in pool.run(come_and_go, timeout=300):
            assert same, "the hook for errors does not go with the group"
            assert held[-1][0] <= held[1][0] + 1, held  # file descriptors
            assert held[-1][1] <= held[1][1] + 1, held  # threads
    finally:
        pool.stop()


def _text(call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def outlive() -> list[str]:
    """What tensors and a mesh of a destroyed group say, before there is another group and after."""
    os.environ["TEST_RANK"] = str(dist.get_rank())
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = store.port
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])
    dist.destroy_process_group()
    calls: list[Callable[[], Any]] = [
        lambda: x.sum().item(),
        lambda: x.full_tensor(),
        lambda: x.redistribute(placements=[Replicate()] * 2, async_op=True),
        lambda: sw.ones(4, device_mesh=mesh, placements=[Shard(0), Replicate()]),
    ]
    texts = [_text(call, MeshError) for call in calls[:3]]
    _initialise(21, port)
    texts += [_text(call, MeshError) for call in calls]
    other = sw.init_device_mesh("cpu", (4,))  # its group may have the name of an old one
    texts += [_text(call, MeshError) for call in calls]
    y = sw.distribute_tensor(torch.arange(8.0), other, [Shard(0)])
    texts.append(_text(lambda: x + y, MeshError))
    new = sw.init_device_mesh("cpu", (2, 2))
    assert torch.equal(x.to_local(), torch.arange(8.0).chunk(4)[dist.get_rank()])
    _train(new)
    return texts


def test_a_tensor_of_a_destroyed_group() -> None:
    pool = ProcessPool(4)
    try:
        for texts in pool.run(outlive, timeout=100):
            assert len(texts) == 12
            for text in texts:
                assert "was destroyed" in text and "to_local()" in text, texts
    finally:
        pool.stop()


def in_a_child() -> list[bool]:
    """What a child process can do with a DTensor: read its part, and not communicate."""
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    x.sum().item()
    child = os.fork()
    if not child:
        signal.alarm(20)
        calls: list[Callable[[], Any]] = [
            lambda: x.sum().item(),
            lambda: x.full_tensor(),
            lambda: torch.hypot(x, torch.ones(8)),
            lambda: sw.distribute_tensor(torch.ones(4), mesh, [Shard(0)]),
        ]
        told = all("forked from rank" in _text(call, CommunicationError) for call in calls)
        part = torch.arange(8.0).chunk(2)[int(x._spec.topology.coordinate[0])]
        os._exit(0 if told and torch.equal((x * 2).to_local(), part * 2) else 1)
    status = os.waitpid(child, 0)[1]
    return [status == 0, x.sum().item() == 28.0]


def test_a_forked_child_gets_a_clear_error(processes: Pools) -> None:
    assert processes(2).run(in_a_child, timeout=60) == [[True, True]] * 2


def read_by_threads() -> list[str]:
    """Two threads use a value, and two parts of one batch, while they are under way."""
    mesh = sw.init_device_mesh("cpu", (2,))
    full = torch.arange(64.0).view(8, 8)
    x = sw.distribute_tensor(full, mesh, [Shard(0)])
    wrong: list[str] = []
    for _ in range(10):
        if dist.get_rank() == 1:
            time.sleep(0.2)  # so that both threads of the other rank wait
        one = x.redistribute(placements=[Replicate()], async_op=True)
        pair = sw.redistribute_all([x, x], [Replicate()], async_op=True)

        def use(value: Any) -> None:
            try:
                if not torch.equal(value._locals[0], full):
                    wrong.append("values")
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=use, args=(v,)) for v in (one, one, one, *pair, *pair)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    return wrong


def test_threads_may_share_a_value_that_is_under_way(processes: Pools) -> None:
    assert processes(2).run(read_by_threads, timeout=60) == [[]] * 2


def arrive_late() -> str:
    """Rank 1 comes when rank 0 has given up: both hear so, and neither goes on alone."""
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(14.0), mesh, [Shard(0)])
    if dist.get_rank() == 1:
        time.sleep(7)
    return _text(lambda: torch.atan2(x, torch.ones(14)), CommunicationError)


def test_who_comes_too_late_hears_so(processes: Pools) -> None:
    first, second = processes(2).run(arrive_late, timeout=60)
    assert "rank 1 did not come within 5 seconds. This rank is there, at " in first
    assert "rank 1 did not come within 5 seconds. This rank came later, at " in second


def _as_one_of_ranks_that_do_not_exist(rank: int) -> tuple[list[int], list[int], bool]:
    """Shapes on one rank of the `fake` backend, which sends nothing and has no store."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = sw.distribute_tensor(torch.zeros(8, 4, requires_grad=True), mesh, [Shard(0), Replicate()])
    y = (x + torch.ones(4)).sum(0)  # plain tensors are compared over the ranks
    whole = y.full_tensor()
    whole.sum().backward()
    assert x.grad is not None
    return list(x.detach().to_local().shape), list(whole.shape), x.grad.placements == x.placements


def test_a_mesh_may_be_over_the_fake_backend() -> None:
    for rank in (0, 2):
        pool = ProcessPool(1)
        try:
            expected = ([4, 4], [4], True)
            assert pool.run(_as_one_of_ranks_that_do_not_exist, rank) == [expected]
        finally:
            pool.stop()
