"""All ranks in one process: the virtual mesh beside PyTorch's `LocalTensorMode`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed.tensor as theirs
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.bench import steps
from benchmarks.bench.sides import Side, fake_world, virtual_side
from benchmarks.bench.timing import Job, Row, Settings, built, interleaved, rows_of


def moved(side: Side) -> Callable[[], Any]:
    x = side.put(torch.randn(512, 512), 0)
    return lambda: side.redistribute(x, 1)


def whole_step(side: Side) -> Callable[[], Any]:
    step = steps.mlp(side)
    return lambda: list(step())


CASES = {"S(0) to S(1), 1 MiB": moved, "MLP step": whole_step}


def measured(settings: Settings, name: str, ranks: int) -> list[Row]:
    make = CASES[name]
    with fake_world(ranks):
        with LocalTensorMode(ranks):
            side = Side("torch", theirs, init_device_mesh("cpu", (ranks,)))
            call = built(make, side)

        def under_mode() -> Any:
            with LocalTensorMode(ranks):
                return call()

        calls = [built(make, Side("plain")), under_mode, built(make, virtual_side((ranks,)))]
        best = interleaved(calls, settings.seconds(3.0), turns=3)
    by_name = dict(zip(("plain", "torch", "ours"), best, strict=True))
    return rows_of("virtual", f"{name}, {ranks} ranks in one process", by_name)


def jobs() -> dict[str, Job]:
    return {
        f"{name}, {ranks} virtual ranks": partial(measured, name=name, ranks=ranks)
        for name in CASES
        for ranks in (8, 64)
    }
