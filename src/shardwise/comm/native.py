"""A backend's own all_gather and reduce_scatter, for backends that are best at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..layout.geometry import Box, box_numel, relative
from .all_to_all import Land, shaped, tile
from .buffer import buffer_size
from .dtypes import as_bytes, backends_reduce, from_wire, is_plain, to_wire, wire_op
from .failures import wait
from .group import Channel
from .protocol import Job, narrow

__all__ = ["native_launch", "prefers_own"]

Launcher = Callable[[Channel, Job, torch.Tensor], Land]


def native_launch(channel: Channel, jobs: Sequence[Job]) -> Launcher | None:
    """The backend's collective for these jobs, if there is one and it serves better than mail."""
    job = jobs[0]
    here = channel.senders[channel.me]
    members = () if here is None else job.task.src.topology.group_coords(here, job.task.axes)
    whole = channel.group is not None and len(members) == len(channel.ranks)
    alike = len({(each.task.kind, each.task.axes) for each in jobs}) == 1
    if not whole or not alike or not prefers_own(channel.group, job.device.type):
        return None
    if not all(_needs_no_buffer(channel, each) or _fits(channel, each) for each in jobs):
        return None  # mail goes in rounds
    if job.task.kind == "all_gather":
        return _all_gather
    if job.task.kind == "reduce_scatter" and backends_reduce(job.dtype, job.task.op):
        return _reduce_scatter
    return None


def _boxes(channel: Channel, job: Job) -> list[Box]:
    """What each member gives to all, or is given by all."""
    layout = job.task.src if job.task.kind == "all_gather" else job.task.dst
    return [layout.box(member) for member in channel.senders if member is not None]


def _needs_no_buffer(channel: Channel, job: Job) -> bool:
    """Whether the backend takes and gives memory of the source, or a copy of it, and the target."""
    plain = job.task.kind == "all_gather" or is_plain(job.dtype, job.task.op)
    return plain and _is_even(channel, job)


def _is_even(channel: Channel, job: Job) -> bool:
    """Whether the members' boxes are of one size and follow each other in memory. All ranks answer
    alike."""
    here = channel.senders[channel.me]
    assert here is not None
    outer = (job.task.dst if job.task.kind == "all_gather" else job.task.src).box(here)
    boxes = _boxes(channel, job)
    return len(set(map(box_numel, boxes))) == 1 and tile(boxes, outer, job.order)


def _fits(channel: Channel, job: Job) -> bool:
    plain = job.task.kind == "all_gather" or is_plain(job.dtype, job.task.op)
    width = max(map(box_numel, _boxes(channel, job))) * (job.dtype.itemsize if plain else 16)
    return 2 * width * len(channel.ranks) <= buffer_size()


def prefers_own(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """Whether the backend of a device is faster at its own collectives: all are but gloo, which
    also copies what it is given.

    `dist.get_backend` will not do: without a backend in `init_process_group` it says "undefined".
    """
    config: str = dist.get_backend_config(group)
    return f"{device_type}:gloo" not in config.split(",")


def _all_gather(channel: Channel, job: Job, out: torch.Tensor) -> Land:
    """Rows of equal length, one per rank, padded to the longest; straight into the target if it is
    made of such rows."""
    task, boxes = job.task, _boxes(channel, job)
    width = max(map(box_numel, boxes)) * job.dtype.itemsize
    if not width:
        return lambda: None
    mine = as_bytes(job.local[0].permute(job.order))
    row = mine.new_zeros(width) if job.async_op or mine.numel() < width else mine
    if row is not mine:
        row[: mine.numel()] = mine
    even = _is_even(channel, job)
    rows = as_bytes(out.permute(job.order)) if even else row.new_empty(len(boxes) * width)
    work = dist.all_gather_single(rows, row, group=channel.group, async_op=True)

    def land() -> None:
        wait(work, channel.ranks, rows.device.type == "cpu")
        here = channel.receivers[channel.me]
        assert here is not None
        if even:
            return
        for part, box in zip(rows.view(len(boxes), -1), boxes, strict=True):
            flat = part[: box_numel(box) * job.dtype.itemsize].view(job.dtype)
            narrow(out, relative(box, task.dst.box(here))).copy_(shaped(flat, box, job.order))

    return land


def _reduce_scatter(channel: Channel, job: Job, out: torch.Tensor) -> Land:
    """Rows of equal length, one for each rank, padded to the longest; straight from the source if
    it is made of such rows."""
    task, here = job.task, channel.senders[channel.me]
    assert here is not None
    boxes = _boxes(channel, job)
    width = max(map(box_numel, boxes))
    if not width:
        return lambda: None
    wire = to_wire(job.local[0].permute(job.order), task.op)
    if _is_even(channel, job):
        sent = wire.clone() if job.async_op and wire.data_ptr() == job.local[0].data_ptr() else wire
    else:
        sent = wire.new_zeros((len(boxes), width))
        for row, box in zip(sent, boxes, strict=True):
            inside = relative(box, task.src.box(here))
            part = narrow(wire, tuple([inside[dim] for dim in job.order]))
            row[: part.numel()] = part.reshape(-1)
    straight = wire.dtype is job.dtype and out.numel() == width
    total = out.permute(job.order).view(-1) if straight else wire.new_empty(width)
    kind = wire_op(job.dtype, task.op)
    work = dist.reduce_scatter_single(
        total, sent.view(-1), kind, group=channel.group, async_op=True
    )

    def land() -> None:
        wait(work, channel.ranks, total.device.type == "cpu")
        flat = from_wire(total[: out.numel()], job.dtype, task.op, task.over)
        out.copy_(shaped(flat, task.dst.box(here), job.order))

    return land
