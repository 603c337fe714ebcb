"""A backend's own all_gather and reduce_scatter, for backends that are best at them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..layout.geometry import Box
from .all_to_all import give_back, one_dtype, pack, packets, put_in_place, unpacked
from .dtypes import as_bytes, backend_op, backends_reduce, from_backend, is_plain, to_backend
from .group import Group, all_gather, reduce_scatter
from .protocol import Job, Wait


def is_native(group: Group, jobs: Sequence[Job]) -> bool:
    """True if the backend's own collective serves these jobs, else an all-to-all does.

    It takes rows of one size: the shards of all members must be equally large.
    """
    here, step, dtype = group.senders[group.me], jobs[0].step, jobs[0].dtype
    if here is None or step.kind not in ("all_gather", "reduce_scatter"):
        return False
    members = step.src.topology.group_coords(here, step.axes)
    whole = group.process_group is not None and len(members) == len(group.ranks)
    alike = len({(each.step.kind, each.step.axes) for each in jobs}) == 1
    if not whole or not alike or not prefers_own(group.process_group, jobs[0].device.type):
        return False
    if step.op and not (is_plain(dtype, step.op) and backends_reduce(dtype, step.op)):
        return False
    return all(job.step.is_even for job in jobs)


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
    whole = step.dst if step.kind == "all_gather" else step.src
    members = [member for member in group.senders if member is not None]
    return [step.shards.box(member) for member in members], whole.box(here)


def lies_in_rows(group: Group, job: Job) -> bool:
    """True if the shards of all members lie in memory one after another: nothing is packed."""
    known = job.step.known_rows
    found = known.get(group.ranks)
    if found is None:
        found = known[group.ranks] = job.fills(*_shards(group, job))
    return found


def launch_native(group: Group, jobs: Sequence[Job]) -> Wait:
    """Start one collective: all pieces of this rank to everybody, or to each member its pieces,
    which are reduced. One tensor whose rows lie one after another in memory is not packed."""
    me, job = group.senders[group.me], jobs[0]
    op, alone = job.step.op, len(jobs) == 1
    dtype = one_dtype(jobs)
    rows = all(lies_in_rows(group, each) for each in jobs)
    if rows and not alone and dtype is not None:
        return _launch_rows(group, jobs)
    direct = alone and rows
    packed = not alone or job.async_op or bool(op and not direct)
    leaving = [packets(jobs, me, to) for to in (group.senders if op else [me])]
    coming = [packets(jobs, source, me) for source in ([me] if op else group.senders)]
    sent = pack(leaving, job, dtype) if packed else as_bytes(job.in_order(job.local[0]))
    if direct:
        received = as_bytes(job.in_order(job.out))
    else:
        received = sent.new_empty(sum([packet.nbytes for each in coming for packet in each]))
    if op:
        values = to_backend(sent.view(job.dtype), op)
        total = received.view(values.dtype)
        wait = reduce_scatter(group, total, values, backend_op(job.dtype, op))
    else:
        wait = all_gather(group, received, sent)

    def land() -> None:
        wait()
        if op:
            from_backend(total, job.dtype, op, job.step.over)  # in place
        if not direct:
            put_in_place(list(unpacked(coming, received, dtype)))
            give_back([received])
        if packed:
            give_back([sent])

    return land


def _launch_rows(group: Group, jobs: Sequence[Job]) -> Wait:
    """As `launch_native`, for several tensors of one dtype that all lie in rows. As many calls pack
    and unpack them whatever the number of members."""
    job, count = jobs[0], len(group.ranks)
    op, dtype = job.step.op, job.dtype
    held = [each.flat(each.local[0]) for each in jobs]
    if op:
        sent = torch.cat([flat.view(count, -1) for flat in held], 1).view(-1)
        values = to_backend(sent, op)
        total = values.new_empty(values.numel() // count)
        wait = reduce_scatter(group, total, values, backend_op(dtype, op))
    else:
        sent = torch.cat(held)
        total = sent.new_empty(sent.numel() * count)
        wait = all_gather(group, as_bytes(total), as_bytes(sent))

    def land() -> None:
        wait()
        if op:
            from_backend(total, dtype, op, job.step.over)  # in place
        rows = total.view(dtype).view(1 if op else count, -1)
        places = [each.flat(each.out).view(len(rows), -1) for each in jobs]
        torch._foreach_copy_(places, rows.split_with_sizes([p.shape[1] for p in places], 1))
        give_back([sent, total])

    return land
