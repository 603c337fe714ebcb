"""Several moves in one collective: what goes from one rank to another travels as one piece."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ..engine import Hop, Locals, as_bytes, engine_of
from ..geometry import box_shape
from ..mesh import Coord
from ..trace import is_heard, record
from .execute import assemble, cut_for, in_order, piece_of, run_steps
from .plan import Step

__all__ = ["bytes_received", "run_together"]


def run_together(
    steps: Sequence[Step], locals_of: Sequence[Locals], strides: Sequence[Sequence[int]]
) -> list[tuple[torch.Tensor, ...]]:
    """The local tensors of several tensors after one step each, gathers and exchanges in one."""
    joint = [index for index, step in enumerate(steps) if not step.is_local]
    made: dict[int, tuple[torch.Tensor, ...]] = {}
    if len(joint) > 1:
        parts = _exchange([steps[i] for i in joint], [locals_of[i] for i in joint])
        made = {i: in_order(part, strides[i]) for i, part in zip(joint, parts, strict=True)}
    return [
        made[i] if i in made else run_steps((step,), locals_of[i], strides[i])
        for i, step in enumerate(steps)
    ]


def bytes_received(steps: Sequence[Step], itemsizes: Sequence[int]) -> int:
    """How many bytes a rank receives in these steps, for the rank that receives most."""
    axes = sorted({axis for step in steps for axis in (*step.src.axes, *step.dst.axes, *step.axes)})
    topology = steps[0].src.topology
    return max(
        sum(step.received(coord) * size for step, size in zip(steps, itemsizes, strict=True))
        for coord in topology.group_coords((0,) * topology.ndim, axes)
    )


def _sends(step: Step, src: Coord, dst: Coord) -> bool:
    """Whether `src` sends something to `dst` in a step by itself."""
    if any(
        a != b for axis, (a, b) in enumerate(zip(src, dst, strict=True)) if axis not in step.axes
    ):
        return False
    return step.kind == "all_gather" or step.sends(src, dst)


def _exchange(steps: Sequence[Step], locals_of: Sequence[Locals]) -> list[list[torch.Tensor]]:
    topology = steps[0].src.topology
    sizes = [held[0].element_size() if held else 0 for held in locals_of]
    hop = Hop(
        topology,
        tuple(sorted({axis for step in steps for axis in step.axes})),
        tuple(sorted({axis for step in steps for axis in step.src.axes})),
        tuple(sorted({axis for step in steps for axis in step.dst.axes})),
    )
    if is_heard():
        record("exchange", topology, hop.axes, bytes_received(steps, sizes))

    def nbytes(index: int, src: Coord, dst: Coord) -> int:
        step = steps[index]
        sent = _sends(step, src, dst)
        return prod(box_shape(piece_of(step, src, dst))) * sizes[index] if sent else 0

    def shape(src: Coord, dst: Coord) -> tuple[int, ...] | None:
        total = sum(nbytes(index, src, dst) for index in range(len(steps)))
        return (total,) if total else None

    def cut(_: torch.Tensor, src: Coord, dst: Coord) -> torch.Tensor:
        pieces = [
            as_bytes(cut_for(step)(held[step.src.slot(src)], src, dst))
            for step, held in zip(steps, locals_of, strict=True)
            if _sends(step, src, dst)
        ]
        return torch.cat(pieces)

    labels = [held[0].new_empty(0, dtype=torch.uint8) for held in locals_of[:1] if held]
    tokens = labels * len(topology.coords_here(hop.src_axes))
    received = dict(
        zip(hop.targets, engine_of(topology).exchange(hop, tokens, shape, cut), strict=True)
    )
    places = {coord: place for coord in hop.targets for place in [hop.members(coord)]}

    def part(index: int, src: Coord, dst: Coord) -> torch.Tensor | None:
        """What of a step is in the piece from `src`."""
        step, count = steps[index], nbytes(index, src, dst)
        whole = received[dst][places[dst].index(src)]
        if whole is None or not count:
            return None
        start = sum(nbytes(before, src, dst) for before in range(index))
        raw = whole[start : start + count].clone()  # aligned, whatever stands before it
        return raw.view(locals_of[index][0].dtype).view(box_shape(piece_of(step, src, dst)))

    results = []
    for index, step in enumerate(steps):
        made = []
        for target in step.dst.slots:
            members = topology.group_coords(target, step.axes)
            parts = [part(index, member, target) for member in members]
            made.append(assemble(step, target, parts, locals_of[index][0]))
        results.append(made)
    return results
