"""The virtual engine: every rank lives in this process, and each distinct shard is stored once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layout.geometry import Box
from ..layout.mesh import Coord, Topology
from .dtypes import reduce_list
from .protocol import Finish, Job, narrow


class VirtualEngine:
    """Collectives as loops over the ranks; they are done when they are started."""

    def start(self, jobs: Sequence[Job]) -> Finish:
        done = [[_result(job, target) for target in job.task.dst.slots] for job in jobs]
        return lambda: done

    def check_equal(self, topology: Topology, digest: int) -> bool:
        return True


def _result(job: Job, target: Coord) -> torch.Tensor:
    task = job.task
    result = job.empty(task.dst.box(target))
    pieces: dict[Box, list[torch.Tensor]] = {}
    for source in task.sources(target):
        parcel = task.parcel(source, target)
        assert parcel is not None
        held = narrow(job.local[task.src.slot(source)], parcel.inside)
        pieces.setdefault(parcel.place, []).append(held)
    for place, parts in pieces.items():
        if task.op:
            reduce_list(parts, task.op, task.over, out=narrow(result, place))
        else:
            narrow(result, place).copy_(parts[0])
    return result
