"""Plain tensors among DTensors: whether ranks compare them does not depend on cached plans."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Shard
from shardwise.dispatch.dispatch import clear
from shardwise.errors import CommunicationError, PlainTensorError

from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def plans_of_one_rank() -> list[bool]:
    """Rank 0 has lost its plans and calls alone what all have called before."""
    mesh = sw.init_device_mesh("cpu", (2,))
    full = torch.arange(8.0)
    x = sw.distribute_tensor(full, mesh, [Shard(0)])
    plain = -torch.ones(8)
    facts = [torch.equal((x + plain).full_tensor(), full - 1)]
    torch._foreach_add_([x.clone()], [plain])
    if dist.get_rank() == 0:
        clear()
        facts.append(torch.equal((x + plain).to_local(), full[:4] - 1))
        y = x.clone()
        torch._foreach_add_([y], [plain])
        facts.append(torch.equal(y.to_local(), full[:4] - 1))
        with sw.CommDebugMode() as comm:
            x + plain
        facts.append(comm.get_total_counts() == 0)
    facts.append(x.sum().item() == 28.0)
    return facts


def test_what_was_compared_is_kept_apart_from_plans(processes: Pools) -> None:
    assert all(all(facts) for facts in processes(2).run(plans_of_one_rank))


def trusted_before() -> list[str]:
    """A call that was planned under "trust" is compared when it is made without."""
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    own = torch.full((6,), float(dist.get_rank()))
    kinds = []
    with sw.plain_tensors("trust"):
        x * own
    for mode in ("check", "check", "check_always"):
        with sw.plain_tensors(mode):
            try:
                x * own
                kinds.append("none")
            except PlainTensorError as error:
                kinds.append(type(error).__name__)
    same = torch.ones(6)
    with sw.CommDebugMode() as comm:
        x * same
        x * same
    kinds.append(str(comm.checks))
    with sw.plain_tensors("check_always"), sw.CommDebugMode() as comm:
        x * same
        x * same
    kinds.append(str(comm.checks))
    return kinds


def test_a_trusted_call_is_compared_later(processes: Pools) -> None:
    expected = ["PlainTensorError"] * 3 + ["1", "2"]
    assert processes(2).run(trusted_before) == [expected] * 2


def other_calls() -> str:
    """The ranks make different calls with plain tensors."""
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    with pytest.raises(CommunicationError) as caught:
        if dist.get_rank():
            x - torch.ones(10)
        else:
            x / torch.ones(10)
    return str(caught.value)


def test_different_calls_end_on_both_ranks(processes: Pools) -> None:
    for rank, text in enumerate(processes(2).run(other_calls)):
        assert f"rank {1 - rank} did not come within 5 seconds" in text
        assert "test_plain_check_process.py:" in text and "DTensor.from_local" in text
