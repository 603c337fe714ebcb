"""A training step whose report is in report.txt, word for word; lines of this file are in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise import Shard


class MLP(nn.Module):
    """Columns, then rows: one reduction in the forward, and one in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        hidden = self.up(x).relu()
        return x + self.down(hidden)


def make_step() -> tuple[Callable[[Any], None], Any]:
    """A step on a (2, 2) mesh, and its batch."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plan = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
    model = nn.Sequential(MLP(), MLP())
    sw.shard_module(model, mesh, {f"*.{name}": place for name, place in plan.items()})

    def train(batch: Any) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                parameter.grad = None

    return train, sw.distribute_tensor(torch.randn(4, 8), mesh, {"dp": Shard(0)})
