"""`explain_redistribute`: what a redistribution would do, as a value that prints well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import buffer_size
from ..errors import LayoutError
from ..layout.geometry import all_coords
from ..layout.placement import Placement
from ..layout.spec import DTensorSpec
from .blocks import stretches
from .layout import Layout
from .legs import Legs, held_by_legs, legs, once
from .portions import held_beside, portions, sizes
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
    src, dst = once(a, b) or (a, b)
    parts = [(legs(*pair), count) for pair, count in _parts(src, dst).items()]
    costs = _costs_of_parts(src, dst, parts) if parts else _costs(legs(src, dst), a.dtype)
    return Explanation(a, b, tuple(costs))


def _parts(a: DTensorSpec, b: DTensorSpec) -> Counter[tuple[DTensorSpec, DTensorSpec]]:
    """The layouts of the parts that are moved one after another, and how many parts have them; none
    if all is moved at once."""
    found: Counter[tuple[DTensorSpec, DTensorSpec]] = Counter()
    for part in stretches(a, b, buffer_size()):
        src, dst = a, b
        for stretch in part:
            src, dst = stretch.of_spec(src), stretch.of_spec(dst)
        found[src, dst] += 1
    return found


def _spec_of(name: str, value: Any) -> DTensorSpec:
    found = value if isinstance(value, DTensorSpec) else getattr(value, "_spec", None)
    if not isinstance(found, DTensorSpec):
        raise LayoutError(
            f"explain_redistribute: {name} is {value!r}, which has no layout. Give a DTensor or a "
            "DTensorSpec; placements may say where it goes: explain_redistribute(x, [Replicate()])."
        )
    return found


def _costs(plans: Legs, dtype: torch.dtype) -> list[StepCost]:
    costs: list[StepCost] = []
    taken = [steps for steps in plans if steps]
    carried: dict[int, int] = {}
    for steps in taken:
        always = _sum(sizes(taken[0][0].src, dtype), carried)
        for step, beside in zip(steps, _beside(steps, dtype), strict=True):
            costs.append(_cost(step, dtype, _sum(always, beside)))
        carried = sizes(steps[-1].dst, dtype)
    return costs


def _cost(step: Step, dtype: torch.dtype, held: dict[int, int]) -> StepCost:
    before, after = step.src.topology, step.dst.topology
    names = tuple(before.names[axis] for axis in step.axes)
    sent = {before.rank_of(c): step.sent(c) * dtype.itemsize for c in all_coords(before.shape)}
    got = {after.rank_of(c): step.received(c) * dtype.itemsize for c in all_coords(after.shape)}
    everywhere = [{rank: each.get(rank, 0) for rank in held} for each in (sent, got)]
    return StepCost(step.kind, names, everywhere[0], everywhere[1], held)


def _costs_of_parts(
    src: DTensorSpec, dst: DTensorSpec, parts: Sequence[tuple[Legs, int]]
) -> list[StepCost]:
    """What steps cost that are taken for one part of a tensor after another: those that are alike
    are told as one."""
    dtype = src.dtype
    layouts = [Layout.of(spec.fine or spec) for spec in (src, dst)]
    always = _sum(*[sizes(layout, dtype) for layout in layouts])
    found: dict[tuple[str, tuple[str, ...]], StepCost] = {}
    for plans, count in parts:
        beside = held_by_legs(plans, dtype, buffer_size())
        steps = [step for each in plans for step in each]
        for step, extra in zip(steps, beside, strict=True):
            cost = _cost(step, dtype, _sum(always, extra))
            key = cost.kind, cost.axes
            sent, received = ([by_rank] * count for by_rank in (cost.sent, cost.received))
            if key in found:
                old = found[key]
                sent, received = [*sent, old.sent], [*received, old.received]
                held = {rank: max(n, old.held[rank]) for rank, n in cost.held.items()}
            else:
                held = cost.held
            found[key] = StepCost(*key, _sum(*sent), _sum(*received), held)
    return list(found.values())


def _sum(*by_rank: dict[int, int]) -> dict[int, int]:
    ranks = sorted({rank for each in by_rank for rank in each})
    return {rank: sum([each.get(rank, 0) for each in by_rank]) for rank in ranks}


def _beside(steps: tuple[Step, ...], dtype: torch.dtype) -> list[dict[int, int]]:
    """What each rank holds at each step beside the source."""
    room = buffer_size()
    most: list[dict[int, int]] = []
    for portion in portions(steps, dtype, room):
        held = held_beside([portion.of_step(step) for step in steps], dtype, room)
        pairs = zip(most or held, held, strict=True)
        most = [{rank: max(n, old[rank]) for rank, n in new.items()} for old, new in pairs]
    if not most:
        return held_beside(steps, dtype, room)
    target = sizes(steps[-1].dst, dtype)
    return [_sum(target, each) for each in most]
