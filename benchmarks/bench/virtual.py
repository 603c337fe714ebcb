"""All ranks in one process: the virtual mesh beside PyTorch's `LocalTensorMode`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed.tensor as theirs
from benchmarks.bench import steps
from benchmarks.bench.sides import Side, fake_world, virtual_side
from benchmarks.bench.timing import Job, Row, Settings, built, interleaved, rows_of
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh


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
            call = built(make, Side("torch", theirs, init_device_mesh("cpu", (ranks,))))

        def under_mode() -> Any:
            with LocalTensorMode(ranks):
                return call()

        calls = {"ours": built(make, virtual_side((ranks,))), "torch": under_mode}
        if make is not moved:
            calls["plain"] = built(make, Side("plain"))
        turns = settings.pick(1, 5)
        best = interleaved(list(calls.values()), settings.seconds(3.0), turns=turns, warm=1)
    return rows_of(
        "virtual", f"{name}, {ranks} ranks in one process", dict(zip(calls, best, strict=True))
    )


def jobs(settings: Settings) -> dict[str, Job]:
    return {
        f"{name}, {ranks} virtual ranks": partial(measured, name=name, ranks=ranks)
        for name in CASES
        for ranks in (8, 64)[: settings.pick(1, 2)]
    }
