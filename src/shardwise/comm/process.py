"""The process engine: one rank per process, collectives through `torch.distributed`.

Only collectives that every backend has are used. What only moves travels as bytes, so any dtype
does. Metadata is known to every rank: a collective that would carry nothing is skipped by all.

With gloo everything but an all_reduce is one uneven all-to-all: gloo is up to three times slower
at its own all_gather and reduce_scatter. Other backends get their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..layout.mesh import Topology
from ..layout.world import refuse_forked
from .all_to_all import Land, Launch, mail
from .buffer import Rooms, buffer_size, give_back
from .dtypes import backends_reduce, buffer_width, from_wire, is_plain, to_wire, wire_op
from .events import record
from .failures import clear, report, under_way, wait
from .group import channel_of, members, reduction_groups
from .groups import all_reduce
from .lockstep import compare, describe, is_compared
from .native import native_launch
from .protocol import Finish, Job

__all__ = ["ProcessEngine"]


class ProcessEngine:
    """Collectives over the process groups that exist: those of the mesh's axes, the flattened ones
    that were made with the mesh, and the world.

    No group is ever made here: `dist.new_group` needs every rank of the world, also those outside
    the mesh.
    """

    def start(self, jobs: Sequence[Job]) -> Finish:
        _begin({end.topology for job in jobs for end in (job.task.src, job.task.dst)})
        if is_compared():
            _compare(jobs)
        outs = [_target(job) for job in jobs]
        rooms = Rooms()
        try:
            return _run(_launches(jobs, outs, rooms), outs, rooms)
        except BaseException as error:  # this rank's alone, as one without room for a buffer
            report(error, jobs[0].task.src.topology)
            raise

    def check_equal(
        self, topology: Topology, digest: int, axes: tuple[int, ...] | None = None
    ) -> bool:
        if topology.coordinate is None:
            return True
        _begin([topology])
        if is_compared():
            compare(topology.ranks, "a comparison of one number")
        every = tuple(range(topology.ndim))
        record("check", topology, every, 16)
        low = torch.tensor([digest, -digest], device=topology.device_type)
        for group in reduction_groups(topology, every if axes is None else axes):
            _reduce(low, dist.ReduceOp.MIN, group)()
        differ = (low[:1] != -low[1:]).to(torch.int64)
        if axes is not None:  # all ranks shall raise, or none
            for group in reduction_groups(topology, every):
                _reduce(differ, dist.ReduceOp.MAX, group)()
        return not bool(differ)


def _begin(topologies: Iterable[Topology]) -> None:
    """Before a collective: errors that keep it from working, in the place of a wait."""
    refuse_forked()
    for topology in topologies:
        topology.refuse_destroyed()
    clear()


def _compare(jobs: Sequence[Job]) -> None:
    """Compare with the other ranks of a collective what it is."""
    task = jobs[0].task
    if task.src.topology.coordinate is None and task.dst.topology.coordinate is None:
        return
    axes = tuple(sorted({axis for job in jobs for axis in job.task.axes}))
    reduces = task.kind == "all_reduce" and backends_reduce(jobs[0].dtype, task.op)
    found = members(task.src.topology, axes) if reduces else channel_of([j.task for j in jobs])
    compare(found.ranks, describe(jobs))


def _target(job: Job) -> torch.Tensor | None:
    """Memory for what this rank will hold; none if it is not in the target's mesh."""
    here = job.task.dst.topology.coordinate
    return None if here is None else job.empty(job.task.dst.box(here))


def _run(launches: Iterable[Launch], outs: Sequence[torch.Tensor | None], rooms: Rooms) -> Finish:
    """Run collectives one after another and leave the last one running, to be waited for."""
    running: list[Land] = []

    def land() -> None:
        while running:
            running[-1]()  # if it fails it stays: what did not come is never taken for a value
            running.pop()

    for launch in launches:
        land()
        running.append(launch())

    def finish() -> list[list[torch.Tensor]]:
        land()
        rooms.close()
        return [[] if out is None else [out] for out in outs]

    return finish


def _launches(
    jobs: Sequence[Job], outs: Sequence[torch.Tensor | None], rooms: Rooms
) -> Iterator[Launch]:
    task = jobs[0].task
    if task.src.topology.coordinate is None and task.dst.topology.coordinate is None:
        return
    if task.kind == "all_reduce" and backends_reduce(jobs[0].dtype, task.op):
        yield from _all_reduces(jobs, outs)
        return
    channel = channel_of([job.task for job in jobs])
    launcher = native_launch(channel, jobs)
    if launcher is None:
        yield from mail(channel, jobs, outs, rooms)
        return
    for job, out in zip(jobs, outs, strict=True):
        assert out is not None
        yield partial(launcher, channel, job, out)


# --- all_reduce ----------------------------------------------------------------------------------


def _all_reduces(jobs: Sequence[Job], outs: Sequence[torch.Tensor | None]) -> Iterator[Launch]:
    """Small tensors of one dtype together, large ones alone and in place."""
    small: list[tuple[Job, torch.Tensor]] = []
    total = 0
    for job, out in zip(jobs, outs, strict=True):
        assert out is not None
        nbytes = out.numel() * buffer_width(job.task, job.dtype)
        if not nbytes:
            continue
        if len(jobs) == 1 or nbytes > buffer_size() // 4:
            yield from _alone(job, out)
            continue
        if total + nbytes > buffer_size():
            yield partial(_together, small)
            small, total = [], 0
        small.append((job, out))
        total += nbytes
    if small:
        yield partial(_together, small)


def _alone(job: Job, out: torch.Tensor) -> Iterator[Launch]:
    value = job.local[0]
    flat = out.permute(job.order).view(-1)
    out.copy_(value)
    op = job.task.op
    if is_plain(job.dtype, op):
        yield partial(_reduced, job, flat, flat)
        return
    # What is reduced in another form goes by parts.
    width = max(1, buffer_size() // buffer_width(job.task, job.dtype))
    for start in range(0, flat.numel(), width):
        part = flat[start : start + width]
        yield partial(lambda part: _reduced(job, to_wire(part, op), part), part)


def _together(parts: list[tuple[Job, torch.Tensor]]) -> Land:
    job = parts[0][0]
    flats = [to_wire(each.local[0], each.task.op).view(-1) for each, _ in parts]
    whole = torch.cat(flats)
    land = _reduced(job, whole, None)

    def scatter() -> None:
        land()
        start = 0
        for each, out in parts:
            part = whole[start : start + out.numel()].view(out.shape)
            out.copy_(from_wire(part, each.dtype, each.task.op, each.task.over))
            start += out.numel()
        give_back([whole])

    return scatter


def _reduced(job: Job, wire: torch.Tensor, out: torch.Tensor | None) -> Land:
    """Reduce `wire` over the groups of the axes, and put the result into `out` if it is given."""
    task = job.task
    groups = reduction_groups(task.src.topology, task.axes)
    kind = wire_op(job.dtype, task.op)
    for group in groups[:-1]:
        _reduce(wire, kind, group)()
    last = _reduce(wire, kind, groups[-1]) if groups else None

    def land() -> None:
        if last is not None:
            last()
        if out is not None and (out is not wire or task.op == "avg"):
            out.copy_(from_wire(wire, job.dtype, task.op, task.over))
            give_back([wire], kept=[out])

    return land


def _reduce(value: torch.Tensor, op: dist.ReduceOp.RedOpType, group: Any) -> Land:
    ranks = dist.get_process_group_ranks(group)
    work = under_way(all_reduce(group, value, op))
    return partial(wait, work, ranks, value.device.type == "cpu")
