"""A backend's own all_gather and reduce_scatter, for backends that are best at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist

from ..geometry import box_shape, relative
from .channel import Channel
from .faults import forgive, wait
from .mail import Land
from .protocol import Job, narrow
from .wire import as_bytes, backends_reduce, from_wire, to_wire, wire_op

__all__ = ["native_launch"]

Launcher = Callable[[Channel, Job, torch.Tensor], Land]


def native_launch(channel: Channel, jobs: Sequence[Job]) -> Launcher | None:
    """The backend's collective for these jobs, if there is one and it serves better than mail."""
    job = jobs[0]
    here = channel.senders[channel.me]
    members = () if here is None else job.task.src.topology.group_coords(here, job.task.axes)
    whole = channel.group is not None and len(members) == len(channel.ranks)
    alike = len({(each.task.kind, each.task.axes) for each in jobs}) == 1
    if not whole or not alike or not prefers_own(channel.group):
        return None
    if job.task.kind == "all_gather":
        return _all_gather
    if job.task.kind == "reduce_scatter" and backends_reduce(job.dtype, job.task.op):
        return _reduce_scatter
    return None


def prefers_own(group: dist.ProcessGroup | None) -> bool:
    """Whether a backend is faster at its own collectives: all are but gloo."""
    return dist.get_backend(group) != "gloo"


def _all_gather(channel: Channel, job: Job, out: torch.Tensor) -> Land:
    """Rows of equal length, one per rank, padded to the longest."""
    task, members = job.task, [coord for coord in channel.senders if coord is not None]
    boxes = [task.src.box(member) for member in members]
    width = max(prod(box_shape(box)) for box in boxes) * job.dtype.itemsize
    if not width:
        return lambda: None
    mine = as_bytes(job.local[0])
    row = mine.new_zeros(width) if job.later or mine.numel() < width else mine
    row[: mine.numel()] = mine
    rows = row.new_empty(len(boxes) * width)
    forgive()
    work = dist.all_gather_single(rows, row, group=channel.group, async_op=True)

    def land() -> None:
        wait(work, rows.device.type == "cpu")
        here = channel.receivers[channel.me]
        assert here is not None
        for part, box in zip(rows.view(len(boxes), -1), boxes, strict=True):
            shape = box_shape(box)
            whole = part[: prod(shape) * job.dtype.itemsize].view(job.dtype).view(shape)
            narrow(out, relative(box, task.dst.box(here))).copy_(whole)

    return land


def _reduce_scatter(channel: Channel, job: Job, out: torch.Tensor) -> Land:
    """Rows of equal length, one for each rank, padded to the longest."""
    task, here = job.task, channel.senders[channel.me]
    members = [coord for coord in channel.receivers if coord is not None]
    assert here is not None
    boxes = [task.piece(here, member) for member in members]
    width = max(prod(box_shape(box)) for box in boxes)
    if not width:
        return lambda: None
    wire = to_wire(job.local[0], task.op)
    sent = wire.new_zeros((len(boxes), width))
    for row, box in zip(sent, boxes, strict=True):
        part = narrow(wire, relative(box, task.src.box(here)))
        row[: part.numel()] = part.reshape(-1)
    total = wire.new_empty(width)
    kind = wire_op(job.dtype, task.op)
    forgive()
    work = dist.reduce_scatter_single(
        total, sent.view(-1), kind, group=channel.group, async_op=True
    )

    def land() -> None:
        wait(work, total.device.type == "cpu")
        mine = total[: out.numel()].view(out.shape)
        out.copy_(from_wire(mine, job.dtype, task.op, len(boxes)))

    return land
