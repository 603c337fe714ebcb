"""The plans of all operators share one bound in bytes, and a warm call writes nothing."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard, distribute_tensor, shard_module
from shardwise.dispatch import dispatch
from shardwise.dispatch.cache import Bounded, kept
from shardwise.dispatch.dispatch import clear, stats

from ..compare import numbers, virtual


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    dispatch.clear()
    yield
    dispatch.clear()


def tensor(size: int, ranks: int = 2) -> Any:
    mesh = sw.init_device_mesh("cpu", (ranks,))
    return sw.distribute_tensor(torch.arange(float(size)) - 3, mesh, [Shard(0)])


def held() -> int:
    return sum(len(entry.plans) for entry in dispatch._entries.values())


def test_one_bound_for_all_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many operators with many shapes stay below it together, and give right results."""
    monkeypatch.setattr(kept, "most", 100_000)
    most = 0
    for size in range(1, 60):
        plain, x = torch.arange(float(size)) - 3, tensor(size)
        assert torch.equal((x * 2).full_tensor(), plain * 2)
        assert torch.equal(x.exp().full_tensor(), plain.exp())
        assert x.sum().item() == plain.sum().item()
        torch._foreach_add([x, x], 1.0)
        most = max(most, kept.nbytes)
        assert kept.nbytes <= 100_000
    assert most > 80_000 and 10 < held() < 60
    assert dispatch.stats()["plans"] == held()


def test_the_plans_that_came_first_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [tensor(size) for size in range(4, 60)]
    for x in tensors:
        x + 1
    before = dispatch.stats()["built"]
    tensors[-1] + 1
    assert dispatch.stats()["built"] == before
    monkeypatch.setattr(kept, "most", kept.nbytes // 2)
    tensor(100) + 1
    before = dispatch.stats()["built"]
    tensors[-1] + 1  # among the last: it is there still
    assert dispatch.stats()["built"] == before
    assert torch.equal((tensors[0] + 1).full_tensor(), torch.arange(4.0) - 2)
    assert dispatch.stats()["built"] == before + 1


def test_a_warm_call_writes_nothing() -> None:
    """No order of use is kept: the tables are the same before and after."""
    x, y = tensor(5), tensor(5)
    x + y
    x * 2
    order = [(id(table), key) for table, key, _ in kept._entries]
    size = kept.nbytes
    for _ in range(3):
        x + y
    assert [(id(table), key) for table, key, _ in kept._entries] == order
    assert kept.nbytes == size


def test_estimates_are_near_the_memory_that_plans_take() -> None:
    """Within a factor of 3, for one operand and for many, on few ranks and on many."""
    for ranks in (2, 16):
        mesh = sw.init_device_mesh("cpu", (ranks,))
        x = sw.distribute_tensor(torch.ones(64, 8), mesh, [Shard(0)])
        y = sw.distribute_tensor(torch.ones(8, 8), mesh, [Replicate()])
        for call in (
            lambda i, x=x: x.narrow(0, 0, 64 - i),
            lambda i, x=x: torch._foreach_mul([x] * (i + 20), 2.0),
            lambda i, x=x, y=y: x @ y[:, : i % 7 + 1],
        ):
            call(0)
            dispatch.clear()
            gc.collect()
            tracemalloc.start()
            for i in range(1, 25):
                call(i)
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            assert taken / 3 < kept.nbytes < taken * 3


def test_clear_and_stats() -> None:
    tensor(3) + 1
    assert dispatch.stats()["plans"] >= 1 and kept.nbytes > 0
    dispatch.clear()
    assert dispatch.stats() == {"operators": 0, "plans": 0, "built": 0}
    assert kept.nbytes == 0


def test_an_entry_that_is_put_again_counts_once() -> None:
    cache, table = Bounded(100), dict[str, int]()
    for value in range(5):
        cache.put(table, "same", value, 60)
    assert table == {"same": 4} and cache.nbytes == 60
    cache.put(table, "large", 1, 1000)  # larger than all: it is kept alone
    assert table == {"large": 1}
    cache.clear()
    assert table == {} and cache.nbytes == 0


@pytest.mark.parametrize(
    "f",
    [
        lambda x, value: x.clamp(min=value),
        lambda x, value: x.nan_to_num(nan=value),
        lambda x, value: x * complex(1, value),
        lambda x, value: torch.nn.functional.pad(x, (1, 1), value=value),
        lambda x, value: torch._foreach_mul([x], [value])[0],
        lambda x, value: torch._foreach_add([x], value)[0],
    ],
)
def test_no_plan_is_built_for_another_nan(f: Callable[[Any, float], Any]) -> None:
    x = distribute_tensor(numbers(4, 3), virtual(2), [Shard(0)])
    clear()
    for value in (float("nan"), float("nan") + 1):
        made = f(x, value)
        plans = stats()
        torch.testing.assert_close(made.full_tensor(), f(numbers(4, 3), value), equal_nan=True)
        f(x, float("nan") - 1)
        assert stats() == plans


def test_a_plan_serves_every_device() -> None:
    """One that was made for a tensor on the meta device, or in memory, does not remember it."""
    mesh = virtual(2)
    in_memory = distribute_tensor(numbers(5, 3), mesh)
    with torch.device("meta"):
        layer = nn.Linear(3, 5, dtype=torch.float64)
    on_meta = shard_module(layer, mesh, {}).weight
    for function in (torch.detach, torch.neg, torch.t, torch.zeros_like):
        for first, second in ((on_meta, in_memory), (in_memory, on_meta)):
            clear()
            for each in (first, second, first):
                made = function(each.detach())
                assert made.device == made._locals[0].device == each.device
