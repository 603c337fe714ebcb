"""A backend's own all_gather and reduce_scatter, for backends that are best at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ..layout.geometry import Box, box_numel, box_shape, relative
from .all_to_all import buffer_size
from .dtypes import as_bytes, backend_op, backends_reduce, from_backend, is_plain, to_backend
from .group import Group, all_gather, reduce_scatter
from .protocol import Job, Out, Wait, narrow

Part = tuple[Job, torch.Tensor]
"""A job and its result."""
Launcher = Callable[[Group, Sequence[Part]], Wait]


def native_launcher(group: Group, jobs: Sequence[Job]) -> Launcher | None:
    """The backend's collective for these jobs; None if an all-to-all serves them.

    It takes rows of one size: the shards of all members must be equally large.
    """
    job = jobs[0]
    here = group.senders[group.me]
    members = () if here is None else job.step.src.topology.group_coords(here, job.step.axes)
    whole = group.process_group is not None and len(members) == len(group.ranks)
    alike = len({(each.step.kind, each.step.axes) for each in jobs}) == 1
    if not whole or not alike or not prefers_own(group.process_group, job.device.type):
        return None
    if job.step.kind == "reduce_scatter" and not backends_reduce(job.dtype, job.step.op):
        return None
    launchers = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    found = launchers.get(job.step.kind)
    return found if found and all(_is_even(group, each) for each in jobs) else None


def prefers_own(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """True if the backend of a device is faster at its own collectives: all are but gloo.

    `dist.get_backend` will not do: without a backend in `init_process_group` it says "undefined".
    """
    config: str = dist.get_backend_config(group)
    return f"{device_type}:gloo" not in config.split(",")


def _shards(group: Group, job: Job) -> tuple[list[Box], Box]:
    """The shard that each member gives to all, or gets from all, and the box that they make up."""
    step, here = job.step, group.senders[group.me]
    assert here is not None
    parts, whole = (step.src, step.dst) if step.kind == "all_gather" else (step.dst, step.src)
    return [parts.box(member) for member in group.senders if member is not None], whole.box(here)


def _is_even(group: Group, job: Job) -> bool:
    """True if all rows have one size, and a copy of them fits into the buffer if one is needed."""
    rows, _ = _shards(group, job)
    sizes = set(map(box_numel, rows))
    if len(sizes) != 1 or not box_numel(rows[0]):
        return False
    return _is_direct(group, job) or _packed(group, job) <= buffer_size()


def _is_direct(group: Group, job: Job) -> bool:
    """True if the rows lie in memory as the backend takes them."""
    plain = job.step.kind == "all_gather" or is_plain(job.dtype, job.step.op)
    return plain and job.fills(*_shards(group, job))


def _packed(group: Group, job: Job) -> int:
    """The bytes of the rows in a buffer, with those of a reduction in another form."""
    rows, _ = _shards(group, job)
    plain = job.step.kind == "all_gather" or is_plain(job.dtype, job.step.op)
    return 2 * len(rows) * box_numel(rows[0]) * (job.dtype.itemsize if plain else 16)


def batches(group: Group, jobs: Sequence[Job], outs: Sequence[Out | None]) -> Iterator[list[Part]]:
    """The jobs with their results, as many together as fit into the buffer."""
    some: list[Part] = []
    total = 0
    for job, out in zip(jobs, outs, strict=True):
        assert out is not None
        nbytes = _packed(group, job)
        if some and total + nbytes > buffer_size():
            yield some
            some, total = [], 0
        some.append((job, out.tensor()))
        total += nbytes
    yield some


def _all_gather(group: Group, parts: Sequence[Part]) -> Wait:
    """Gather into one result, or into rows that are copied to their places in all results."""
    job, out = parts[0]
    given = [as_bytes(job.local[0].permute(job.order)) for job, _ in parts]
    direct = len(parts) == 1 and _is_direct(group, job)
    row = torch.cat(given) if len(parts) > 1 or job.async_op else given[0]
    rows = row.new_empty(len(group.ranks) * row.numel())
    if direct:
        rows = as_bytes(out.permute(job.order))
    wait = all_gather(group, rows, row)
    shards = [_shards(group, job) for job, _ in parts]

    def land() -> None:
        wait()
        pieces = iter(rows.split([each.numel() for each in given] * len(group.ranks)))
        for member in range(0 if direct else len(group.ranks)):
            for (job, out), (boxes, whole) in zip(parts, shards, strict=True):
                box, raw = boxes[member], next(pieces)
                aligned = raw.storage_offset() % job.dtype.itemsize == 0
                value = (raw if aligned else raw.clone()).view(job.dtype)
                narrow(out, relative(box, whole)).copy_(job.shaped(value, box_shape(box)))

    return land


def _reduce_scatter(group: Group, parts: Sequence[Part]) -> Wait:
    """Reduce from one source, or from rows that the parts of all sources are copied to."""
    job = parts[0][0]
    step, outs = job.step, [job.flat(out) for job, out in parts]
    direct = len(parts) == 1 and _is_direct(group, job)
    value = job.flat(job.local[0]) if direct else torch.cat(_rows(group, parts))
    rows = to_backend(value, step.op)
    if job.async_op and rows.data_ptr() == job.local[0].data_ptr():
        rows = rows.clone()
    into = direct and rows.dtype is job.dtype
    total = outs[0] if into else rows.new_empty(rows.numel() // len(group.ranks))
    wait = reduce_scatter(group, total, rows, backend_op(job.dtype, step.op))

    def land() -> None:
        wait()
        made = from_backend(total, job.dtype, step.op, step.over)
        if made.data_ptr() != outs[0].data_ptr():
            torch._foreach_copy_(outs, made.split_with_sizes([out.numel() for out in outs]))

    return land


def _rows(group: Group, parts: Sequence[Part]) -> list[torch.Tensor]:
    """The parts of all sources for the first member, then those for the second, and so on."""
    found, shards = [], [_shards(group, job) for job, _ in parts]
    for member in range(len(group.ranks)):
        for (job, _), (boxes, whole) in zip(parts, shards, strict=True):
            value = narrow(job.local[0], relative(boxes[member], whole))
            found.append(job.flat(value.resolve_conj().resolve_neg()))
    return found
