"""Rows of the table, and how their times are taken."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from benchmarks.bench.sides import WORLD, Make, Side, check, fake_world, timed_sides


@dataclass(frozen=True)
class Row:
    """What one case costs each library; None where it was not measured.

    `note` says why PyTorch's time is missing. Rows that are not `rated` have no ratio.
    """

    group: str
    name: str
    unit: str
    ours: float
    torch: float | None = None
    plain: float | None = None
    note: str = ""
    rated: bool = True

    @property
    def ratio(self) -> float | None:
        """Ours beside PyTorch's: below 1 is cheaper."""
        return self.ours / self.torch if self.rated and self.torch else None


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    quick: bool = False

    def pick(self, quick: int, full: int) -> int:
        return quick if self.quick else full

    def seconds(self, full: float) -> float:
        return full / 10 if self.quick else full


Job = Callable[[Settings], list[Row]]
Clock = Callable[[], float]


def once(call: Callable[[], Any], number: int = 1, clock: Clock = time.process_time) -> float:
    """Microseconds per call, of the processor unless another clock is given."""
    start = clock()
    for _ in range(number):
        call()
    return (clock() - start) / number * 1e6


def parts(step: Callable[[], Any], clock: Clock = time.process_time) -> dict[str, float]:
    """Microseconds up to each `yield` of a step, and of the whole."""
    taken: dict[str, float] = {}
    begin = start = clock()
    for name in step():
        now = clock()
        taken[name] = (now - start) * 1e6
        start = now
    taken["whole"] = (clock() - begin) * 1e6
    return taken


def interleaved(
    calls: Sequence[Callable[[], Any]],
    seconds: float,
    number: int = 1,
    turns: int = 10,
    warm: int = 3,
    clock: Clock = time.process_time,
) -> list[dict[str, float]]:
    """The least time of each call, taken in turns, so that other work on the machine is left out.

    Each turn makes `number` calls; there are at least `turns`, after `warm` that do not count. A
    generator is a step in parts, and each part has a minimum of its own.
    """
    best: list[dict[str, float]] = [{} for _ in calls]
    in_parts = inspect.isgeneratorfunction(calls[0])
    for call in calls:
        for _ in range(warm):
            parts(call) if in_parts else once(call, number)
    gc.collect()
    gc.disable()
    end = time.perf_counter() + seconds
    done = 0
    while done < turns or time.perf_counter() < end:
        for call, least in zip(calls, best, strict=True):
            taken = parts(call, clock) if in_parts else {"": once(call, number, clock)}
            for name, value in taken.items():
                least[name] = min(least.get(name, inf), value)
        done += 1
    gc.enable()
    return best


def built(make: Make, side: Side) -> Callable[[], Any]:
    """The call of a case, from the same random numbers on each library."""
    torch.manual_seed(0)
    return make(side)


def timed(
    group: str,
    name: str,
    make: Make,
    shape: tuple[int, ...] = (WORLD,),
    number: int = 1,
    seconds: float = 2.0,
    plain: bool = True,
) -> Job:
    """A job that compares the values of a case and then times it on the three libraries."""

    def job(settings: Settings) -> list[Row]:
        error = check(make, len(shape))
        left_out = {"torch": bool(error), "plain": not plain}
        with fake_world():
            sides = [each for each in timed_sides(shape) if not left_out.get(each.name)]
            calls = [built(make, side) for side in sides]
            best = interleaved(calls, settings.seconds(seconds), number)
        return rows_of(group, name, dict(zip((s.name for s in sides), best, strict=True)), error)

    return job


def rows_of(group: str, name: str, best: dict[str, dict[str, float]], error: str = "") -> list[Row]:
    """A row for each part of a case; `best` has the times by library."""
    theirs, plain = best.get("torch", {}), best.get("plain", {})
    return [
        Row(group, f"{name}: {part}" if part else name, "us", value, theirs.get(part),
            plain.get(part), error)
        for part, value in best["ours"].items()
    ]  # fmt: skip
