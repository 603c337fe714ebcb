"""A backend's own all_gather and reduce_scatter, for backends that are best at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..layout.geometry import Box, box_numel, relative
from .all_to_all import buffer_size
from .dtypes import as_bytes, backend_op, backends_reduce, from_backend, is_plain, to_backend
from .group import Group, all_gather, reduce_scatter
from .protocol import Job, Wait, narrow

Launcher = Callable[[Group, Job, torch.Tensor], Wait]


def native_launcher(group: Group, jobs: Sequence[Job]) -> Launcher | None:
    """The backend's collective for these jobs; None if an all-to-all serves them.

    It takes rows of one size: the shards of all members must be equally large.
    """
    job = jobs[0]
    here = group.senders[group.me]
    members = () if here is None else job.task.src.topology.group_coords(here, job.task.axes)
    whole = group.process_group is not None and len(members) == len(group.ranks)
    alike = len({(each.task.kind, each.task.axes) for each in jobs}) == 1
    if not whole or not alike or not prefers_own(group.process_group, job.device.type):
        return None
    if job.task.kind == "reduce_scatter" and not backends_reduce(job.dtype, job.task.op):
        return None
    launchers = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    found = launchers.get(job.task.kind)
    return found if found and all(_is_even(group, each) for each in jobs) else None


def prefers_own(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """True if the backend of a device is faster at its own collectives: all are but gloo.

    `dist.get_backend` will not do: without a backend in `init_process_group` it says "undefined".
    """
    config: str = dist.get_backend_config(group)
    return f"{device_type}:gloo" not in config.split(",")


def _shards(group: Group, job: Job) -> tuple[list[Box], Box]:
    """The shard that each member gives to all, or gets from all, and the box that they make up."""
    task, here = job.task, group.senders[group.me]
    assert here is not None
    parts, whole = (task.src, task.dst) if task.kind == "all_gather" else (task.dst, task.src)
    return [parts.box(member) for member in group.senders if member is not None], whole.box(here)


def _is_even(group: Group, job: Job) -> bool:
    """True if all rows have one size, and a copy of them fits into the buffer if one is needed."""
    rows, whole = _shards(group, job)
    sizes = set(map(box_numel, rows))
    if len(sizes) != 1 or not box_numel(rows[0]):
        return False
    plain = job.task.kind == "all_gather" or is_plain(job.dtype, job.task.op)
    if plain and job.fills(rows, whole):
        return True
    width = sizes.pop() * (job.dtype.itemsize if plain else 16)
    return 2 * width * len(rows) <= buffer_size()


def _all_gather(group: Group, job: Job, out: torch.Tensor) -> Wait:
    """Gather into the result, or into rows that are copied to their places."""
    boxes, whole = _shards(group, job)
    row = as_bytes(job.local[0].permute(job.order))
    row = row.clone() if job.async_op else row
    direct = job.fills(boxes, whole)
    rows = as_bytes(out.permute(job.order)) if direct else row.new_empty(len(boxes) * row.numel())
    wait = all_gather(group, rows, row)

    def land() -> None:
        wait()
        if not direct:
            for part, box in zip(rows.view(job.dtype).view(len(boxes), -1), boxes, strict=True):
                narrow(out, relative(box, whole)).copy_(job.shaped(part, box))

    return land


def _reduce_scatter(group: Group, job: Job, out: torch.Tensor) -> Wait:
    """Reduce from the source, or from rows that its parts are copied to."""
    task, value = job.task, job.local[0]
    boxes, whole = _shards(group, job)
    if not job.fills(boxes, whole):
        parts = [job.flat(narrow(value, relative(box, whole))) for box in boxes]
        rows = to_backend(torch.cat(parts), task.op)
    else:
        rows = to_backend(job.flat(value), task.op)
        if job.async_op and rows.data_ptr() == value.data_ptr():
            rows = rows.clone()
    flat = job.flat(out)
    total = flat if rows.dtype is job.dtype else rows.new_empty(flat.numel())
    wait = reduce_scatter(group, total, rows, backend_op(job.dtype, task.op))

    def land() -> None:
        wait()
        result = from_backend(total, job.dtype, task.op, task.over)
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result)

    return land
