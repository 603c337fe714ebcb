"""What `lockstep` costs: a small training step with and without it, side by side.

torchrun --nproc-per-node 2 benchmarks/lockstep.py
"""

import time
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import Shard

_STEPS, _TURNS = 20, 12


def main() -> None:
    torch.set_num_threads(1)
    mesh = sw.init_device_mesh("cpu", (2,))
    sw.manual_seed(0, mesh)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    sw.distribute_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = sw.distribute_tensor(torch.randn(32, 64), mesh, [Shard(0)])
    target = sw.distribute_tensor(torch.randint(0, 10, (32,)), mesh, [Shard(0)])

    def step() -> float:
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def timed(context: AbstractContextManager[Any]) -> float:
        with context:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(_STEPS):
                step()
            return (time.perf_counter() - start) / _STEPS

    for _ in range(5):
        step()
    with sw.CommDebugMode() as comm:
        step()
    pairs = [(timed(nullcontext()), timed(sw.lockstep())) for _ in range(_TURNS)]
    without, compared = zip(*pairs, strict=True)
    if sw.is_first_rank():
        best, middle = min(compared) / min(without), median(compared) / median(without)
        print(f"{comm.get_total_counts()} collectives a step")
        print(f"with lockstep / without: best {best:.2f}, median {middle:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
