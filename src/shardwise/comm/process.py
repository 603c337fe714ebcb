"""The process engine: one rank per process, collectives through `torch.distributed`.

What is only moved travels as bytes, so any dtype does. Metadata is known to every rank: a
collective that would carry nothing is skipped by all.

With gloo everything but an all_reduce is one uneven all-to-all: gloo is up to three times slower
at its own all_gather and reduce_scatter. Other backends use their own where shards are even.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ..layout.mesh import Topology
from ..layout.world import refuse_forked
from .all_to_all import buffer_size, give_back, rounds
from .dtypes import backend_op, backends_reduce, buffer_width, from_backend, to_backend
from .events import record
from .failures import clear, report
from .group import all_reduce, group_of, members, reduction_groups
from .lockstep import compare, describe, is_compared
from .native import native_launcher
from .protocol import Finish, Job, Launch, Wait


class ProcessEngine:
    """Collectives over the process groups that exist: those of the mesh's axes, the flattened ones
    that were made with the mesh, and the world.

    No group is ever made here: `dist.new_group` needs every rank of the world, also those outside
    the mesh.
    """

    def start(self, jobs: Sequence[Job]) -> Finish:
        _begin({end.topology for job in jobs for end in (job.task.src, job.task.dst)})
        if is_compared() and _takes_part(jobs):
            axes = tuple(sorted({axis for job in jobs for axis in job.task.axes}))
            mesh = jobs[0].task.src.topology
            reduces = _is_all_reduce(jobs)
            ranks = members(mesh, axes) if reduces else group_of([j.task for j in jobs]).ranks
            compare(ranks, describe(jobs))
        outs = [_result(job) for job in jobs]
        try:
            return _run(_launches(jobs, outs), outs)
        except BaseException as error:  # of this rank alone, such as no memory for a buffer
            report(error, jobs[0].task.src.topology)
            raise

    def check_equal(self, topology: Topology, digest: int) -> bool:
        if topology.coordinate is None:
            return True
        _begin([topology])
        if is_compared():
            compare(topology.ranks, "a comparison of one number")
        axes = tuple(range(topology.ndim))
        record("check", topology, axes, 16)
        low = torch.tensor([digest, -digest], device=topology.device_type)
        for group in reduction_groups(topology, axes):
            all_reduce(group, low, dist.ReduceOp.MIN)()
        return bool(low[0] == -low[1])


def _begin(topologies: Iterable[Topology]) -> None:
    """Raise before a collective that cannot work."""
    refuse_forked()
    for topology in topologies:
        topology.refuse_destroyed()
    clear()


def _takes_part(jobs: Sequence[Job]) -> bool:
    ends = jobs[0].task.src.topology, jobs[0].task.dst.topology
    return any(topology.coordinate is not None for topology in ends)


def _is_all_reduce(jobs: Sequence[Job]) -> bool:
    task = jobs[0].task
    return task.kind == "all_reduce" and backends_reduce(jobs[0].dtype, task.op)


def _result(job: Job) -> torch.Tensor | None:
    """Memory for the result; None if this rank is not on the target's mesh."""
    here = job.task.dst.topology.coordinate
    return None if here is None else job.empty(job.task.dst.box(here))


def _run(launches: Iterable[Launch], outs: Sequence[torch.Tensor | None]) -> Finish:
    """Run collectives one after another and leave the last one running, to be waited for."""
    running: list[Wait] = []

    def land() -> None:
        while running:
            running[-1]()  # if it raises it stays: a missing value is never taken for a result
            running.pop()

    for launch in launches:
        land()
        running.append(launch())

    def finish() -> list[list[torch.Tensor]]:
        land()
        return [[] if out is None else [out] for out in outs]

    return finish


def _launches(jobs: Sequence[Job], outs: Sequence[torch.Tensor | None]) -> Iterator[Launch]:
    """The collectives of `torch.distributed` that serve the jobs."""
    if not _takes_part(jobs):
        return
    if _is_all_reduce(jobs):
        yield from _all_reduces(jobs, outs)
        return
    group = group_of([job.task for job in jobs])
    launcher = native_launcher(group, jobs)
    if launcher is None:
        yield from rounds(group, jobs, outs)
        return
    for job, out in zip(jobs, outs, strict=True):
        assert out is not None
        yield partial(launcher, group, job, out)


# --- all_reduce ----------------------------------------------------------------------------------


def _all_reduces(jobs: Sequence[Job], outs: Sequence[torch.Tensor | None]) -> Iterator[Launch]:
    """Reduce as many tensors together as fit into the buffer; a larger one alone, in place."""
    some: list[tuple[Job, torch.Tensor]] = []
    total = 0
    for job, out in zip(jobs, outs, strict=True):
        assert out is not None
        nbytes = out.numel() * buffer_width(job.task, job.dtype)
        if some and total + nbytes > buffer_size():
            yield partial(_all_reduce, some)
            some, total = [], 0
        if nbytes:
            some.append((job, out))
            total += nbytes
    if some:
        yield partial(_all_reduce, some)


def _all_reduce(parts: list[tuple[Job, torch.Tensor]]) -> Wait:
    task, dtype = parts[0][0].task, parts[0][0].dtype
    if len(parts) == 1:
        job, out = parts[0]
        value = to_backend(job.flat(out.copy_(job.local[0])), task.op)
    else:
        flats = [to_backend(job.flat(job.local[0]), task.op) for job, _ in parts]
        value = torch.cat(flats)
    wait: Wait | None = None
    for group in reduction_groups(task.src.topology, task.axes):
        if wait is not None:
            wait()
        wait = all_reduce(group, value, backend_op(dtype, task.op))

    def land() -> None:
        if wait is not None:
            wait()
        shares = value.split([out.numel() for _, out in parts])
        for (job, out), share in zip(parts, shares, strict=True):
            result, flat = from_backend(share, dtype, task.op, task.over), job.flat(out)
            if result.data_ptr() != flat.data_ptr():  # else it was reduced in place
                flat.copy_(result)
        give_back([value], kept=[out for _, out in parts])

    return land
