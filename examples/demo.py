"""Train a small network on a (dp=2, tp=2) mesh, and say what was held where and what was moved.

`python examples/demo.py` is all four ranks in one process; `torchrun --nproc-per-node 4
examples/demo.py` is four processes, and prints the same losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.layout.mesh import VirtualMesh

TOKENS, WIDTH, HIDDEN, CLASSES, BATCH, LENGTH = 60, 16, 36, 5, 31, 9
STEPS, SHOWN = 60, 10


class Net(nn.Module):
    """Which kind of token is most frequent? Embedding, norm, MLP, mean over the text, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


# What the tp axis does to each parameter; nothing is said of dp, where parameters are replicated.
OVER_TP = {
    "embed.weight": Shard(0),  # each rank holds half of the vocabulary
    "up.weight": Shard(0),  # columns, then rows: nothing moves between the two
    "up.bias": Shard(0),
    "down.weight": Shard(1),
}


def shard(name: str, module: nn.Module, mesh: sw.DeviceMesh) -> None:
    for key, value in list(module.named_parameters(recurse=False)):
        place = OVER_TP.get(f"{name}.{key}", Replicate())
        sharded = sw.distribute_tensor(value.data, mesh, [Replicate(), place])
        module.register_parameter(key, nn.Parameter(sharded))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(7)
    made = []
    for _ in range(STEPS):
        tokens = torch.randint(TOKENS, (BATCH, LENGTH), generator=draw)
        labels = F.one_hot(tokens % CLASSES, CLASSES).sum(1).argmax(1)
        labels[::8] = -100  # ignored by the loss, and not equally many on each half of the batch
        made.append((tokens, labels))
    return made


def train(model: nn.Module, put: Callable[..., Any], after: Callable[..., None]) -> None:
    """The program: it does not know whether it runs on one device or on a mesh."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step, (tokens, labels) in enumerate(batches()):
        with sw.CommDebugMode() as comm:
            loss = F.cross_entropy(model(put(tokens)), put(labels))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        after(step, loss.item(), comm)


def progress(title: str, done: int, loss: float) -> None:
    """One line that is drawn over itself; without a terminal, once at the end."""
    if not sw.is_first_rank() or not (sys.stdout.isatty() or done == STEPS):
        return
    width = 30 * done // STEPS
    start, end = "\r" if sys.stdout.isatty() else "", "\n" if done == STEPS else ""
    bar = "#" * width + "." * (30 - width)
    sys.stdout.write(f"{start}{title:14} [{bar}] {done:3}/{STEPS}  loss {loss:.4f}{end}")
    sys.stdout.flush()


def run(title: str, model: nn.Module, put: Callable[..., Any]) -> tuple[list[float], Any]:
    losses: list[float] = []
    last: list[Any] = []

    def after(step: int, loss: float, comm: Any) -> None:
        losses.append(loss)
        last[:] = [comm]
        progress(title, step + 1, loss)

    train(model, put, after)
    return losses, last[0]


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    say = print if sw.is_first_rank() else lambda *_: None
    where = "one process" if isinstance(mesh, VirtualMesh) else "four processes"
    say(f"mesh (dp=2, tp=2) in {where}\n")
    torch.manual_seed(0)
    alone = Net()
    torch.manual_seed(0)
    model = sw.distribute_module(Net(), mesh, shard)

    say("who holds what (numbers in the cells are ranks):\n")
    for name, parameter in model.named_parameters():
        dp, tp = parameter.placements
        say(f"{name} {list(parameter.shape)}  dp: {dp}, tp: {tp}\n{sw.picture(parameter)}\n")

    def over_dp(value: torch.Tensor) -> sw.DTensor:
        return sw.distribute_tensor(value, mesh, [Shard(0), Replicate()], src_data_rank=None)

    single, _ = run("single device", alone, lambda value: value)
    meshed, comm = run("on the mesh", model, over_dp)

    say(f"\n{'step':>4}  {'single device':>13}  {'on the mesh':>11}  {'difference':>10}")
    for step in sorted({*range(0, STEPS, SHOWN), STEPS - 1}):
        a, b = single[step], meshed[step]
        say(f"{step:4}  {a:13.4f}  {b:11.4f}  {abs(a - b):10.1e}")
    say(f"\ncommunication of the last step:\n{comm}")
    if max(abs(a - b) for a, b in zip(single, meshed, strict=True)) > 1e-4:
        raise SystemExit("the losses differ")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
