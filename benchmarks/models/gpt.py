"""A GPT for training benchmarks: nothing in it knows how it is made parallel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Size(NamedTuple):
    width: int
    heads: int
    layers: int
    length: int
    vocabulary: int


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.of_head = size.width // size.heads
        self.queries, self.keys, self.values, self.out = (
            nn.Linear(size.width, size.width) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = [
            layer(x).unflatten(-1, (-1, self.of_head)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        ]
        mixed = F.scaled_dot_product_attention(*each, is_causal=True)
        found: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.gelu(self.up(x)))
        return found


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention, self.mlp = Attention(size), MLP(size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        found: torch.Tensor = x + self.mlp(self.norm2(x))
        return found


class Embed(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return found


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = Embed(size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch: tokens, or inputs and targets."""
    ends = batch if isinstance(batch, (list, tuple)) else (batch[:, :-1], batch[:, 1:])
    return F.cross_entropy(model(ends[0]).flatten(0, 1), ends[1].flatten())
