"""A captured training step beside the eager one, plain tensors by hand, and PyTorch's DTensor.

    python benchmarks/capture.py [--turns N]

An MLP and a GPT block with tensor parallelism over two ranks, and AdamW: on the fake process group,
whose collectives cost nothing, and on two gloo processes. By hand means local parts of the weights
and an all-reduce where a layer ends; compiled means the model through `torch.compile`. Times are
the least of many turns, in which the sides follow each other. Two calls are recorded, and one runs
replayed and eagerly.

The last line is what a report costs: a GPT block of width 512, with `sw.explain` and without.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import shardwise as ours

WORLD, WIDTH, HEADS, LAYERS = 2, 64, 8, 4
PLAN = {"*.up.*": 0, "*.down.weight": 1, "*.[qkv].weight": 0, "*.out.weight": 1}


class Enter(torch.autograd.Function):
    """By hand, before a column-parallel layer: its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """By hand, after a row-parallel layer: the ranks' results are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad


class MLP(nn.Module):
    """Two linear layers; `parts` is the number of ranks if this is one rank's part."""

    def __init__(self, parts: int, leave: Callable[[Any], Any], width: int = WIDTH) -> None:
        super().__init__()
        self.parts, self.leave = parts, leave
        self.up = nn.Linear(width, 4 * width // parts)
        self.down = nn.Linear(4 * width // parts, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Any) -> Any:
        x = Enter.apply(x) if self.parts > 1 else x
        return self.leave(self.down(F.gelu(self.up(x)))) + self.bias


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, parts: int, leave: Callable[[Any], Any], width: int = WIDTH) -> None:
        super().__init__()
        self.width, self.parts, self.leave = width // HEADS, parts, leave
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width // parts, bias=False) for _ in range(3))
        self.out = nn.Linear(width // parts, width, bias=False)
        self.mlp = MLP(parts, leave, width)

    def forward(self, x: Any) -> Any:
        y = self.norm1(x)
        y = Enter.apply(y) if self.parts > 1 else y
        shape = (*y.shape[:2], -1, self.width)
        q, k, v = (each(y).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        made = (q @ k.transpose(-2, -1) * self.width**-0.5).softmax(-1) @ v
        x = x + self.leave(self.out(made.transpose(1, 2).reshape(*y.shape[:2], -1)))
        return x + self.mlp(self.norm2(x))


def step_of(model: nn.Module, x: Any, lib: Any, compiled: bool) -> Callable[[], Any]:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    call = torch.compile(model, fullgraph=True) if compiled else model

    def step() -> Any:
        loss = call(x).square().mean()
        loss.backward()
        if lib is theirs:
            for each in parameters:
                if each.grad.placements != each.placements:  # type: ignore[union-attr, attr-defined]
                    each.grad = each.grad.redistribute(placements=each.placements)  # type: ignore
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def side(
    kind: Callable[..., nn.Module], x: Tensor, lib: Any, mesh: Any, compiled: bool = False
) -> Callable[[], Any]:
    """The step of a library; of plain tensors by hand if it is None."""
    torch.manual_seed(0)
    if lib is None:
        parts = [kind(WORLD, Leave.apply) for _ in range(LAYERS)]
        return step_of(nn.Sequential(*parts), x, lib, compiled)
    whole = [lib.Replicate()]
    leave = lambda y: y.redistribute(placements=whole)  # noqa: E731
    model = nn.Sequential(*[kind(1, leave) for _ in range(LAYERS)])
    for prefix, part in model.named_modules():
        for name, value in list(part.named_parameters(recurse=False)):
            found = [d for glob, d in PLAN.items() if fnmatchcase(f"{prefix}.{name}", glob)]
            places = [lib.Shard(found[0])] if found else whole
            put = lib.distribute_tensor(value.detach(), mesh, places, src_data_rank=None)
            part.register_parameter(name, nn.Parameter(put))
    placed = lib.distribute_tensor(x, mesh, whole, src_data_rank=None)
    return step_of(model, placed, lib, compiled)


def measure(turns: int, where: str) -> None:
    """Print the time of each side, and beside the one by hand."""
    torch.set_num_threads(1)
    mesh = ours.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    for name, kind in (("MLP", MLP), ("GPT", Block)):
        x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(1))
        captured = ours.capture(side(kind, x, ours, mesh))
        inductor = ours.capture(side(kind, x, ours, mesh), backend="inductor")
        sides = {
            "by hand": side(kind, x, None, mesh),
            "eager": side(kind, x, ours, mesh),
            "captured": captured,
            "captured, inductor": inductor,
            "compiled": side(kind, x, ours, mesh, compiled=True),
            "PyTorch's DTensor": side(kind, x, theirs, mesh),
            "the same, compiled": side(kind, x, theirs, mesh, compiled=True),
        }
        for step in sides.values():
            for _ in range(7):
                step()
        assert captured.stats()["replayed"] == inductor.stats()["replayed"] == 1
        one, every = recording(partial(side, kind, x, ours, mesh))
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(turns):
            for label, step in sides.items():
                best[label] = min(best[label], seconds(step))
        if dist.get_rank() == 0:
            for label, least in best.items():
                ratios = [
                    f"{least / best[other]:5.2f}" for other in ("by hand", "PyTorch's DTensor")
                ]
                text = f"{ratios[0]} of by hand  {ratios[1]} of DTensor"
                print(f"{where} {name:4} {label:18} {least * 1e6:8.0f} us  {text}")
            print(
                f"{where} {name:4} a recorded call: {one:.1f} eager steps; all calls until the "
                f"step is replayed: {every:.1f} more than eager ones"
            )


def recording(make: Callable[[], Callable[[], Any]]) -> tuple[float, float]:
    """What a recorded call takes, and what all calls until the step is replayed take more than
    eager ones: the least, in eager steps, by the time of the processor."""
    eager, one, every = float("inf"), float("inf"), float("inf")
    for _ in range(4):
        plain, step = make(), ours.capture(make())
        eager = min(eager, *[seconds(plain, time.process_time) for _ in range(6)])
        times = [seconds(step, time.process_time) for _ in range(6)]
        one, every = min(one, times[3]), min(every, sum(times))
    return one / eager, every / eager - 6


def seconds(step: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    step()
    return clock() - start


def measure_report(turns: int) -> None:
    """Print what a report adds to the time of a step."""
    mesh = ours.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    model = Block(1, lambda y: y, 512)
    plan = {glob.removeprefix("*."): {"tp": ours.Shard(dim)} for glob, dim in PLAN.items()}
    ours.shard_module(model, mesh, {f"*{name}": places for name, places in plan.items()})
    x = ours.distribute_tensor(torch.randn(8, 128, 512), mesh, src_data_rank=None)
    step = step_of(model, x, ours, compiled=False)
    step()
    alone, reported = float("inf"), float("inf")
    for _ in range(turns):
        alone = min(alone, seconds(step))
        reported = min(reported, ours.explain(step).seconds)
    print(f"report of a GPT block of width 512: {reported / alone:.3f} of the step")


def on_gloo(rank: int, port: int, turns: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    measure(turns, "gloo")
    dist.destroy_process_group()


def on_fake_group(rank: int, turns: int) -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=WORLD)
    measure(turns, "fake")
    measure_report(turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--turns", type=int, default=60)
    given = parser.parse_args()
    print(f"PyTorch {torch.__version__}")
    spawn(on_fake_group, (given.turns,), nprocs=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(on_gloo, (port, given.turns), nprocs=WORLD)


if __name__ == "__main__":
    main()
