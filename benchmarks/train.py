"""Training steps of a GPT on gloo processes, beside PyTorch's own parallelisms and by hand.

    python benchmarks/train.py                  # 2 and 4 processes, writes benchmarks/train.md
    python benchmarks/train.py --world 2 --quick
    python benchmarks/train.py --world 2 --only "context parallel"

Each row is one way to train the same model: with Shardwise, with PyTorch (DTensor styles, FSDP2,
DDP, context_parallel), and by hand on plain tensors. The three take turns, the least time of each
counts, and their losses must agree. Where PyTorch raises NotImplementedError, the row says so. The
last rows count the processor time of `fully_shard` on a model so small that it is all overhead.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import train_by_hand as hand
from benchmarks.models.gpt import GPT, Size, loss_of

import shardwise as sw

PAGE = Path(__file__).parent / "train.md"
SIZE = Size(width=256, heads=4, layers=4, length=128, vocabulary=256)
TINY = Size(width=16, heads=4, layers=8, length=4, vocabulary=16)
BATCH = 8
Step = Callable[[], float]
WHERE = [
    "Where the time goes: a step of this model calls about 570 operators. On DTensors each costs",
    "some microseconds of Python more than on plain tensors (`make bench`). DDP, FSDP2 and the",
    "model by hand compute on plain tensors; PyTorch's styles do so between linear layers. What",
    "sharding adds is Python too: for each parameter a view to pack it, one to unpack it, a",
    "DTensor of the gathered value, and the hook that brings its gradient into its layout.",
    "Context parallel: no rank of Shardwise's holds the keys whole, they pass in a ring or heads",
    "are exchanged. By hand each rank gathers keys and values: fewer calls, more memory.",
]
PLAN: Any = {
    **{f"*.attention.{name}.*": {"tp": sw.Shard(0)} for name in ("queries", "keys", "values")},
    "*.attention.out.weight": {"tp": sw.Shard(1)},
    "*.mlp.up.*": {"tp": sw.Shard(0)},
    "*.mlp.down.weight": {"tp": sw.Shard(1)},
}


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step: ours, PyTorch's, by hand (None where there is none).

    `refusal` is what PyTorch raised instead of a step.
    """

    name: str
    ours: float
    torch: float | None
    hand: float | None
    refusal: str = ""

    def cells(self) -> list[str]:
        others = (self.torch, self.hand)
        times = ["" if other is None else f"{other:.2f}" for other in others]
        beside = ["" if other is None else f"{self.ours / other:.2f}" for other in others]
        if self.refusal:
            times[0] = self.refusal.partition(":")[0]
        return [self.name, f"{self.ours:.2f}", *times, *beside]

    def of_torch(self) -> float:
        return 0.0 if self.torch is None else self.ours / self.torch


def tokens(size: Size) -> torch.Tensor:
    return torch.arange(BATCH * (size.length + 1)).view(BATCH, -1) * 7 % size.vocabulary


