"""One uneven all-to-all for many tensors: pieces packed into a bounded buffer, round by round.

All ranks know all boxes, so they agree on rounds and sizes without a word. A piece that stays on
its rank is copied; pieces that lie in memory as they are sent, or received, need no packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..geometry import Box, box_numel, box_shape, relative
from ..mesh import Coord
from .buffer import buffer_size, chunks
from .channel import Channel, world
from .faults import forgive, wait, wait_pairs
from .protocol import Job, narrow
from .reduction import reduce_into
from .wire import as_bytes

__all__ = ["Land", "Launch", "mail"]

Land = Callable[[], None]
"""Waits for a collective that was started, and puts what came where it belongs."""
Launch = Callable[[], Land]


def mail(
    channel: Channel, jobs: Sequence[Job], outs: Sequence[torch.Tensor | None]
) -> Iterator[Launch]:
    """The collectives, one after another, that bring the pieces of all jobs into `outs`."""
    small: list[tuple[Job, torch.Tensor | None]] = []
    room = buffer_size() // 2
    total = 0
    for job, out in zip(jobs, outs, strict=True):
        nbytes = _weight(channel, job) * job.dtype.itemsize
        if not nbytes:
            continue
        if nbytes > room:
            yield from _in_rounds(channel, job, out)
            continue
        if total + nbytes > room:
            yield _Round(channel, tuple(small)).launch
            small, total = [], 0
        small.append((job, out))
        total += nbytes
    if small:
        yield _Round(channel, tuple(small)).launch


def _weight(channel: Channel, job: Job) -> int:
    """The most elements that a rank sends or receives; the same number on every rank."""
    task, count = job.task, len(channel.ranks)
    copies = count if task.kind in ("all_gather", "all_reduce") else 1
    parts = count if task.op else 1
    sent = [box_numel(task.src.box(coord)) * copies for coord in channel.senders if coord]
    got = [box_numel(task.dst.box(coord)) * parts for coord in channel.receivers if coord]
    return max(max(sent), max(got))


def _in_rounds(channel: Channel, job: Job, out: torch.Tensor | None) -> Iterator[Launch]:
    """A tensor too large for the buffer: in each round the next chunk of every piece."""
    most = max(1, buffer_size() // 2 // (len(channel.ranks) * job.dtype.itemsize))
    task = job.task
    counts = [
        len(chunks(task.piece(src, dst), most))
        for src in channel.senders
        for dst in channel.receivers
        if src and dst and task.sends(src, dst)
    ]
    for index in range(max(counts, default=0)):
        yield _Round(channel, ((job, out),), index, most).launch


Packet = tuple[Job, torch.Tensor | None, Coord, Box]
"""A piece of a job's tensor, the place to put it in, who sends it, and which box it is."""


@dataclass(frozen=True)
class _Round:
    """One all-to-all: the chunks number `index` of all pieces of some jobs."""

    channel: Channel
    parts: tuple[tuple[Job, torch.Tensor | None], ...]
    index: int = 0
    most: int = 0

    def _packets(self, src: Coord | None, dst: Coord | None) -> list[Packet]:
        if src is None or dst is None:
            return []
        found: list[Packet] = []
        for job, out in self.parts:
            if not job.task.sends(src, dst):
                continue
            box = job.task.piece(src, dst)
            if self.most:
                cut = chunks(box, self.most)
                if self.index < len(cut):
                    found.append((job, out, src, cut[self.index]))
            elif box_numel(box):
                found.append((job, out, src, box))
        return found

    def launch(self) -> Land:
        channel, me = self.channel, self.channel.me
        from_me, to_me = channel.senders[me], channel.receivers[me]
        leaving = [self._packets(from_me, dst) for dst in channel.receivers]
        coming = [self._packets(src, to_me) for src in channel.senders]
        sent = self._as_it_lies(leaving, from_me, True)
        received = self._as_it_lies(coming, to_me, False)
        if sent is None and received is None and not self.parts[0][0].task.op:
            _keep(leaving[me])
            leaving[me], coming[me] = [], []
        if sent is None:
            sent = _packed(leaving, self.parts[0][0])
        direct = received is not None
        if received is None:
            received = _room(coming, self.parts[0][0])
        outgoing, incoming = [list(map(_nbytes, each)) for each in (leaving, coming)]
        finish = _post(channel, received, sent, incoming, outgoing)

        def land() -> None:
            finish()
            if not direct:
                _unpack(coming, received)

        return land

    def _as_it_lies(
        self, packets: list[list[Packet]], here: Coord | None, sending: bool
    ) -> torch.Tensor | None:
        """The memory of the one tensor that is sent or received, if the packets lie in it in
        order."""
        job, out = self.parts[0]
        if len(self.parts) > 1 or self.most or here is None:
            return None
        if not sending and job.task.op:
            return None
        outer = job.task.src.box(here) if sending else job.task.dst.box(here)
        if not _tile([box for each in packets for *_, box in each], outer, job.order):
            return None
        value = job.local[0] if sending else out
        assert value is not None
        flat = value.permute(job.order)
        if not flat.is_contiguous() or value.is_conj() or value.is_neg():
            return None
        return as_bytes(flat)


