"""Models trained for some steps, by a plan on a mesh and on one device: losses and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.models import moe, others, transformer
from torch import Tensor, nn

import shardwise as sw
from shardwise import Placement, Shard

Trained = tuple[list[float], dict[str, Tensor]]
STEPS, RATE = 30, 3e-3
ByAxis = Mapping[str, Placement]
GPT_PLAN: dict[Any, ByAxis] = {
    "embed.weight": {"tp": Shard(0)},  # the head has the same weight
    "*.qkv.*": {"tp": Shard(0)},
    "*.out.weight": {"tp": Shard(1)},
    "*.mlp.0.*": {"tp": Shard(0)},
    "*.mlp.2.weight": {"tp": Shard(1)},
}
LLAMA_PLAN: dict[Any, ByAxis] = {
    "embed.weight": {"tp": Shard(0)},
    "head.weight": {"tp": Shard(0)},
    "*.[qkv].weight": {"tp": Shard(0)},
    "*.o.weight": {"tp": Shard(1)},
    "*.gate.weight": {"tp": Shard(0)},
    "*.up.weight": {"tp": Shard(0)},
    "*.down.weight": {"tp": Shard(1)},
}
LORA_PLAN: dict[Any, ByAxis] = {
    "embed.weight": {"tp": Shard(0)},
    "head.weight": {"tp": Shard(0)},
    "*.[qkv].base.weight": {"tp": Shard(0)},
    "*.gate.base.weight": {"tp": Shard(0)},
    "*.up.base.weight": {"tp": Shard(0)},
    "*.o.base.weight": {"tp": Shard(1)},
    "*.down.base.weight": {"tp": Shard(1)},
    "*.[qkv].b": {"tp": Shard(1)},
    "*.o.a": {"tp": Shard(0)},
}
CHANNELS: dict[Any, ByAxis] = {
    "conv1.weight": {"tp": Shard(0)},
    "norm1.*": {"tp": Shard(0)},
    "norm1.running_*": {"tp": Shard(0)},
    "conv2.weight": {"tp": Shard(1)},
}
LSTM_PLAN: dict[Any, ByAxis] = {
    "embed.weight": {"tp": Shard(0)},
    "head.*": {"tp": Shard(0)},
    "lstm.weight_*": {"tp": Shard(1)},
}
EXPERT_PLAN: dict[Any, ByAxis] = {
    f"*.mlp.{name}": {"ep": Shard(0)} for name in ("gate", "up", "down")
}
EXPERT_TENSOR_PLAN: dict[Any, ByAxis] = {
    **{name: places for name, places in LLAMA_PLAN.items() if "[qkv]" in name or ".o." in name},
    "*.mlp.gate": {"ep": Shard(0), "tp": Shard(2)},
    "*.mlp.up": {"ep": Shard(0), "tp": Shard(2)},
    "*.mlp.down": {"ep": Shard(0), "tp": Shard(1)},
}
FULLY_SHARDED: dict[Any, ByAxis] = {"*": {"dp": Shard(0)}}


@dataclass(frozen=True)
class Run:
    """A model and a batch on a mesh. The step knows neither."""

    model: Callable[[], nn.Module]
    mesh: Mapping[str, int]
    plan: Any = field(default_factory=dict)
    batch: ByAxis = field(default_factory=dict)


def gpt() -> nn.Module:
    return transformer.GPT(layers=4)


class FusedAttention(transformer.GPTAttention):
    """The attention of GPT by PyTorch's kernel."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


def fused_gpt() -> nn.Module:
    model = transformer.GPT(layers=2)
    for block in model.blocks:
        block.attention = FusedAttention(transformer.WIDTH, transformer.HEADS, 0.1)
    return model


def block_of_llama() -> nn.Module:
    return transformer.Llama(layers=1)


def mixture() -> nn.Module:
    return transformer.Llama(layers=1, mlp=moe.LoopedExperts)


def dispatched() -> nn.Module:
    return transformer.Llama(layers=1, mlp=moe.DispatchedExperts)


def adapters() -> nn.Module:
    return transformer.lora(transformer.Llama(layers=1))


