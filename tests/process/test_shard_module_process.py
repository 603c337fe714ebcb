"""Plans on several processes: ranks that do not agree all get an error, and none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import DTensor, Shard, init_device_mesh, shard_module
from shardwise.errors import LayoutError

from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
PLAN: Any = {"up.weight": {"tp": Shard(0)}}
OTHER: dict[str, Any] = {
    "another plan": {"up.weight": {"tp": Shard(1)}},
    "a plan that does not fit": {"down.weight": {"tp": Shard(0)}},
    "no plan": 3,
}


def sharded(other: str) -> tuple[str, bool]:
    """The error if rank 1 has another plan, and whether the model stayed as it was."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.ModuleDict({"up": nn.Linear(4, 6)})
    try:
        shard_module(model, mesh, OTHER[other] if dist.get_rank() == 1 else PLAN)
    except LayoutError as error:
        return str(error), not any(isinstance(p, DTensor) for p in model.parameters())
    return "", False


@pytest.mark.parametrize("other", OTHER)
def test_ranks_with_different_plans(processes: Pools, other: str) -> None:
    found = processes(4).run(sharded, other)
    for rank, (text, as_it_was) in enumerate(found):
        assert as_it_was, text
        if rank == 1 and other != "another plan":
            assert "matches no parameter" in text or "the plan is a dict" in text
        else:
            assert text.startswith("shard_module: another rank cannot convert its module, or")


def first_ranks_values() -> torch.Tensor:
    """Parameters are the first rank's, although every rank has drawn its own."""
    torch.manual_seed(dist.get_rank())
    model = nn.ModuleDict({"up": nn.Linear(4, 6)})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_module(model, mesh, PLAN)
    value: Any = model["up"].weight
    assert value.detach().to_local().shape == (3, 4)
    return value.full_tensor().detach()


def test_all_ranks_have_the_first_ones_values(processes: Pools) -> None:
    torch.manual_seed(0)
    want = nn.Linear(4, 6).weight
    for have in processes(4).run(first_ranks_values):
        assert torch.equal(have, want)
