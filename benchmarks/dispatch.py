"""Time per call of common operators: ours, PyTorch's own DTensor and plain tensors, side by side.

Everything runs in one process on the `fake` process group, so only the cost of a call is measured.
The three are interleaved in many short turns and the minimum is taken, so that other work on the
machine is left out. Run with `make bench`.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as ours

WORLD = 16


def warm_cases(lib: Any, mesh: Any) -> dict[str, Callable[[], Any]]:
    """25 operators on small tensors, in layouts in which nothing has to move."""

    def put(value: torch.Tensor, dim: int | None) -> Any:
        if lib is None:
            return value
        place = lib.Replicate() if dim is None else lib.Shard(dim)
        return lib.distribute_tensor(value, mesh, [place])

    torch.manual_seed(0)
    x, y = put(torch.randn(32, 16), 0), put(torch.randn(32, 16), 0)
    w, b = put(torch.randn(16, 16), None), put(torch.randn(16), None)
    z = put(torch.randn(32, 16), 0)
    target = put(torch.randint(0, 16, (32,)), 0)
    p = put(torch.randn(32, 16), 0).requires_grad_()
    cube = put(torch.randn(32, 4, 4), 0)
    return {
        "add": lambda: x + y,
        "mul": lambda: x * y,
        "mul scalar": lambda: x * 2.0,
        "add_ ": lambda: z.add_(y),
        "relu": lambda: torch.relu(x),
        "gelu": lambda: F.gelu(x),
        "exp": lambda: x.exp(),
        "where": lambda: torch.where(x > 0, x, y),
        "mm": lambda: x @ w,
        "addmm": lambda: torch.addmm(b, x, w),
        "linear": lambda: F.linear(x, w, b),
        "bmm": lambda: torch.bmm(cube, cube),
        "sum": lambda: x.sum(),
        "sum dim": lambda: x.sum(1),
        "mean dim": lambda: x.mean(-1),
        "softmax": lambda: x.softmax(-1),
        "layer_norm": lambda: F.layer_norm(x, (16,), b, b),
        "t": lambda: x.t(),
        "view": lambda: x.view(32, 4, 4),
        "transpose": lambda: cube.transpose(1, 2),
        "slice": lambda: x[:, 2:8],
        "cat": lambda: torch.cat([x, y], 1),
        "split": lambda: x.split(8, 1),
        "clone": lambda: x.clone(),
        "add with grad": lambda: p + y,
        "zeros_like": lambda: torch.zeros_like(x),
        "nll": lambda: F.nll_loss(x, target, reduction="sum"),
    }


def best(call: Callable[[], Any], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number * 1e6


def warm(repeats: int, number: int) -> float:
    mesh = init_device_mesh("cpu", (WORLD,))
    columns = {
        "plain": warm_cases(None, None),
        "torch": warm_cases(theirs, mesh),
        "ours": warm_cases(ours, mesh),
    }
    times: dict[str, dict[str, float]] = {name: {} for name in columns}
    print(f"{'operator':16}{'plain us':>10}{'torch us':>10}{'ours us':>10}{'ours/torch':>12}")
    ratios = []
    for case in columns["plain"]:
        for name, cases in columns.items():
            best(cases[case], 20)
            times[name][case] = math.inf
        gc.disable()
        for _ in range(repeats):
            for name, cases in columns.items():
                times[name][case] = min(times[name][case], best(cases[case], number))
        gc.enable()
        row = [times[name][case] for name in columns]
        ratios.append(row[2] / row[1])
        print(f"{case:16}{row[0]:10.1f}{row[1]:10.1f}{row[2]:10.1f}{ratios[-1]:12.2f}")
        sys.stdout.flush()
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geometric mean of ours/torch over {len(ratios)} operators: {mean:.2f}")
    return mean


def cold(turns: int = 3) -> None:
    """Time of a first call on meshes of 1 to 4 axes: the best of some sizes, each met once."""
    shapes = [(16,), (4, 4), (4, 2, 2), (2, 2, 2, 2)]
    print(f"\n{'first call, ms':16}" + "".join(f"{len(shape)} axes".rjust(22) for shape in shapes))
    rows: dict[str, list[str]] = {"add": [], "mm": [], "cat": []}
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape)
        for name in rows:
            cells = []
            for lib in (ours, theirs):
                calls = [_cold_case(lib, mesh, name, 64 + 16 * turn) for turn in range(turns)]
                cells.append(min(best(call, 1) for call in calls) / 1e3)
            rows[name].append(f"ours {cells[0]:.2f} torch {cells[1]:.1f}".rjust(22))
    for name, cells in rows.items():
        print(f"{name:16}" + "".join(cells))


def _cold_case(lib: Any, mesh: Any, name: str, size: int) -> Callable[[], Any]:
    axes = mesh.ndim
    places = [lib.Shard(0)] + [lib.Replicate()] * (axes - 1)
    other = [lib.Replicate()] * axes
    x = lib.distribute_tensor(torch.randn(size, size), mesh, places, src_data_rank=None)
    y = lib.distribute_tensor(torch.randn(size, size), mesh, other, src_data_rank=None)
    if name == "add":
        return lambda: x + x
    if name == "mm":
        return lambda: x @ y
    return lambda: torch.cat([x, x], 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=150)
    parser.add_argument("--number", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: a second thread only adds noise
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    warm(options.repeats, options.number)
    cold()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
