"""Training steps: forward, backward with the reductions of gradients, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.bench.sides import Side, finish
from benchmarks.bench.timing import Job, Settings, timed
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, LENGTH = 8, 64, 16, 16


def mlp(side: Side) -> Callable[[], Any]:
    """Eight linear layers with data parallelism: a sharded batch, replicated parameters."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = side.module(nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU())]), {})
    x, target = side.put(torch.randn(64, WIDTH), 0), side.put(torch.randn(64, WIDTH), 0)
    return training(side, model, lambda: (model(x) - target).square().mean())


class Block(nn.Module):
    """A transformer block; its two row-parallel projections end in a reduction.

    The attention is written out: PyTorch's DTensor has no rule for the fused one on CPU.
    """

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side = side
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mask = side.put(torch.full((LENGTH, LENGTH), -1e9).triu(1))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.side.redistribute
        x = x + whole(self.attend(self.norm1(x)))
        return x + whole(self.down(F.gelu(self.up(self.norm2(x)))))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, HEADS, -1).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5 + self.mask
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


COLUMN, ROW = (0,), (1,)
TENSOR_PARALLEL = {
    "[qkv].*": COLUMN, "up.*": COLUMN, "out.weight": ROW, "down.weight": ROW
}  # fmt: skip


def gpt_block(side: Side) -> Callable[[], Any]:
    """A transformer block with tensor parallelism: heads and the hidden layer are sharded."""
    model = side.module(Block(side), TENSOR_PARALLEL)
    x, target = side.put(torch.randn(2, LENGTH, WIDTH)), side.put(torch.randn(2, LENGTH, WIDTH))
    return training(side, model, lambda: (model(x) - target).square().mean())


def training(side: Side, model: nn.Module, loss_of: Callable[[], Any]) -> Callable[[], Any]:
    """A step with AdamW foreach, in parts; it gives the loss, gradients and new parameters."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)

    def step() -> Iterator[str]:
        loss = loss_of()
        yield "forward"
        loss.backward()
        side.reduce_gradients(parameters)
        yield "backward"
        optimizer.step()
        yield "AdamW foreach"
        gradients = [each.grad for each in parameters]
        optimizer.zero_grad()
        return loss.detach(), gradients, parameters

    _, gradients, _ = finish(step())
    if side.lib is not None:
        for gradient, leaf in zip(gradients, parameters, strict=True):
            assert gradient.placements == leaf.placements, (gradient.placements, leaf.placements)
    return step


def jobs(settings: Settings) -> dict[str, Job]:
    return {
        "MLP step": timed("step", "MLP", mlp, seconds=8),
        "GPT block step": timed("step", "GPT block", gpt_block, seconds=8),
    }
