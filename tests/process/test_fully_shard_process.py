"""`fully_shard` on real processes: the losses and weights of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Shard, init_device_mesh

from ..core.test_fully_shard import by_batch, gpt, sharded, steps
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
PLAN: Any = {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}
MESHES = {
    "fsdp": ((4,), ("dp",)),
    "hybrid": ((2, 2), ("nodes", "dp")),
    "tensor": ((2, 2), ("dp", "tp")),
}


def trained(kind: str, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", MESHES[kind][0], mesh_dim_names=MESHES[kind][1])
    model = gpt()
    if kind == "tensor":
        model = sharded(sw.shard_module(model, mesh, PLAN), mesh["dp"])
    else:
        model = sharded(model, mesh)
    losses = steps(model, by_batch(mesh), count)
    whole: Any = {name: value.full_tensor() for name, value in model.named_parameters()}
    return losses, {name: value.detach() for name, value in whole.items()}


@pytest.mark.parametrize("kind", MESHES)
def test_training_is_that_of_one_device(kind: str, processes: Pools) -> None:
    model = gpt()
    expected = steps(model, lambda batch: batch, 6)
    for losses, weights in processes(4).run(trained, kind, 6):
        torch.testing.assert_close(losses, expected)
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach())


def gathers_overlap() -> bool:
    """While a block runs, the parameters of the next one are on their way."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = sharded(gpt(layers=3), mesh)
    seen = []

    def look(block: nn.Module, *_: Any) -> None:
        seen.append([each._unit._started is not None for each in model.blocks])  # type: ignore

    for block in model.blocks:
        block.up.register_forward_hook(look)
    batch = by_batch(mesh)(torch.zeros(4, 5, dtype=torch.long))
    model(batch)
    model(batch)
    return seen[3:] == [[False, True, False], [False, False, True], [False, False, False]]


def test_the_next_unit_is_gathered_meanwhile(processes: Pools) -> None:
    assert all(processes(2).run(gathers_overlap))
