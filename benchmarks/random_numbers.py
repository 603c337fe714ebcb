"""What random numbers cost: `torch.rand` and its like, and counter mode on one rank and on four.

Times are of the processor, the best of several, of one core; "a rank of 4" is the slowest of the
four ranks, each timed alone. The last lines are calls on four gloo processes with and without the
comparison of the ranks' states. (The file is not called random.py: Python would take it for its own
module.)
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.layout.mesh import VirtualMesh
from shardwise.layout.spec import DTensorSpec, TensorMeta
from shardwise.layout.split_dims import held_of
from shardwise.random.counter import bernoulli, exponential
from shardwise.random.tiles import Draw, draw_held, new_key, tile_sides

SHAPES = [(1 << 22,), (2048, 2048), (8, 512, 1024), (64, 64, 32, 32)]
FILLS: dict[str, tuple[Callable[[torch.Tensor], Any], Draw]] = {
    "uniform_": (lambda t: t.uniform_(), lambda t, g: t.uniform_(generator=g)),
    "normal_": (lambda t: t.normal_(), lambda t, g: t.normal_(generator=g)),
    "bernoulli_": (lambda t: t.bernoulli_(0.1), bernoulli(0.1)),
    "exponential_": (lambda t: t.exponential_(), exponential(1.0)),
}


def milliseconds(run: Callable[[], Any], times: int = 9) -> float:
    run()
    best = float("inf")
    for _ in range(times):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return 1e3 * best


def of_a_rank(shape: tuple[int, ...], dim: int, ranks: int, draw: Draw) -> float:
    """The slowest of `ranks` ranks that shard `dim`."""
    stride = tuple(torch.empty(shape, device="meta").stride())
    mesh = VirtualMesh("cpu", list(range(ranks)))
    spec = DTensorSpec(mesh, [Shard(dim)], TensorMeta(shape, stride, torch.float32))
    key = new_key()

    def run(coord: tuple[int, ...]) -> Any:
        local = torch.empty(spec.local_shape(coord))
        return draw_held(local, held_of(spec, coord), shape, key, draw)

    return max(milliseconds(lambda coord=coord: run(coord)) for coord in spec.slots)


def fills() -> None:
    heads = f"{'':14} {'shape':20} {'tile':18} {'PyTorch':>9} {'counter':>9}"
    print(f"{heads}  ratio  a rank of 4, by dim")
    for name, (plain, draw) in FILLS.items():
        for shape in SHAPES if name == "uniform_" else SHAPES[1:2]:
            base = milliseconds(lambda shape=shape, plain=plain: plain(torch.empty(shape)))
            one = of_a_rank(shape, 0, 1, draw)
            four = [of_a_rank(shape, dim, 4, draw) for dim in range(len(shape))]
            shares = "  ".join(f"{each:.1f} ({each / one:.2f})" for each in four)
            print(
                f"{name:14} {shape!s:20} {tile_sides(shape)!s:18} {base:6.1f} ms {one:6.1f} ms"
                f"  {base / one:5.2f}  {shares}"
            )


def _rank(rank: int, path: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = sw.init_device_mesh("cpu", (world,))
    x = sw.distribute_tensor(torch.ones(64, 64), mesh, [Replicate()])
    for check in (True, False):
        with sw.random.mode("counter", check=check):
            each = milliseconds(lambda: [x.uniform_() for _ in range(50)], 5) / 50
        if rank == 0:
            print(
                f"uniform_ of [64, 64], {world} gloo processes, check={check}: {1e3 * each:.0f} us"
            )
    dist.destroy_process_group()


def checks(world: int = 4) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "store")
        ranks = [context.Process(target=_rank, args=(r, path, world)) for r in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    fills()
    checks()
