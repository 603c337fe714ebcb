"""`explain_redistribute`: what a redistribution would do, as a value that prints well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.all_to_all import buffer_size
from ..comm.dtypes import buffer_width, is_plain
from ..comm.step import Step
from ..errors import LayoutError, public
from ..layout.geometry import all_coords, box_numel
from ..layout.layout import Layout
from ..layout.placement import Placement
from ..layout.spec import DTensorSpec
from .prepare import steps_between


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

    `held` counts the source, the result, what lies in between, and at most what is packed.
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
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        line = "  ".join(f"{{:{side}{size}}}" for side, size in zip("<<>>>", wide, strict=True))
        lines = [line.format(*row).rstrip() for row in rows]
        same = self.src.topology is self.dst.topology
        to = f"{self.dst.layout_text()}" + ("" if same else f" on {self.dst.topology}")
        return "\n".join([f"{self.src} -> {to}, bytes per rank", *lines])

    __repr__ = __str__


def _most(steps: list[dict[int, int]]) -> int:
    total: Counter[int] = Counter()
    for each in steps:
        total.update(each)
    return max(total.values(), default=0)


def _range(by_rank: dict[int, int]) -> str:
    least, most = min(by_rank.values()), max(by_rank.values())
    return f"{most:,}" if least == most else f"{least:,}..{most:,}"


@public
def explain_redistribute(
    src: Any, dst: Any = None, placements: Sequence[Placement] | None = None
) -> Explanation:
    """The steps from one layout to another, with bytes and prices, without running them.

    `src` and `dst` are specs, or DTensors.

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
    if a.shape != b.shape:
        raise LayoutError(
            f"explain_redistribute: the shape stays as it is, but src is {a} and dst is {b}."
        )
    return Explanation(a, b, tuple(_costs(steps_between(a, b), a.dtype)) if a is not b else ())


def _spec_of(name: str, value: Any) -> DTensorSpec:
    found = value if isinstance(value, DTensorSpec) else getattr(value, "_spec", None)
    if not isinstance(found, DTensorSpec):
        raise LayoutError(
            f"explain_redistribute: {name} is {value!r}, which has no layout. Give a DTensor or a "
            "DTensorSpec; placements may say where it goes: explain_redistribute(x, [Replicate()])."
        )
    return found


def _costs(steps: Sequence[Step], dtype: torch.dtype) -> Iterator[StepCost]:
    between: dict[int, int] = {}
    for step in steps:
        source, made = _sizes(steps[0].src, dtype), _sizes(step.dst, dtype)
        is_view = step.kind in ("slice", "view") and step is not steps[-1]
        held = {
            rank: source.get(rank, 0)
            + (0 if step.kind == "make_partial" else between.get(rank, 0))  # that is in place
            + (0 if is_view else made.get(rank, 0))
            + _packed(step, dtype, source.get(rank, 0) + made.get(rank, 0))
            for rank in sorted({*source, *made})
        }
        before, after = step.src.topology, step.dst.topology
        names = tuple(before.names[axis] for axis in step.axes)
        size = dtype.itemsize
        sent = {before.rank_of(c): step.sent(c, size) for c in all_coords(before.shape)}
        got = {after.rank_of(c): step.received(c, size) for c in all_coords(after.shape)}
        everywhere = [{rank: each.get(rank, 0) for rank in held} for each in (sent, got)]
        if step.kind != "view":
            yield StepCost(step.kind, names, everywhere[0], everywhere[1], held)
        if not is_view:
            between = made


def _sizes(layout: Layout, dtype: torch.dtype) -> dict[int, int]:
    """The bytes that each rank holds."""
    where = layout.topology
    return {
        where.rank_of(c): box_numel(layout.box(c)) * dtype.itemsize for c in all_coords(where.shape)
    }


def _packed(step: Step, dtype: torch.dtype, nbytes: int) -> int:
    """The most bytes that a collective packs and unpacks; none if it runs in place."""
    if step.is_local or (step.kind == "all_reduce" and is_plain(dtype, step.op)):
        return 0
    copies = step.count if step.op or step.kind == "all_gather" else 1
    width = buffer_width(step, dtype)
    return min(buffer_size(), nbytes * copies * width // dtype.itemsize)
