"""The report of a step on real processes: its bytes and its memory are what was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.measure import Watch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise import Shard
from shardwise.comm import group

from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 16, 8
PLAN = {
    "embed.weight": {"tp": Shard(0)},
    "*.qkv.*": {"tp": Shard(0, split=3)},
    "*.out.weight": {"tp": Shard(1)},
    "*.up.*": {"tp": Shard(0)},
    "*.down.weight": {"tp": Shard(1)},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(64, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens) + self.places(torch.arange(LENGTH))
        return self.head(self.norm(self.blocks(x)))


def gpt_step(fully_sharded: bool) -> Callable[[], None]:
    """A training step of a small GPT on a (2, 2) mesh, which has run before."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = GPT()
    sw.shard_module(model, mesh, PLAN)
    if fully_sharded:
        for part in (*model.blocks, model):
            sw.fully_shard(part, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = sw.distribute_tensor(torch.randint(64, (BATCH, LENGTH + 1)), mesh, {"dp": Shard(0)})

    def step() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return step


def reported_and_asked(fully_sharded: bool) -> tuple[Any, ...]:
    step = gpt_step(fully_sharded)
    with Watch() as asked:
        step()
    report = sw.explain(step)
    every = [*report.collectives, *report.checks]
    return sum(one.bytes for one in every), len(every), asked.cost().bytes, asked.collectives


def test_bytes_are_those_that_torch_distributed_was_asked_for(processes: Pools) -> None:
    for fully_sharded in (False, True):
        for reported, count, asked, calls in processes(4).run(reported_and_asked, fully_sharded):
            assert (reported, count) == (asked, calls)
            assert count > 20


def allocated(run: Callable[[], Any]) -> int:
    """The most bytes that PyTorch's allocator gave out at one time in a call, beyond those before.

    The profiler sees what this thread frees, so gloo's thread must let go of its tensors first.
    """
    waiter = group.waiter

    def slow(*args: Any) -> Any:
        wait = waiter(*args)
        return lambda: (wait(), time.sleep(0.003))

    with (
        patch.object(group, "waiter", slow),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        run()
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, nbytes in changes:
        held += nbytes
        most = max(most, held)
    return most


def memory(fully_sharded: bool) -> tuple[int, int]:
    step, found = gpt_step(fully_sharded), []
    most = allocated(lambda: found.append(sw.explain(step)))
    own = found[0].memory()
    assert found[0].ranks == (dist.get_rank(),)
    return own.peak - own.before, most


def test_the_peak_is_what_was_allocated(processes: Pools) -> None:
    for fully_sharded in (False, True):
        for reported, most in processes(4).run(memory, fully_sharded):
            assert abs(reported - most) < 0.02 * most, (fully_sharded, reported, most)