def _tile(boxes: list[Box], outer: Box, order: tuple[int, ...]) -> bool:
    """Whether boxes follow each other along the outermost dim in memory and make up `outer`."""
    longer = [dim for dim in order if outer[dim][1] - outer[dim][0] != 1]
    if not longer:
        return len(boxes) == 1
    first = longer[0]
    at = outer[first][0]
    for box in boxes:
        if box[first][0] != at or any(box[dim] != outer[dim] for dim in longer[1:]):
            return False
        at = box[first][1]
    return at == outer[first][1]


def _nbytes(packets: list[Packet]) -> int:
    return sum(box_numel(box) * job.dtype.itemsize for job, _, _, box in packets)


def _slots(
    packets: list[list[Packet]], flat: torch.Tensor
) -> Iterator[tuple[Packet, torch.Tensor]]:
    """Each packet with its bytes in a buffer."""
    start = 0
    for packet in (packet for each in packets for packet in each):
        stop = start + box_numel(packet[3]) * packet[0].dtype.itemsize
        yield packet, flat[start:stop]
        start = stop


def _readable(packet: Packet, raw: torch.Tensor) -> torch.Tensor | None:
    """Bytes as the tensor they are; None if they lie where its dtype cannot be read."""
    job, _, _, box = packet
    return None if raw.storage_offset() % job.dtype.itemsize else _shaped(job, raw, box)


def _shaped(job: Job, raw: torch.Tensor, box: Box) -> torch.Tensor:
    """Bytes as a tensor: they travel in the order in which the tensor's dims lie in memory."""
    shape = box_shape(box)
    inverse = sorted(range(len(shape)), key=job.order.__getitem__)
    return raw.view(job.dtype).view([shape[dim] for dim in job.order]).permute(inverse)


def _room(packets: list[list[Packet]], like: Job) -> torch.Tensor:
    return torch.empty(sum(map(_nbytes, packets)), dtype=torch.uint8, device=like.device)


def _packed(packets: list[list[Packet]], like: Job) -> torch.Tensor:
    flat = _room(packets, like)
    for packet, raw in _slots(packets, flat):
        job, _, src, box = packet
        place, value = _readable(packet, raw), job.held(src, box)
        if place is None:
            raw.copy_(as_bytes(value.permute(job.order)))
        else:
            place.copy_(value)
    return flat


def _keep(packets: list[Packet]) -> None:
    """What a rank gives itself goes from the source to the target without a buffer."""
    for job, out, src, box in packets:
        _place(job, out, box).copy_(job.held(src, box))


def _place(job: Job, out: torch.Tensor | None, box: Box) -> torch.Tensor:
    here = job.task.dst.topology.coordinate
    assert out is not None and here is not None
    return narrow(out, relative(box, job.task.dst.box(here)))


def _unpack(packets: list[list[Packet]], flat: torch.Tensor) -> None:
    together: dict[tuple[int, Box], list[tuple[Coord, Packet, torch.Tensor]]] = {}
    for packet, raw in _slots(packets, flat):
        job, out, src, box = packet
        place = _readable(packet, raw)
        if place is None:
            place = _shaped(job, raw.clone(), box)
        if job.task.op:
            together.setdefault((id(job), box), []).append((src, packet, place))
        else:
            _place(job, out, box).copy_(place)
    for parts in together.values():
        parts.sort(key=lambda part: part[0])  # in the order of the mesh, whatever the ranks' is
        job, out, _, box = parts[0][1]
        reduce_into(_place(job, out, box), [place for *_, place in parts], job.task.op)


def _post(
    channel: Channel,
    received: torch.Tensor,
    sent: torch.Tensor,
    incoming: list[int],
    outgoing: list[int],
) -> Callable[[], None]:
    """Start sending and receiving; the function that is returned waits."""
    forgive()
    on_cpu = received.device.type == "cpu"
    if channel.group is not None:
        work: Any = dist.all_to_all_single(
            received, sent, incoming, outgoing, group=channel.group, async_op=True
        )
        return lambda: wait(work, on_cpu)
    pairs: list[dist.P2POp] = []
    arrivals, departures = received.split(incoming), sent.split(outgoing)
    for rank, index in zip(channel.ranks, range(len(channel.ranks)), strict=True):
        if index == channel.me:
            arrivals[index].copy_(departures[index])
            continue
        if incoming[index]:
            pairs.append(dist.P2POp(dist.irecv, arrivals[index], rank, group=world()))
        if outgoing[index]:
            pairs.append(dist.P2POp(dist.isend, departures[index], rank, group=world()))
    works = dist.batch_isend_irecv(pairs) if pairs else []
    return lambda: wait_pairs(works)
