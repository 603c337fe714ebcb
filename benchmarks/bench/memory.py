"""Memory of a tensor, and what many steps leave behind; each library in its own process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchmarks.bench.sides import Side, fake_world, timed_sides
from benchmarks.bench.timing import Job, Row, Settings
from torch import nn

TENSORS = 20_000


def resident() -> int:
    """Bytes of memory that this process has now."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    told = subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])
    return int(told) * 1024


def bytes_per_tensor(side: Side) -> float:
    """Memory of a tensor that holds one number, with its number."""

    def make() -> Any:
        local = torch.ones(1)
        if side.lib is None:
            return local
        return side.lib.DTensor.from_local(local, side.mesh, side.placements((0,)), run_check=False)

    held = [make() for _ in range(1000)]
    gc.collect()
    before = resident()
    held += [make() for _ in range(TENSORS)]
    return (resident() - before) / TENSORS


def retained(side: Side, steps: int) -> tuple[int, int]:
    """How many objects and bytes more there are after so many training steps."""
    model = side.module(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), {})
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3, foreach=True)
    x = side.put(torch.randn(32, 16), 0)

    def run(count: int) -> None:
        for _ in range(count):
            model(x).square().mean().backward()
            side.reduce_gradients(parameters)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()

    run(max(100, steps // 10))  # caches fill, and the allocator finds its size
    objects, before = len(gc.get_objects()), resident()
    run(steps)
    return len(gc.get_objects()) - objects, resident() - before


def in_process(name: str, steps: int) -> tuple[float, int, int]:
    torch.set_num_threads(1)
    with fake_world():
        side = next(each for each in timed_sides() if each.name == name)
        return bytes_per_tensor(side), *retained(side, steps)


def measured(settings: Settings) -> list[Row]:
    steps = settings.pick(500, 10_000)
    spawn = multiprocessing.get_context("spawn")
    found = {}
    for name in ("plain", "torch", "ours"):
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            found[name] = pool.submit(in_process, name, steps).result()
    tensor, objects, left = (
        (found["ours"][at], found["torch"][at], found["plain"][at]) for at in range(3)
    )
    after = f"retained after {steps:,} steps"
    return [
        Row("memory", "a tensor of one number", "B", *tensor),
        Row("memory", f"objects {after}", "", *objects, rated=False),
        Row("memory", f"memory {after}", "KiB", *(each / 1024 for each in left), rated=False),
    ]


def jobs(settings: Settings) -> dict[str, Job]:
    return {"memory": measured}
