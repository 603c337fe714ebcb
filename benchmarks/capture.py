"""A captured training step beside the eager one, plain tensors by hand, and PyTorch's DTensor.

    python benchmarks/capture.py [--gloo] [--turns N]

An MLP and a GPT block with tensor parallelism over two ranks, and AdamW. By hand means local parts
of the weights and an all-reduce where a layer ends. By default on the fake process group, whose
collectives cost nothing; `--gloo` takes two processes. Times are the least of many turns, in which
the sides follow each other.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
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

    def __init__(self, parts: int, leave: Callable[[Any], Any]) -> None:
        super().__init__()
        self.parts, self.leave = parts, leave
        self.up = nn.Linear(WIDTH, 4 * WIDTH // parts)
        self.down = nn.Linear(4 * WIDTH // parts, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Any) -> Any:
        x = Enter.apply(x) if self.parts > 1 else x
        return self.leave(self.down(F.gelu(self.up(x)))) + self.bias


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, parts: int, leave: Callable[[Any], Any]) -> None:
        super().__init__()
        self.heads, self.parts, self.leave = HEADS // parts, parts, leave
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH // parts, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH // parts, WIDTH, bias=False)
        self.mlp = MLP(parts, leave)

    def forward(self, x: Any) -> Any:
        y = self.norm1(x)
        y = Enter.apply(y) if self.parts > 1 else y
        shape = (*y.shape[:2], -1, WIDTH // HEADS)
        q, k, v = (each(y).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        made = (q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5).softmax(-1) @ v
        x = x + self.leave(self.out(made.transpose(1, 2).reshape(*y.shape[:2], -1)))
        return x + self.mlp(self.norm2(x))


def step_of(model: nn.Module, x: Any, lib: Any) -> Callable[[], Any]:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step() -> Any:
        loss = model(x).square().mean()
        loss.backward()
        if lib is theirs:
            for each in parameters:
                if each.grad.placements != each.placements:  # type: ignore[union-attr, attr-defined]
                    each.grad = each.grad.redistribute(placements=each.placements)  # type: ignore
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def side(kind: Callable[..., nn.Module], x: Tensor, lib: Any, mesh: Any) -> Callable[[], Any]:
    """The step of a library; of plain tensors by hand if it is None."""
    torch.manual_seed(0)
    if lib is None:
        parts = [kind(WORLD, Leave.apply) for _ in range(LAYERS)]
        return step_of(nn.Sequential(*parts), x, lib)
    whole = [lib.Replicate()]
    leave = lambda y: y.redistribute(placements=whole)  # noqa: E731
    model = nn.Sequential(*[kind(1, leave) for _ in range(LAYERS)])
    for prefix, part in model.named_modules():
        for name, value in list(part.named_parameters(recurse=False)):
            found = [d for glob, d in PLAN.items() if fnmatchcase(f"{prefix}.{name}", glob)]
            places = [lib.Shard(found[0])] if found else whole
            put = lib.distribute_tensor(value.detach(), mesh, places, src_data_rank=None)
            part.register_parameter(name, nn.Parameter(put))
    return step_of(model, lib.distribute_tensor(x, mesh, whole, src_data_rank=None), lib)


def measure(turns: int) -> None:
    """Print the time of each side, and beside the one by hand."""
    torch.set_num_threads(1)
    mesh = ours.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    for name, kind in (("MLP", MLP), ("GPT", Block)):
        x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(1))
        captured = ours.capture(side(kind, x, ours, mesh))
        compiled = ours.capture(side(kind, x, ours, mesh), backend="inductor")
        sides = {
            "by hand": side(kind, x, None, mesh),
            "eager": side(kind, x, ours, mesh),
            "captured": captured,
            "captured, inductor": compiled,
            "PyTorch's DTensor": side(kind, x, theirs, mesh),
        }
        for step in sides.values():
            for _ in range(7):
                step()
        assert captured.stats()["replayed"] == compiled.stats()["replayed"] == 1
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(turns):
            for label, step in sides.items():
                start = time.perf_counter()
                step()
                best[label] = min(best[label], time.perf_counter() - start)
        if dist.get_rank() == 0:
            for label, seconds in best.items():
                ratio = seconds / best["by hand"]
                print(f"{name:4} {label:18} {seconds * 1e6:8.0f} us  {ratio:5.2f} of by hand")


def on_gloo(rank: int, port: int, turns: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    measure(turns)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--gloo", action="store_true", help="two processes")
    parser.add_argument("--turns", type=int, default=60)
    given = parser.parse_args()
    if given.gloo:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn(on_gloo, (port, given.turns), nprocs=WORLD)
        return
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=WORLD)
    measure(given.turns)


if __name__ == "__main__":
    main()
