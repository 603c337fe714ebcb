"""First calls: new layouts on meshes of 1 to 4 axes, and new batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.bench.sides import Side, check, fake_world, timed_sides
from benchmarks.bench.timing import Job, Row, Settings, built, interleaved, once, rows_of

MESHES = [(16,), (4, 4), (4, 2, 2), (2, 2, 2, 2)]


def cold_call(side: Side, name: str, size: int) -> Callable[[], Any]:
    x, y = side.put(torch.randn(size, 48), 0), side.put(torch.randn(48, 48))
    to_columns = [1] * (side.mesh.ndim if side.mesh else 0)
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: x + x,
        "mm": lambda: x @ y,
        "cat": lambda: torch.cat([x, x], 1),
        "redistribute": lambda: side.redistribute(x, *to_columns),
    }
    return calls[name]


def cold(settings: Settings, name: str, shape: tuple[int, ...]) -> list[Row]:
    """The best of some sizes, each met once."""
    check(partial(cold_call, name=name, size=48), len(shape))
    with fake_world():
        sides = timed_sides(shape)
        if name == "redistribute":
            sides = sides[1:]  # plain tensors have no layout
        least = {side.name: float("inf") for side in sides}
        for turn in range(settings.pick(2, 5)):
            for side in sides:
                call = cold_call(side, name, 80 + 16 * turn)
                least[side.name] = min(least[side.name], once(call))
    axes = "1 axis" if len(shape) == 1 else f"{len(shape)} axes"
    best = {side: {"": value} for side, value in least.items()}
    return rows_of("cold", f"first {name}, {axes}", best)


def cold_jobs(settings: Settings) -> dict[str, Job]:
    return {
        f"first {name}, {len(shape)} axes": partial(cold, name=name, shape=shape)
        for name in ("add", "mm", "cat", "redistribute")
        for shape in MESHES[: settings.pick(3, 4)]
    }


class Block:
    """Six operators; weights are sharded on the last axis of a mesh that has several."""

    def __init__(self, side: Side, axes: int) -> None:
        self.side = side
        before = [None] * (axes - 1)
        column, row = ((*before, 0), (*before, 1)) if axes > 1 else ((), ())
        self.up, self.down = (
            side.put(torch.randn(64, 32), *column), side.put(torch.randn(32, 64), *row)
        )  # fmt: skip
        self.bias = side.put(torch.randn(32))

    def batch(self, size: int) -> Any:
        return self.side.put(torch.randn(size, 32), 0)

    def __call__(self, x: Any) -> Any:
        hidden = F.gelu(F.linear(F.layer_norm(x, (32,), self.bias, self.bias), self.up))
        return torch.relu(F.linear(hidden, self.down) + x)


def _block_call(side: Side, axes: int) -> Callable[[], Any]:
    block = Block(side, axes)
    x = block.batch(32)
    return lambda: block(x)


def new_shapes(settings: Settings, shape: tuple[int, ...]) -> list[Row]:
    """The block warm, with a batch size at each call that was never met, and with these again."""
    axes = len(shape)
    check(partial(_block_call, axes=axes), axes)
    with fake_world():
        sides = timed_sides(shape)
        calls = [built(partial(_block_call, axes=axes), side) for side in sides]
        warm = interleaved(calls, settings.seconds(2.0))
        blocks = [Block(side, axes) for side in sides]
        new, again = [float("inf")] * len(sides), [float("inf")] * len(sides)
        sizes = count(4)
        for _ in range(settings.pick(2, 8)):
            row = [16 * next(sizes) for _ in range(8)]
            for at, block in enumerate(blocks):
                batches = [block.batch(size) for size in row]
                for least in (new, again):
                    for x in batches:
                        least[at] = min(least[at], once(lambda block=block, x=x: block(x)))
    name = f"6 operators, {axes} axes" if axes > 1 else "6 operators, 1 axis"
    names = [side.name for side in sides]
    first = {each: {"": value} for each, value in zip(names, new, strict=True)}
    second = {each: {"": value} for each, value in zip(names, again, strict=True)}
    rows = [
        *rows_of("new shape", f"{name}, warm", dict(zip(names, warm, strict=True))),
        *rows_of("new shape", f"{name}, new batch size at each call", first),
        *rows_of("new shape", f"{name}, these sizes again", second),
    ]
    for what, least in (("again", again), ("warm", [each[""] for each in warm])):
        plain, theirs, ours = (a / b for a, b in zip(new, least, strict=True))
        label = f"{name}, new batch size / {what}"
        rows.append(Row("new shape", label, "x", ours, theirs, plain, rated=False))
    return rows


def shape_jobs(settings: Settings) -> dict[str, Job]:
    return {
        f"new batch size, {len(shape)} axes": partial(new_shapes, shape=shape)
        for shape in MESHES[:3]
    }