class ResNetBlock(nn.Module):
    """A residual block with batch norm between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return self.head(F.relu(x + y).mean((2, 3)))


DP, TP, DP_TP = {"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}
DATA, SEQUENCE = {"dp": Shard(0)}, {"tp": Shard(1)}
CP, CP_TP, CONTEXT = {"cp": 4}, {"cp": 2, "tp": 2}, {"cp": Shard(1, split=2)}
RUNS = {
    "gpt, dp": Run(gpt, DP, batch=DATA),
    "gpt, tp": Run(gpt, TP, GPT_PLAN),
    "gpt, dp x tp": Run(gpt, DP_TP, GPT_PLAN, DATA),
    "gpt, sequence": Run(gpt, TP, GPT_PLAN, SEQUENCE),
    "gpt, fully sharded x tp": Run(gpt, DP_TP, {**GPT_PLAN, **FULLY_SHARDED}, DATA),
    "gpt, context": Run(fused_gpt, CP, batch=CONTEXT),
    "gpt, context by heads": Run(fused_gpt, CP, batch={"cp": Shard(1)}),
    "gpt, context x tp": Run(fused_gpt, CP_TP, GPT_PLAN, CONTEXT),
    "llama, context x tp": Run(block_of_llama, CP_TP, LLAMA_PLAN, CONTEXT),
    "llama, dp x tp": Run(block_of_llama, DP_TP, LLAMA_PLAN, DATA),
    "llama, auto": Run(block_of_llama, DP_TP, "auto", DATA),
    "resnet, dp": Run(ResNetBlock, DP, batch=DATA),
    "resnet, channels": Run(ResNetBlock, DP_TP, CHANNELS, DATA),
    "lstm, dp x tp": Run(others.LSTM, DP_TP, LSTM_PLAN, DATA),
    "moe, dp x tp": Run(mixture, DP_TP, LLAMA_PLAN, DATA),
    "dispatched, ep": Run(dispatched, {"ep": 4}, EXPERT_PLAN, {"ep": Shard(0)}),
    "dispatched, ep x tp": Run(
        dispatched, {"ep": 2, "tp": 2}, EXPERT_TENSOR_PLAN, {"ep": Shard(0)}
    ),
    "dispatched, dp x ep": Run(dispatched, {"dp": 2, "ep": 2}, EXPERT_PLAN, DATA),
    "lora, dp x tp": Run(adapters, DP_TP, LORA_PLAN, DATA),
}


def batches(model: nn.Module, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Two batches in turn: images and classes, or tokens and next tokens."""
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, transformer.VOCAB, (2, 4, 9), generator=draw)
    pairs = [(each[:, :-1], each[:, 1:]) for each in tokens]
    if isinstance(model, ResNetBlock):
        images = torch.randn(2, 8, 3, 8, 8, generator=draw)
        pairs = list(zip(images, torch.randint(10, (2, 8), generator=draw), strict=True))
    return [pairs[step % 2] for step in range(steps)]


@cache
def on_one_device(name: str) -> Trained:
    """What one device gives, and a check that it has learned something."""
    losses, values = train(RUNS[name])
    assert min(losses[-2:]) < 0.95 * losses[0]
    return losses, values


def assert_same(have: Trained, want: Trained) -> None:
    """Every loss and every weight, within what float32 leaves open after so many steps."""
    torch.testing.assert_close(torch.tensor(have[0]), torch.tensor(want[0]), rtol=1e-5, atol=1e-5)
    assert have[1].keys() == want[1].keys()
    for name, value in want[1].items():
        torch.testing.assert_close(have[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def train(run: Run, mesh: Any = None, steps: int = STEPS) -> Trained:
    """The loss of each step and the weights and buffers at the end, on a mesh or on one device."""
    torch.manual_seed(0)
    model = run.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-5)
    if mesh is not None:
        sw.shard_module(model, mesh, run.plan)
    losses = []
    for inputs, targets in batches(model, steps):
        if mesh is not None:
            inputs, targets = (
                sw.distribute_tensor(value, mesh, run.batch, src_data_rank=None)
                for value in (inputs, targets)
            )
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    values = {
        name: value.full_tensor() if isinstance(value, sw.DTensor) else value
        for name, value in model.state_dict().items()
    }
    return losses, values
