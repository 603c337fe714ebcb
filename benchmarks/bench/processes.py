"""On gloo processes, where collectives take their time: redistribution, a step, lockstep."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from math import prod
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from benchmarks.bench import steps
from benchmarks.bench.moves import named, placements
from benchmarks.bench.sides import Side, timed_sides
from benchmarks.bench.timing import Job, Row, Settings, built, interleaved, rows_of

import shardwise as sw

WORLD, SECONDS = 4, 900
PAIRS = [
    ((2, 2), ("S0", "S1"), ("S1", "S0"), (2048, 2048)),
    ((2, 2), ("S0", "S0"), ("R", "S0"), (2048, 2048)),
    ((4,), ("S0",), ("S1",), (2048, 2048)),
    ((4,), ("P",), ("S0",), (2048, 2048)),
    ((4,), ("S0",), ("S1",), (2051, 2049)),
]


def least(calls: Sequence[Callable[[], Any]], turns: int) -> list[float]:
    """The least time of each; all ranks begin together and make as many turns."""

    def together(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (dist.barrier(), call(), dist.barrier())

    taken = interleaved(
        [together(call) for call in calls], 0.0, turns=turns, warm=1, clock=perf_counter
    )
    return [each[""] for each in taken]


def pairs(settings: Settings) -> list[Row]:
    rows = []
    for shape, src, dst, size in PAIRS:
        ours, peer = timed_sides(shape)[:0:-1]
        # Made in this layout, not moved into it: neither library has anything cached.
        whole = torch.arange(prod(size), dtype=torch.float32).view(size)
        x = sw.distribute_tensor(whole, ours.mesh, placements(sw, src), src_data_rank=None)
        y = theirs.DTensor.from_local(
            x.to_local(), peer.mesh, placements(theirs, src), run_check=False,
            shape=torch.Size(size), stride=(size[1], 1),
        )  # fmt: skip
        goals = placements(sw, dst), placements(theirs, dst)
        calls = [
            lambda x=x, goal=goals[0]: x.redistribute(placements=goal),
            lambda y=y, goal=goals[1]: y.redistribute(placements=goal),
        ]
        torch.testing.assert_close(calls[0]().to_local(), calls[1]().to_local())
        name = f"{named(src)} to {named(dst)} of {size}, {WORLD} gloo processes"
        rows.append(Row("processes", name, "us", *least(calls, settings.pick(3, 10))))
    return rows


def batch(settings: Settings) -> list[Row]:
    mesh = sw.init_device_mesh("cpu", (WORLD,))
    rng = random.Random(0)
    sizes = [(rng.choice([1, 16, 64, 256]), rng.choice([8, 64, 128])) for _ in range(200)]
    grads = [sw.DTensor.from_local(torch.ones(n), mesh, [sw.Partial()]) for n in sizes]
    peers = theirs.init_device_mesh("cpu", (WORLD,))
    others = [theirs.DTensor.from_local(torch.ones(n), peers, [theirs.Partial()]) for n in sizes]
    times = least(
        [
            lambda: sw.redistribute_all(grads, [sw.Shard(0)]),
            lambda: [each.redistribute(placements=[theirs.Shard(0)]) for each in others],
        ],
        settings.pick(2, 8),
    )
    name = f"200 gradients P to S0, {WORLD} gloo processes (ours in one batch)"
    return [Row("processes", name, "us", *times)]


def training(settings: Settings) -> list[Row]:
    """The MLP step; plain is one process with the whole batch."""
    sides = timed_sides((WORLD,))
    calls = [_together(built(steps.mlp, side)) for side in sides]
    best = interleaved(calls, 0.0, turns=settings.pick(10, 60), clock=perf_counter)
    by_name = {side.name: {"": each["whole"]} for side, each in zip(sides, best, strict=True)}
    return rows_of("processes", f"MLP step, {WORLD} gloo processes", by_name)


def _together(step: Callable[[], Any]) -> Callable[[], Any]:
    def begun_together() -> Any:
        dist.barrier()
        yield "barrier"
        yield from step()

    return begun_together


def lockstep(settings: Settings) -> list[Row]:
    mesh = sw.init_device_mesh("cpu", (WORLD,))
    step = built(steps.mlp, Side("ours", sw, mesh))

    def under(context: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            with context():
                for _ in range(5):
                    list(step())

        return run

    without, compared = least([under(nullcontext), under(sw.lockstep)], settings.pick(3, 12))
    return [Row("processes", "MLP step under lockstep() / without", "x", compared / without)]


def _rank(rank: int, store: str, pipe: Any, settings: Settings) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    rows = [row for part in (pairs, batch, training, lockstep) for row in part(settings)]
    if rank == 0:
        pipe.send(rows)
    dist.barrier()
    dist.destroy_process_group()


def measured(settings: Settings) -> list[Row]:
    """What rank 0 has measured."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        given = f"{folder}/store", there, settings
        ranks = [spawn.Process(target=_rank, args=(rank, *given)) for rank in range(WORLD)]
        for each in ranks:
            each.start()
        there.close()
        try:
            if not here.poll(SECONDS):
                raise TimeoutError(f"no answer from rank 0 in {SECONDS} s")
            return here.recv()
        finally:
            for each in ranks:
                each.join(10)
                each.kill()


def jobs(settings: Settings) -> dict[str, Job]:
    return {f"{WORLD} gloo processes": measured}
