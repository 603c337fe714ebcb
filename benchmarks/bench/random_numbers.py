"""Random numbers: each rank draws the tensor and keeps its part, or in counter mode its part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.bench.sides import Side, fake_world, timed_sides
from benchmarks.bench.timing import Job, Row, Settings, interleaved

import shardwise as sw

SIZE = (2048, 2048)


def fill(side: Side, name: str) -> Callable[[], Any]:
    given = {"bernoulli_": (0.1,)}.get(name, ())
    x = side.put(torch.empty(SIZE), 0)
    return lambda: getattr(x, name)(*given)


def measured(settings: Settings, name: str, ranks: int) -> list[Row]:
    """Exact mode gives the numbers of one device, counter mode others that fit every layout."""
    with fake_world(ranks):
        plain, theirs, ours = (fill(side, name) for side in timed_sides((ranks,)))

        def counter() -> Any:
            with sw.random.mode("counter", check=False):
                return ours()

        def exact() -> Any:
            with sw.random.mode("exact", check=False):
                return ours()

        calls = [plain, theirs, exact, counter]
        times = [each[""] for each in interleaved(calls, settings.seconds(2.0))]
    where = f"{name} of 4M numbers, {'1 rank' if ranks == 1 else f'a rank of {ranks}'}"
    note = "(not the numbers of one device)" if ranks > 1 else ""
    return [
        Row("random", f"{where}, {mode} mode", "us", times[at], times[1], times[0], note)
        for at, mode in ((2, "exact"), (3, "counter"))
    ]


def jobs(settings: Settings) -> dict[str, Job]:
    return {
        f"{name} on {ranks} ranks": partial(measured, name=name, ranks=ranks)
        for name in ("uniform_", "normal_", "bernoulli_")[: settings.pick(1, 3)]
        for ranks in (1, 4)
    }
