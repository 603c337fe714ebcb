"""Rows of the table, and how their times are taken."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from benchmarks.bench.sides import Make, Side, check, timed_sides


@dataclass(frozen=True)
class Row:
    """What one case costs each library, in one unit; None where a library has no such thing."""

    group: str
    name: str
    unit: str
    ours: float
    torch: float | None = None
    plain: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours beside PyTorch's; below 1 is cheaper."""
        return self.ours / self.torch if self.torch else None


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    quick: bool = False

    @property
    def seconds(self) -> float:
        """For each case, all libraries together."""
        return 0.4 if self.quick else 3.0

    def pick(self, quick: int, full: int) -> int:
        return quick if self.quick else full


Job = Callable[[Settings], list[Row]]


def once(call: Callable[[], Any], number: int = 1) -> float:
    """Microseconds per call."""
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number * 1e6


def parts(step: Callable[[], Any]) -> dict[str, float]:
    """Microseconds up to each `yield` of a step, and of the whole."""
    taken: dict[str, float] = {}
    begin = start = time.perf_counter()
    for name in step():
        now = time.perf_counter()
        taken[name] = (now - start) * 1e6
        start = time.perf_counter()
    taken["whole"] = (time.perf_counter() - begin) * 1e6
    return taken


def interleaved(
    calls: Sequence[Callable[[], Any]], seconds: float, number: int = 1
) -> list[dict[str, float]]:
    """The least time of each call, taken in turns: other work on the machine is left out.

    Each turn makes `number` calls. A generator is a step in parts, and each part has its minimum.
    """
    best: list[dict[str, float]] = [{} for _ in calls]
    in_parts = inspect.isgeneratorfunction(calls[0])
    for call in calls:
        for _ in range(3):
            parts(call) if in_parts else once(call, number)
    gc.collect()
    gc.disable()
    end = time.perf_counter() + seconds
    turns = 0
    while turns < 5 or time.perf_counter() < end:
        for call, least in zip(calls, best, strict=True):
            taken = parts(call) if in_parts else {"": once(call, number)}
            for name, value in taken.items():
                least[name] = min(least.get(name, inf), value)
        turns += 1
    gc.enable()
    return best


def timed(
    group: str,
    name: str,
    make: Make,
    shape: tuple[int, ...] | None = None,
    number: int = 1,
) -> Job:
    """A job that compares the values of a case and then times it on the three libraries."""

    def job(settings: Settings) -> list[Row]:
        sides = timed_sides(shape) if shape else timed_sides()
        check(make, tuple(sides[-1].mesh.shape))
        calls = [made(make, side) for side in sides]
        plain, theirs, ours = interleaved(calls, settings.seconds, number)
        return [
            Row(group, f"{name}: {part}" if part else name, "us", *values)
            for part, values in (
                (part, (ours[part], theirs[part], plain[part])) for part in ours
            )
        ]  # fmt: skip

    return job


def made(make: Make, side: Side) -> Callable[[], Any]:
    import torch

    torch.manual_seed(0)
    return make(side)
