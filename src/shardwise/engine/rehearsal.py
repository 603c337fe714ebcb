"""Collectives that are only spoken of: what they would give has a shape and no values."""

from __future__ import annotations

from collections.abc import Sequence

from ..mesh import Topology
from .protocol import Finish, Job

__all__ = ["Rehearsal"]


class Rehearsal:
    """Who listens hears of a redistribution when it is called, not when it is run."""

    def start(self, jobs: Sequence[Job]) -> Finish:
        done = [[job.empty(job.task.dst.box(at)) for at in job.task.dst.slots] for job in jobs]
        return lambda: done

    def check_equal(
        self, topology: Topology, digest: int, axes: tuple[int, ...] | None = None
    ) -> bool:
        return True
