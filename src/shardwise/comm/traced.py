"""Collectives while PyTorch traces a program: functional ones, which the graph keeps.

A graph may reorder and reuse what it cannot see through. So no collective writes in place here,
and each is followed by its wait. Nothing is communicated while tracing: ranks need not trace at the
same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._torch import functional_all_reduce, functional_all_to_all
from ..errors import CommunicationError
from ..layout.geometry import Box, box_shape
from .all_to_all import Packet, by_place, largest_share, packets
from .dtypes import backend_op, backends_reduce, from_backend, reduce_list, to_backend
from .group import Group, group_of, reduction_groups
from .protocol import Finish, Job, narrow
from .step import Parcel

_MOVED = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8)
"""dtypes that every backend moves as they are; others travel as bytes."""


def start(jobs: Sequence[Job]) -> Finish:
    """Put collectives into the graph that is traced, one or more for each job."""
    done = [_run(job) for job in jobs]
    return lambda: done


def _run(job: Job) -> list[torch.Tensor]:
    step = job.step
    here = step.dst.topology.coordinate
    if step.src.topology.coordinate is None and here is None:
        return []
    if step.kind == "all_reduce" and backends_reduce(job.dtype, step.op):
        return [_all_reduce(job)]
    received = _exchange(group_of([step]), job)
    return [] if here is None else [_assembled(job, step.dst.box(here), received)]


def _all_reduce(job: Job) -> torch.Tensor:
    step, value = job.step, job.local[0]
    if not value.numel():
        return value.clone()
    sent = to_backend(job.flat(value.resolve_conj().resolve_neg()).contiguous(), step.op)
    pairs = sent.is_complex()
    sent = torch.view_as_real(sent) if pairs else sent
    for group in reduction_groups(step.src.topology, step.axes):
        sent = functional_all_reduce(sent, backend_op(job.dtype, step.op), group)
    sent = torch.view_as_complex(sent) if pairs else sent
    total = from_backend(sent, job.dtype, step.op, step.over)
    return job.shaped(total, value.shape)


def _exchange(group: Group, job: Job) -> list[tuple[Packet, torch.Tensor]]:
    """The pieces that this rank receives, by one uneven all-to-all."""
    from_me, to_me = group.senders[group.me], group.receivers[group.me]
    if not largest_share(group, job):
        return []
    if group.process_group is None:
        raise CommunicationError(
            f"{job.step.kind} among ranks {list(group.ranks)} cannot be compiled: they have no "
            "process group of their own, and messages between pairs of ranks are not traced. Use "
            "a mesh over all processes, or call redistribute outside of the compiled function."
        )
    leaving = [packets([job], from_me, dst) for dst in group.receivers]
    coming = [packets([job], src, to_me) for src in group.senders]
    sent = [job.flat(p.held().resolve_conj().resolve_neg()) for each in leaving for p in each]
    # A rank that sends nothing of a tensor has it in the graph too: the collective that made it is
    # then needed on this rank as on the others.
    sent += [part.reshape(-1)[:0] for part in job.local]
    flat = torch.cat(sent) if sent else torch.empty(0, dtype=job.dtype, device=job.device)
    as_bytes = job.dtype not in _MOVED
    width = job.dtype.itemsize if as_bytes else 1
    incoming, outgoing = (
        [width * sum([p.parcel.numel for p in each]) for each in way] for way in (coming, leaving)
    )
    flat = flat.view(torch.uint8) if as_bytes else flat
    arrived = functional_all_to_all(flat, incoming, outgoing, group.process_group)
    arrived = arrived.view(job.dtype) if as_bytes else arrived
    found = [packet for each in coming for packet in each]
    pieces = arrived.split([packet.parcel.numel for packet in found]) if found else ()
    return [(p, job.shaped(flat, p.parcel.shape)) for p, flat in zip(found, pieces, strict=True)]


def _assembled(job: Job, box: Box, received: list[tuple[Packet, torch.Tensor]]) -> torch.Tensor:
    """The local tensor with the pieces in their places; those of one place are reduced."""
    step = job.step
    pieces: list[tuple[Parcel, torch.Tensor]] = []
    for packet, values in by_place(received):
        value = reduce_list(values, step.op, step.over) if step.op else values[0]
        pieces.append((packet.parcel, value))
    if pieces and job.fills([parcel.box for parcel, _ in pieces], box):
        return job.shaped(torch.cat([job.flat(value) for _, value in pieces]), box_shape(box))
    made = job.empty(box)
    for parcel, value in pieces:
        narrow(made, parcel.place).copy_(value)
    return made
