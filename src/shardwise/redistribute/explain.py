"""`explain_redistribute`: what a redistribution would do, as a value that prints well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import buffer_size
from ..errors import LayoutError
from ..geometry import all_coords
from ..placement import Placement
from ..spec import DTensorSpec
from .layout import Layout
from .portions import held_beside, portions, sizes
from .repeated import parts_between, steps_between
from .step import Step

__all__ = ["Explanation", "StepCost", "explain_redistribute"]


@dataclass(frozen=True)
class StepCost:
    """One step: its kind, the names of its axes, and by rank the bytes that it moves and holds."""

    kind: str
    axes: tuple[str, ...]
    sent: dict[int, int]
    received: dict[int, int]
    held: dict[int, int]


@dataclass(frozen=True)
class Explanation:
    """The steps of a redistribution with the bytes that each rank sends, receives and holds.

    `held` counts the source, the target, what is in between, and the buffer of a collective.
    """

    src: DTensorSpec
    dst: DTensorSpec
    steps: tuple[StepCost, ...]

    @property
    def received(self) -> int:
        """The bytes that the rank that receives most receives."""
        return _most([step.received for step in self.steps])

    @property
    def sent(self) -> int:
        """The bytes that the rank that sends most sends."""
        return _most([step.sent for step in self.steps])

    @property
    def held(self) -> int:
        """The most bytes that a rank holds at any time."""
        return max((max(step.held.values()) for step in self.steps), default=0)

    def __str__(self) -> str:
        rows = [("step", "axes", "sent", "received", "held")]
        for step in self.steps:
            sent, received, held = map(_range, (step.sent, step.received, step.held))
            rows.append((step.kind, ",".join(step.axes), sent, received, held))
        if not self.steps:
            rows.append(("nothing", "", "0", "0", "0"))
        wide = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(
                [f"{row[0]:<{wide[0]}}", f"{row[1]:<{wide[1]}}"]
                + [f"{row[column]:>{wide[column]}}" for column in (2, 3, 4)]
            ).rstrip()
            for row in rows
        ]
        same = self.src.topology is self.dst.topology
        to = f"{self.dst.layout_text()}" + ("" if same else f" on {self.dst.topology}")
        return "\n".join([f"{self.src} -> {to}, bytes per rank", *lines])

    __repr__ = __str__


def _most(steps: list[dict[int, int]]) -> int:
    total: dict[int, int] = {}
    for each in steps:
        for rank, nbytes in each.items():
            total[rank] = total.get(rank, 0) + nbytes
    return max(total.values(), default=0)


def _range(by_rank: dict[int, int]) -> str:
    least, most = min(by_rank.values()), max(by_rank.values())
    return f"{most:,}" if least == most else f"{least:,}..{most:,}"


def explain_redistribute(
    src: Any, dst: Any = None, placements: Sequence[Placement] | None = None
) -> Explanation:
    """What going from one layout to another would do; `src` and `dst` are specs, or DTensors.

    Instead of `dst` there may be placements, as in `x.redistribute`, and a mesh before them.
    Nothing is moved, and neither tensors nor processes are needed.

    >>> import torch, shardwise
    >>> from shardwise import DTensorSpec, Partial, Replicate, Shard, TensorMeta
    >>> mesh = shardwise.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    >>> meta = TensorMeta((64, 64), (64, 1), torch.float32)
    >>> pending = DTensorSpec(mesh, [Partial(), Shard(0)], meta)
    >>> explain_redistribute(pending, DTensorSpec(mesh, [Replicate(), Shard(1)], meta))
    float32[64, 64] [P(sum), S(0)] on (dp=2, tp=4) -> [R, S(1)], bytes per rank
    step        axes   sent  received    held
    all_reduce  dp    4,096     4,096   8,192
    exchange    tp    3,072     3,072  20,480
    """
    a = _spec_of("src", src)
    if placements is None and isinstance(dst, (list, tuple)):
        dst, placements = None, dst
    if placements is None:
        b = _spec_of("dst", dst)
    else:
        b = DTensorSpec(a.topology if dst is None else dst, placements, a.meta)
    if a is b:
        return Explanation(a, b, ())
    if parts := parts_between(a, b):
        plans = [steps_between(part.of_spec(a), part.of_spec(b)) for part in parts]
        return Explanation(a, b, tuple(_costs_of_parts(a, b, plans)))
    return Explanation(a, b, tuple(_costs(steps_between(a, b), a.dtype.itemsize)))


def _spec_of(name: str, value: Any) -> DTensorSpec:
    found = value if isinstance(value, DTensorSpec) else getattr(value, "_spec", None)
    if not isinstance(found, DTensorSpec):
        raise LayoutError(
            f"explain_redistribute: {name} is {value!r}, which has no layout. Give a DTensor or a "
            "DTensorSpec; placements may say where it goes: explain_redistribute(x, [Replicate()])."
        )
    return found


def _costs(steps: tuple[Step, ...], itemsize: int) -> list[StepCost]:
    costs = []
    for step, held in zip(steps, _held(steps, itemsize), strict=True):
        before, after = step.src.topology, step.dst.topology
        names = tuple(before.names[axis] for axis in step.axes)
        sent = {before.rank_of(c): step.sent(c) * itemsize for c in all_coords(before.shape)}
        got = {after.rank_of(c): step.received(c) * itemsize for c in all_coords(after.shape)}
        everywhere = [{rank: each.get(rank, 0) for rank in held} for each in (sent, got)]
        costs.append(StepCost(step.kind, names, everywhere[0], everywhere[1], held))
    return costs


def _costs_of_parts(
    src: DTensorSpec, dst: DTensorSpec, plans: Sequence[tuple[Step, ...]]
) -> list[StepCost]:
    """What steps cost that are taken for one part of a tensor after another: those that are alike
    are told as one."""
    itemsize = src.dtype.itemsize
    layouts = [Layout.of(spec.fine or spec) for spec in (src, dst)]
    always = _sum(*[sizes(layout, itemsize) for layout in layouts])
    found: dict[tuple[str, tuple[str, ...]], StepCost] = {}
    for steps in plans:
        beside = held_beside(steps, itemsize, buffer_size())
        for cost, extra in zip(_costs(steps, itemsize), beside, strict=True):
            key = cost.kind, cost.axes
            held = _sum(always, extra)
            if key in found:
                old = found[key]
                sent, received = _sum(old.sent, cost.sent), _sum(old.received, cost.received)
                held = {rank: max(n, old.held[rank]) for rank, n in held.items()}
            else:
                sent, received = cost.sent, cost.received
            found[key] = StepCost(*key, sent, received, held)
    return list(found.values())


def _sum(*by_rank: dict[int, int]) -> dict[int, int]:
    ranks = sorted({rank for each in by_rank for rank in each})
    return {rank: sum([each.get(rank, 0) for each in by_rank]) for rank in ranks}


def _held(steps: tuple[Step, ...], itemsize: int) -> list[dict[int, int]]:
    """What each rank holds at each step; the first portion of a kind is the largest."""
    if not steps:
        return []
    room = buffer_size()
    always = sizes(steps[0].src, itemsize)
    plans: list[Sequence[Step]] = [steps]
    cut = {bool(portion.block): portion for portion in reversed(portions(steps, itemsize, room))}
    if cut:
        plans = [[portion.of_step(step) for step in steps] for portion in cut.values()]
        always = _sum(always, sizes(steps[-1].dst, itemsize))
    beside = [held_beside(each, itemsize, room) for each in plans]
    ranks = sorted({*always, *[rank for each in beside[0] for rank in each]})
    return [
        {
            rank: always.get(rank, 0) + max([each[index].get(rank, 0) for each in beside])
            for rank in ranks
        }
        for index in range(len(steps))
    ]
