"""The process engine: one rank per process, collectives through `torch.distributed`.

Data that is only moved travels as bytes, so any dtype works. Metadata is known to every rank: a
collective that would carry nothing is skipped by all.

With gloo everything but an all_reduce is one uneven all-to-all: gloo is up to three times slower
at its own all_gather and reduce_scatter. Other backends use their own where shards are even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ..layout.mesh import Coord, Topology
from ..layout.world import refuse_forked
from .all_to_all import batches, buffer_size, give_back, in_chunks, largest_share, launch
from .dtypes import backend_op, backends_reduce, buffer_width, from_backend, is_plain, to_backend
from .events import Communication, record
from .failures import clear, report
from .group import all_reduce, broadcast, group_of, reduction_groups
from .lockstep import compare, describe, is_compared
from .native import is_native, launch_native, lies_in_rows
from .protocol import Finish, Job, Launch, Wait
from .recording import unrecorded


def start(jobs: Sequence[Job]) -> Finish:
    """Start collectives over the process groups that exist: those of the mesh's axes, the flattened
    ones that were made with the mesh, and the world.

    No group is ever made here: `dist.new_group` needs every rank of the world.
    """
    src, dst = jobs[0].step.src.topology, jobs[0].step.dst.topology
    _begin(src, dst)
    if src.coordinate is None and dst.coordinate is None:
        return lambda: [[] for _ in jobs]
    if is_compared():
        compare(group_of([job.step for job in jobs]).ranks, describe(jobs))
    try:
        return _run(_launches(jobs), jobs)
    except BaseException as error:  # of this rank alone, such as no memory for a buffer
        report(error, src)
        raise


@unrecorded
def all_equal(topology: Topology, digest: int) -> bool:
    """True on all ranks of a mesh of processes if all gave the same number, else False on all."""
    if topology.coordinate is None:
        return True
    _begin(topology)
    if is_compared():
        compare(topology.ranks, "a comparison of one number")
    axes = tuple(range(topology.ndim))
    groups = reduction_groups(topology, axes)
    received = sum([32 * (n - 1) // n for n in [group.size() for group in groups]])
    landed = record(Communication("check", topology, axes, received))
    same = _is_same(groups, digest, topology.device_type)
    landed(())
    return same


def _is_same(groups: Sequence[dist.ProcessGroup], digest: int, device_type: str) -> bool:
    """True if the members of all groups have the same number."""
    low = torch.tensor([digest, -digest], device=device_type)
    for group in groups:
        all_reduce(group, low, dist.ReduceOp.MIN)()
    return bool(low[0] == -low[1])


@unrecorded
def same_among_members(topology: Topology, digest_of: Callable[[tuple[int, ...]], int]) -> bool:
    """True if the members of each process group of a mesh have the same digest for their ranks. All
    ranks of the mesh make the call."""
    here = topology.coordinate
    if here is None:
        return True
    _begin(topology)
    same = []
    for axes in sorted(topology.groups):
        for group in reduction_groups(topology, axes):
            digest = digest_of(tuple(dist.get_process_group_ranks(group)))
            same.append(_is_same([group], digest, topology.device_type))
    return all(same)


def broadcast_from(
    topology: Topology, axes: Sequence[int], value: torch.Tensor, origin: Coord
) -> None:
    """Give the ranks along `axes` of a mesh of processes the `value` of the one among them that is
    at `origin` there, in place. All ranks of the mesh make the call."""
    here = topology.coordinate
    assert here is not None
    _begin(topology)
    if is_compared():
        compare(topology.ranks, f"a broadcast of {value.numel()} bytes")
    for place, axis in enumerate(axes):
        if all(here[later] == origin[later] for later in axes[place + 1 :]):
            first = topology.rank_of((*here[:axis], origin[axis], *here[axis + 1 :]))
            broadcast(topology.groups[axis,], value, first)()


def _begin(*topologies: Topology) -> None:
    """Raise before a collective that cannot work."""
    refuse_forked()
    for topology in topologies:
        topology.refuse_destroyed()
    clear()


def _run(launches: Iterable[Launch], jobs: Sequence[Job]) -> Finish:
    """Run collectives one after another and leave the last one running, to be waited for."""
    running: list[Wait] = []

    def land() -> None:
        while running:
            running[-1]()  # if it raises it stays: a missing value is never taken for a result
            running.pop()

    for start in launches:
        land()
        running.append(start())

    def finish() -> list[list[torch.Tensor]]:
        try:
            land()
            here = jobs[0].step.dst.topology.coordinate
            return [[] if here is None else [job.out] for job in jobs]
        except BaseException as error:  # of this rank alone, such as no memory for a result
            report(error, jobs[0].step.src.topology)
            raise

    return finish


def _launches(jobs: Sequence[Job]) -> Iterator[Launch]:
    """The collectives of `torch.distributed` that serve the jobs, one after another: as many jobs
    together as fit into the buffer."""
    if jobs[0].step.kind == "all_reduce" and backends_reduce(jobs[0].dtype, jobs[0].step.op):
        yield from _all_reduces(jobs)
        return
    group = group_of([job.step for job in jobs])
    native = is_native(group, jobs)
    # With several dtypes a received piece may be misaligned; it is then copied once more.
    room = buffer_size() // (2 if len({job.dtype for job in jobs}) == 1 else 3)
    small: list[tuple[Job, int]] = []
    for job in jobs:
        nbytes = largest_share(group, job) * buffer_width(job.step, job.dtype)
        if 0 < nbytes <= room:
            small.append((job, nbytes))
        elif nbytes and native and lies_in_rows(group, job):
            yield partial(launch_native, group, [job])
        elif nbytes:
            yield from in_chunks(group, job)
    for some in batches(small, room):
        yield partial(launch_native if native else launch, group, some)


def _all_reduces(jobs: Sequence[Job]) -> Iterator[Launch]:
    """Reduce as many tensors together as fit into the buffer. A larger one is reduced alone, in
    parts if it is reduced in another dtype."""
    job, room = jobs[0], buffer_size()
    width, plain = buffer_width(job.step, job.dtype), is_plain(job.dtype, job.step.op)
    pairs: list[tuple[tuple[torch.Tensor, torch.Tensor], int]] = []
    for each in jobs:
        lay = each.in_order if plain and len(jobs) == 1 else each.flat
        ends = lay(each.local[0]), lay(each.out)
        chunks = [(end,) if plain else end.split(max(1, room // width)) for end in ends]
        pairs += [(pair, pair[1].numel() * width) for pair in zip(*chunks, strict=True)]
    for parts in batches([pair for pair in pairs if pair[1]], room):
        yield partial(_all_reduce, job, parts)


def _all_reduce(job: Job, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> Wait:
    """Reduce flat tensors into others; one alone, of any shape, in place."""
    step, outs = job.step, [made for _, made in parts]
    given = [part for part, _ in parts]
    value = outs[0].copy_(given[0]) if len(parts) == 1 else torch.cat(given)
    value = to_backend(value, step.op)
    wait: Wait | None = None
    for group in reduction_groups(step.src.topology, step.axes):
        if wait is not None:
            wait()
        wait = all_reduce(group, value, backend_op(job.dtype, step.op))

    def land() -> None:
        if wait is not None:
            wait()
        total = from_backend(value, job.dtype, step.op, step.over)
        if len(outs) > 1 or total.data_ptr() != outs[0].data_ptr():
            torch._foreach_copy_(outs, total.split_with_sizes([out.numel() for out in outs]))
            give_back([value], kept=outs)

    return land