def trainer(model: nn.Module, batch: Any, forward: Any = None, after: Any = None) -> Step:
    """A step of AdamW; `after` runs between backward and optimizer."""
    kinds: dict[type, list[Any]] = {}  # PyTorch's lists of DTensors may have no plain tensors
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.detach()), []).append(parameter)
    groups = [{"params": each} for each in kinds.values()]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=True)

    def step() -> float:
        loss = (forward or loss_of)(model, batch)
        loss.backward()
        if after is not None:
            after(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def made(size: Size) -> GPT:
    torch.manual_seed(0)
    return GPT(size)


def mine(size: Size) -> torch.Tensor:
    """This rank's rows of the batch."""
    return tokens(size).chunk(dist.get_world_size())[dist.get_rank()]


def mean_of_ranks(loss_step: Step) -> Step:
    """The loss of all rows, where each rank has that of its own."""

    def step() -> float:
        loss = torch.tensor(loss_step())
        dist.all_reduce(loss)
        return float(loss / dist.get_world_size())

    return step


# --- the ways to train ---------------------------------------------------------------------------


def our_mesh(name: str) -> Any:
    return sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def torch_mesh(name: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def tensor(sequence: bool) -> dict[str, Step]:
    def ours() -> Step:
        mesh = our_mesh("tp")
        model = sw.shard_module(made(SIZE), mesh, PLAN)
        layout: Any = {"tp": sw.Shard(1)} if sequence else {}
        whole = tokens(SIZE)
        ends = [sw.distribute_tensor(t, mesh, layout) for t in (whole[:, :-1], whole[:, 1:])]
        return trainer(model, ends)

    def theirs() -> Step:
        model = hand.with_styles(made(SIZE), torch_mesh("tp"), sequence)
        whole = tokens(SIZE)
        return trainer(model, (whole[:, :-1], whole[:, 1:]))

    def plain() -> Step:
        model = hand.tensor_parallel(made(SIZE), sequence)
        whole = tokens(SIZE)
        after = hand.reduce_replicated if sequence else None
        return trainer(model, (whole[:, :-1], whole[:, 1:]), after=after)

    return {"ours": ours(), "torch": theirs(), "hand": plain()}


def fully_sharded(size: Size = SIZE, by_hand: bool = True) -> dict[str, Step]:
    def ours() -> Step:
        mesh, model = our_mesh("dp"), made(size)
        for block in model.blocks:
            sw.fully_shard(block, mesh)
        sw.fully_shard(model, mesh)
        return trainer(model, sw.distribute_tensor(tokens(size), mesh, [sw.Shard(0)]))

    def theirs() -> Step:
        from torch.distributed.fsdp import fully_shard

        mesh, model = torch_mesh("dp"), made(size)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return mean_of_ranks(trainer(model, mine(size)))

    found = {"ours": ours(), "torch": theirs()}
    if by_hand:
        model = hand.FullySharded(made(size))
        found["hand"] = mean_of_ranks(trainer(model, mine(size)))
    return found


def data_parallel() -> dict[str, Step]:
    def ours() -> Step:
        mesh = our_mesh("dp")
        model = sw.replicate(made(SIZE), mesh)
        return trainer(model, sw.distribute_tensor(tokens(SIZE), mesh, [sw.Shard(0)]))

    theirs = nn.parallel.DistributedDataParallel(made(SIZE))
    return {
        "ours": ours(),
        "torch": mean_of_ranks(trainer(theirs, mine(SIZE))),
        "hand": mean_of_ranks(trainer(made(SIZE), mine(SIZE), after=hand.mean_gradients)),
    }


def context_parallel() -> dict[str, Step]:
    whole = tokens(SIZE)
    ends = [whole[:, :-1].contiguous(), whole[:, 1:].contiguous()]

    def ours() -> Step:
        mesh = our_mesh("cp")
        model = sw.replicate(made(SIZE), mesh)
        layout: Any = {"cp": sw.Shard(1, split=8)}
        return trainer(model, [sw.distribute_tensor(end, mesh, layout) for end in ends])

    def theirs() -> Step:
        from torch.distributed.tensor.experimental import context_parallel

        mesh, places = torch_mesh("cp"), torch.arange(SIZE.length)
        model = hand.with_places(made(SIZE), places)
        train = mean_of_ranks(trainer(model, ends, after=hand.mean_gradients))

        def step() -> float:
            buffers = [*ends, places]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
                return train()

        return step

    def plain() -> Step:
        model = hand.context_parallel(made(SIZE))
        parts = [hand.part(end) for end in ends]
        return mean_of_ranks(trainer(model, parts, after=hand.mean_gradients))

    return {"ours": ours(), "torch": theirs(), "hand": plain()}


WAYS: dict[str, Callable[[], dict[str, Step]]] = {
    "tensor parallel": lambda: tensor(False),
    "tensor parallel, sequence sharded": lambda: tensor(True),
    "fully sharded": fully_sharded,
    "data parallel": data_parallel,
    "context parallel": context_parallel,
}


# --- measuring -----------------------------------------------------------------------------------


def begin(steps: dict[str, Step]) -> str:
    """Three steps of each, whose losses must agree.

    Where PyTorch raises NotImplementedError, its step is left out, and the message returned.
    """
    losses, refusal = [], ""
    for name, step in list(steps.items()):
        try:
            losses.append([step() for _ in range(3)])
        except NotImplementedError as error:
            if name != "torch":
                raise
            refusal = f"NotImplementedError: {error}".partition("\n")[0]
            del steps[name]
    for each in losses[1:]:
        torch.testing.assert_close(losses[0], each, rtol=1e-4, atol=1e-4)
    return refusal


def least(steps: dict[str, Step], turns: int) -> dict[str, float]:
    """The least milliseconds of each, in turns."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(turns):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def host_cost(turns: int) -> list[Row]:
    """The processor time of this rank's main thread for a unit, on a model that is all overhead.

    What `fully_shard` adds is the difference to the same model on replicated DTensors, and for
    PyTorch to one on plain tensors.
    """
    mesh = our_mesh("dp")
    few = sw.distribute_tensor(tokens(TINY).chunk(dist.get_world_size())[0], mesh)
    steps = {
        **fully_sharded(TINY, by_hand=False),
        "whole": trainer(sw.replicate(made(TINY), mesh), few),
        "plain": trainer(made(TINY), mine(TINY)),
    }
    for step in steps.values():
        for _ in range(3):
            step()
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(turns):
        for name, step in steps.items():
            dist.barrier()
            start = time.thread_time()
            step()
            taken = 1e3 * (time.thread_time() - start) / (TINY.layers + 1)
            best[name] = min(best[name], taken)
    added = best["ours"] - best["whole"], best["torch"] - best["plain"]
    return [
        Row("processor time of a step per unit", best["ours"], best["torch"], best["plain"]),
        Row("of that, what sharding adds", *added, None),
    ]


def work(rank: int, world: int, store: str, turns: int, only: list[str], result: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    rows = []
    for name in only or WAYS:
        steps = WAYS[name]()
        refusal = begin(steps)
        took = least(steps, turns)
        rows.append(Row(name, took["ours"], took.get("torch"), took["hand"], refusal))
        if rank == 0:
            print(f"  {world} processes, {' | '.join(rows[-1].cells())}", flush=True)
    if not only:
        rows += host_cost(turns)
    if rank == 0:
        torch.save([astuple(row) for row in rows], result)
    dist.barrier()
    dist.destroy_process_group()


def measured(world: int, turns: int, only: list[str]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/rows"
        given = world, f"{folder}/store", turns, only, result
        multiprocessing.spawn(work, args=given, nprocs=world)  # type: ignore[no-untyped-call]
        return [Row(*row) for row in torch.load(result)]


def page(tables: dict[int, list[Row]], turns: int) -> str:
    lines = [
        "# Training steps beside PyTorch's own parallelisms",
        "",
        f"Written by `python benchmarks/train.py`: torch {torch.__version__}, gloo processes on "
        f"{os.cpu_count()} cores, one thread each. A GPT of width {SIZE.width} with {SIZE.layers} "
        f"blocks, {BATCH} rows of {SIZE.length} tokens, AdamW with foreach. Milliseconds of a "
        f"step, the least of {turns}, in turns. Rows that are slower than PyTorch come first.",
        "",
    ]
    titles = ["", "Shardwise", "PyTorch", "by hand", "of PyTorch's", "of by hand"]
    for world, rows in tables.items():
        lines += [f"## {world} processes", "", f"| {' | '.join(titles)} |", "|---" * 6 + "|"]
        ordered = sorted(rows, key=Row.of_torch, reverse=True)
        lines += [f"| {' | '.join(row.cells())} |" for row in ordered]
        refused = [f"PyTorch, {row.name}: {row.refusal}" for row in rows if row.refusal]
        lines += ["", *refused, *[""] * bool(refused)]
    return "\n".join([*lines, *WHERE, ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="few turns, and no page")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=[], help="some rows, no page")
    given = parser.parse_args()
    turns = 3 if given.quick else 12
    tables = {world: measured(world, turns, given.only) for world in given.world}
    text = page(tables, turns)
    print(text)
    if not given.quick and not given.only:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
