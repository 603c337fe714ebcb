"""Transformers: GPT, Llama, BERT, with low-rank adapters and with a cache for generation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HEADS, LENGTH = 512, 32, 8, 16
Cache = tuple[Tensor, Tensor]


class GPTAttention(nn.Module):
    """Attention over heads of one fused projection, with biases and both dropouts."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        if self.causal:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        y = self.dropout(scores.softmax(-1)) @ v
        return self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = GPTAttention(width, heads, dropout, causal)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2: biases, dropout, learned positions, the head tied to the embedding."""

    def __init__(self, layers: int = 2, dropout: float = 0.1, recompute: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(WIDTH, HEADS, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


class BERT(nn.Module):
    """An encoder with padded texts; it guesses the masked tokens."""

    def __init__(self, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(WIDTH, HEADS, dropout, False) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0)[:, None, None, :]
        x = self.dropout(self.norm(self.embed(tokens) + self.position[: tokens.shape[1]]))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def rotate(x: Tensor, start: int = 0) -> Tensor:
    """Rotary positions; `x` is (batch, heads, length, width of a head)."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(start, start + x.shape[-2], device=x.device)[:, None] * rates
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class GroupedAttention(nn.Module):
    """Grouped-query attention: several heads of queries share one head of keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        past = 0 if cache is None else cache[0].shape[2]
        q, k = rotate(q, past), rotate(k, past)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1)), (k, v)


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = GroupedAttention(width, heads, kv_heads)
        self.mlp = GatedMLP(width, 3 * width) if mlp is None else mlp

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        y, cache = self.attention(self.norm1(x), cache)
        x = x + y
        return x + self.mlp(self.norm2(x)), cache


class Llama(nn.Module):
    """RMS norms, rotary positions, grouped-query attention, gated MLPs (or other ones), no bias."""

    def __init__(self, layers: int = 2, mlp: Any = None, kv_heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        made = [None if mlp is None else mlp() for _ in range(layers)]
        self.blocks = nn.ModuleList(LlamaBlock(WIDTH, HEADS, kv_heads, each) for each in made)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, caches: list[Cache | None] | None = None) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x, made = block(x, None if caches is None else caches[index])
            if caches is not None:
                caches[index] = made
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model: nn.Module, tokens: Tensor, count: int, sample: bool = False) -> Tensor:
    """`count` more tokens, the likeliest ones or drawn from the 10 likeliest."""
    caches: list[Cache | None] = [None] * len(model.blocks)
    new = tokens
    for _ in range(count):
        logits = model(new, caches)[:, -1]
        if sample:
            best, where = logits.topk(10)
            new = where.gather(1, torch.multinomial(best.softmax(-1), 1))
        else:
            new = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return tokens


class LoRALinear(nn.Module):
    """A frozen linear layer and a product of two thin matrices that learn."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(base.in_features, rank) / rank)
        self.b = nn.Parameter(torch.randn(rank, base.out_features) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a) @ self.b


def lora(model: nn.Module) -> nn.Module:
    """The model with adapters beside all linear layers of its blocks, which alone are trained."""
    model.requires_grad_(False)
    for module in list(model.blocks.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear):
                setattr(module, name, LoRALinear(part))
    return model
