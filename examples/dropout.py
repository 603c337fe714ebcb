"""A transformer block with dropout, trained on three meshes: the losses are the same.

Exact mode gives the masks of plain PyTorch; counter mode gives others, and draws on each rank only
the part of a mask that it holds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard

WIDTH, HEADS, LENGTH, BATCH, STEPS = 16, 4, 6, 8, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        heads = [part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv]
        y = F.scaled_dot_product_attention(*heads, dropout_p=0.1 if self.training else 0.0)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))


def sharded(block: nn.Module, mesh: sw.DeviceMesh) -> nn.Module:
    """Linears over the last axis, columns first and then rows; the block is as it was."""

    def shard(name: str, module: nn.Module, mesh: sw.DeviceMesh) -> None:
        for key, value in list(module.named_parameters(recurse=False)):
            rows = name in ("out", "down")
            split = {"weight": Shard(1 if rows else 0), "bias": Replicate() if rows else Shard(0)}
            last = split[key] if isinstance(module, nn.Linear) else Replicate()
            places = [Replicate()] * (mesh.ndim - 1) + [last]
            placed = sw.distribute_tensor(value.data, mesh, places)
            module.register_parameter(key, nn.Parameter(placed))

    return sw.distribute_module(block, mesh, shard)


def losses(mesh: sw.DeviceMesh | None) -> list[float]:
    torch.manual_seed(0)
    block = Block() if mesh is None else sharded(Block(), mesh)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    y = x.flip(1)
    if mesh is not None:
        over = [Shard(0)] * (mesh.ndim - 1) + [Replicate()]
        x, y = (sw.distribute_tensor(value, mesh, over) for value in (x, y))
    found = []
    for _ in range(STEPS):
        loss = F.mse_loss(block(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    meshes = {str(shape): sw.init_device_mesh("cpu", shape) for shape in ((1,), (2, 2), (4,))}
    for mode, alone in (("exact", {"one device": losses(None)}), ("counter", {})):
        with sw.random.mode(mode):
            table = alone | {name: losses(mesh) for name, mesh in meshes.items()}
        print(f"{mode} mode\nstep " + "".join(f"{name:>12}" for name in table))
        for step in (0, 1, 2, 4, 9, 14, STEPS - 1):
            print(f"{step + 1:4} " + "".join(f"{values[step]:12.6f}" for values in table.values()))
        first, *others = table.values()
        torch.testing.assert_close(torch.tensor(others), torch.tensor([first] * len(others)))
