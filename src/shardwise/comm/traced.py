"""Collectives while PyTorch traces a program: functional ones, which the graph keeps.

A graph may reorder and reuse what it cannot see through. So nothing is written in place here, and
every collective is followed by its wait. Nothing is communicated while tracing: ranks need not
trace at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._torch import functional_all_reduce, functional_all_to_all
from ..errors import CommunicationError
from ..layout.geometry import Box
from ..layout.mesh import Coord, Topology
from .all_to_all import shaped, tile, weight
from .dtypes import backends_reduce, from_wire, to_wire, wire_op
from .group import Channel, channel_of, reduction_groups
from .protocol import Finish, Job, Parcel, narrow
from .reduction import reduced

__all__ = ["TracedEngine"]

_MOVED = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8)
"""dtypes that every backend moves as they are; others travel as bytes."""


class TracedEngine:
    """Collectives as operators of the graph that is traced, one or more for each job."""

    def start(self, jobs: Sequence[Job]) -> Finish:
        made = [_run(job) for job in jobs]
        return lambda: made

    def check_equal(
        self, topology: Topology, digest: int, axes: tuple[int, ...] | None = None
    ) -> bool:
        """A graph holds no checks: what they compare are values, which are not there yet."""
        return True


def _run(job: Job) -> list[torch.Tensor]:
    task = job.task
    here = task.dst.topology.coordinate
    if task.src.topology.coordinate is None and here is None:
        return []
    if task.kind == "all_reduce" and backends_reduce(job.dtype, task.op):
        return [_all_reduce(job)]
    channel = channel_of([task])
    received = _exchange(channel, job)
    return [] if here is None else [_assembled(job, here, received)]


def _all_reduce(job: Job) -> torch.Tensor:
    task, value = job.task, job.local[0]
    if not value.numel():
        return value.clone()
    wire = to_wire(value.permute(job.order), task.op)
    pairs = wire.is_complex()
    wire = torch.view_as_real(wire) if pairs else wire
    kind = wire_op(job.dtype, task.op)
    for group in reduction_groups(task.src.topology, task.axes):
        wire = functional_all_reduce(wire, kind, group)
    wire = torch.view_as_complex(wire) if pairs else wire
    total = from_wire(wire, job.dtype, task.op, task.over)
    return shaped(total.reshape(-1), _whole(value.shape), job.order)


def _whole(shape: Sequence[int]) -> Box:
    return tuple([(0, size) for size in shape])


Packet = tuple[Coord, Parcel, torch.Tensor]
"""Who sent a piece, which piece it is, and its values."""


def _exchange(channel: Channel, job: Job) -> list[Packet]:
    """The pieces that this rank receives, by one uneven all-to-all."""
    from_me, to_me = channel.senders[channel.me], channel.receivers[channel.me]
    if not weight(channel, job):
        return []
    if channel.group is None:
        raise CommunicationError(
            f"{job.task.kind} among ranks {list(channel.ranks)} cannot be compiled: they have no "
            "process group of their own, and messages between pairs of ranks are not traced. Use "
            "a mesh over all processes, or call redistribute outside of the compiled function."
        )
    leaving = [_parcel(job, from_me, dst) for dst in channel.receivers]
    coming = [_parcel(job, src, to_me) for src in channel.senders]
    sent = [_flat(job, from_me, parcel) for parcel in leaving if parcel is not None]
    # What a rank has goes into the graph also if it sends nothing of it: the collective that made
    # it is then needed on this rank as on the others.
    sent += [part.reshape(-1)[:0] for part in job.local]
    flat = torch.cat(sent) if sent else torch.empty(0, dtype=job.dtype, device=job.device)
    width = 1
    if job.dtype not in _MOVED:
        flat, width = flat.view(torch.uint8), job.dtype.itemsize
    incoming, outgoing = (
        [width * (each.numel if each else 0) for each in way] for way in (coming, leaving)
    )
    arrived = functional_all_to_all(flat, incoming, outgoing, channel.group)
    if width > 1 or arrived.dtype is not job.dtype:
        arrived = arrived.view(job.dtype)
    received: list[Packet] = []
    start = 0
    for src, parcel in zip(channel.senders, coming, strict=True):
        if src is not None and parcel is not None:
            piece = arrived[start : start + parcel.numel]
            received.append((src, parcel, shaped(piece, parcel.box, job.order)))
            start += parcel.numel
    return received


def _parcel(job: Job, src: Coord | None, dst: Coord | None) -> Parcel | None:
    return None if src is None or dst is None else job.task.parcel(src, dst)


def _flat(job: Job, src: Coord | None, parcel: Parcel) -> torch.Tensor:
    """The values of a piece in the order in which they travel."""
    assert src is not None
    held = narrow(job.local[job.task.src.slot(src)], parcel.inside)
    return held.resolve_conj().resolve_neg().permute(job.order).reshape(-1)


def _assembled(job: Job, here: Coord, received: list[Packet]) -> torch.Tensor:
    """What this rank holds afterwards: the pieces in their places, reduced if there are several of
    one place."""
    task = job.task
    together: dict[Box, list[Packet]] = {}
    for packet in received:
        together.setdefault(packet[1].box, []).append(packet)
    pieces: list[tuple[Parcel, torch.Tensor]] = []
    for packets in together.values():
        packets.sort(key=lambda packet: packet[0])  # in the order of the mesh
        parts = [value for *_, value in packets]
        value = reduced(parts, task.op, task.over) if task.op else parts[0]
        pieces.append((packets[0][1], value))
    box = task.dst.box(here)
    if pieces and tile([parcel.box for parcel, _ in pieces], box, job.order):
        flat = torch.cat([value.permute(job.order).reshape(-1) for _, value in pieces])
        return shaped(flat, box, job.order)
    made = job.empty(box)
    for parcel, value in pieces:
        narrow(made, parcel.place).copy_(value)
    return made
