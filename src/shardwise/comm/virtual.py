"""The virtual engine: every rank lives in this process, and each distinct shard is stored once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layout.mesh import Coord
from .dtypes import reduce_list
from .protocol import Finish, Job, narrow


def start(jobs: Sequence[Job]) -> Finish:
    """Collectives are done when they are started: the whole tensor is put together once, and each
    rank gets a copy of its box."""
    done = [_results(job) for job in jobs]
    return lambda: done


def _results(job: Job) -> list[torch.Tensor]:
    step, dst = job.step, job.step.dst
    parts = _reduced(job) if step.op else dict(zip(step.src.slots, job.local, strict=True))
    if step.kind == "all_reduce":
        return [parts[coord] for coord in dst.slots]
    # A result that stays Partial has one tensor per coordinate on the Partial axes.
    pending = [axis for axis, _ in step.src.partial if axis not in step.reduced]
    wholes = _wholes(job, parts, pending)
    if len(dst.slots) == 1 and dst.box(dst.slots[0]) == step.src.hull:
        made = list(wholes.values())
        if not any(whole is part for whole in made for part in job.local):
            return made
    return [
        job.empty(box).copy_(narrow(wholes[_at(coord, pending)], box))
        for coord, box in [(coord, dst.box(coord)) for coord in dst.slots]
    ]


def _at(coord: Coord, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple([coord[axis] for axis in axes])


def _reduced(job: Job) -> dict[Coord, torch.Tensor]:
    """The local tensors after the reduction, by coordinates that are 0 on the reduced axes."""
    step = job.step
    found: dict[Coord, list[torch.Tensor]] = {}
    for coord, part in zip(step.src.slots, job.local, strict=True):
        left = tuple([0 if axis in step.reduced else at for axis, at in enumerate(coord)])
        found.setdefault(left, []).append(part)
    return {
        coord: reduce_list(parts, step.op, step.over, out=job.empty(step.src.box(coord)))
        for coord, parts in found.items()
    }


def _wholes(
    job: Job, parts: dict[Coord, torch.Tensor], pending: Sequence[int]
) -> dict[tuple[int, ...], torch.Tensor]:
    """The whole tensor, for each coordinate on the axes that stay Partial."""
    src, found = job.step.src, dict[tuple[int, ...], torch.Tensor]()
    for coord, part in parts.items():
        key, box = _at(coord, pending), src.box(coord)
        if box == src.hull:
            found[key] = part
            continue
        if key not in found:
            found[key] = job.empty(src.hull)
        if part.numel():  # else a part that is the whole tensor may be there already
            narrow(found[key], box).copy_(part)
    return found
