"""One uneven all-to-all for many tensors: pieces packed into a bounded buffer, round by round.

All ranks know all boxes, so they agree on rounds and sizes without a word. A piece that stays on
its rank is copied; pieces that lie in memory as they are sent, or received, need no packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from ..layout.geometry import Box, box_numel, box_shape
from ..layout.mesh import Coord
from .buffer import Rooms, buffer_size, chunks
from .dtypes import as_bytes, buffer_width
from .failures import PairWork, under_way, wait
from .group import Channel, world
from .groups import all_to_all
from .protocol import Job, Parcel, narrow
from .reduction import reduce_into

__all__ = ["Land", "Launch", "mail", "shaped", "tile", "weight"]

Land = Callable[[], None]
"""Waits for a collective that was started, and puts what came where it belongs."""
Launch = Callable[[], Land]


def mail(
    channel: Channel, jobs: Sequence[Job], outs: Sequence[torch.Tensor | None], rooms: Rooms
) -> Iterator[Launch]:
    """The collectives, one after another, that bring the pieces of all jobs into `outs`. Each must
    have landed before the next one is launched, into the same `rooms`."""
    small: list[tuple[Job, torch.Tensor | None]] = []
    # What comes may lie where it cannot be read if there are several dtypes: it is copied again.
    room = buffer_size() // (2 if len({job.dtype for job in jobs}) == 1 else 3)
    total = 0
    for job, out in zip(jobs, outs, strict=True):
        nbytes = weight(channel, job) * buffer_width(job.task, job.dtype)
        if not nbytes:
            continue
        if nbytes > room:
            yield from _in_rounds(channel, job, out, rooms)
            continue
        if total + nbytes > room:
            yield _Round(channel, tuple(small), rooms).launch
            small, total = [], 0
        small.append((job, out))
        total += nbytes
    if small:
        yield _Round(channel, tuple(small), rooms).launch


def weight(channel: Channel, job: Job) -> int:
    """The most elements that a rank sends or receives; the same number on every rank."""
    task, count = job.task, len(channel.ranks)
    copies = count if task.kind in ("all_gather", "all_reduce") else 1
    parts = count if task.op else 1
    sent = [box_numel(task.src.box(coord)) * copies for coord in channel.senders if coord]
    got = [box_numel(task.dst.box(coord)) * parts for coord in channel.receivers if coord]
    return max(max(sent), max(got))


def _in_rounds(
    channel: Channel, job: Job, out: torch.Tensor | None, rooms: Rooms
) -> Iterator[Launch]:
    """A tensor too large for the buffer: in each round the next chunk of every piece."""
    most = max(1, buffer_size() // 2 // (len(channel.ranks) * buffer_width(job.task, job.dtype)))
    task = job.task
    counts = [
        len(chunks(task.piece(src, dst), most))
        for src in channel.senders
        for dst in channel.receivers
        if src and dst and task.sends(src, dst)
    ]
    for index in range(max(counts, default=0)):
        yield _Round(channel, ((job, out),), rooms, index, most).launch


Packet = tuple[Job, torch.Tensor | None, Coord, Parcel]
"""A piece of a job's tensor, the tensor to put it in, who sends it, and which piece it is."""


@dataclass(frozen=True)
class _Round:
    """One all-to-all: the chunks number `index` of all pieces of some jobs."""

    channel: Channel
    parts: tuple[tuple[Job, torch.Tensor | None], ...]
    rooms: Rooms
    index: int = 0
    most: int = 0

    def _packets(self, src: Coord | None, dst: Coord | None) -> list[Packet]:
        if src is None or dst is None:
            return []
        found: list[Packet] = []
        for job, out in self.parts:
            parcel = job.task.parcel(src, dst)
            if parcel is not None and self.most:
                parcel = self._chunk(job, parcel, src, dst)
            if parcel is not None:
                found.append((job, out, src, parcel))
        return found

    def _chunk(self, job: Job, parcel: Parcel, src: Coord, dst: Coord) -> Parcel | None:
        cut = chunks(parcel.box, self.most)
        if self.index >= len(cut):
            return None
        return Parcel.of(cut[self.index], job.task.src.box(src), job.task.dst.box(dst))

    def launch(self) -> Land:
        channel, me = self.channel, self.channel.me
        from_me, to_me = channel.senders[me], channel.receivers[me]
        leaving = [self._packets(from_me, dst) for dst in channel.receivers]
        coming = [self._packets(src, to_me) for src in channel.senders]
        sent = self._as_it_lies(leaving, from_me, True)
        received = self._as_it_lies(coming, to_me, False)
        own: list[Packet] = []
        job = self.parts[0][0]
        if sent is None and received is None and self._keeps():
            own, leaving[me], coming[me] = leaving[me], [], []
            if not job.task.op:
                _keep(own)
        if sent is None:
            sent = _packed(leaving, self._room("sent", leaving))
        direct = received is not None
        if received is None:
            received = self._room("received", coming)
        outgoing, incoming = [list(map(_nbytes, each)) for each in (leaving, coming)]
        finish = _post(channel, received, sent, incoming, outgoing)

        def land() -> None:
            finish()
            if not direct:
                _unpack(coming, received, own if job.task.op else [])

        return land

    def _keeps(self) -> bool:
        """Whether what a rank gives itself is taken from the source: not if that may be written
        before it is reduced, nor among many small tensors, which are reduced as one."""
        job = self.parts[0][0]
        return not job.task.op or (self.most > 0 and not job.async_op)

    def _room(self, name: str, packets: list[list[Packet]]) -> torch.Tensor:
        return self.rooms.room(name, sum(map(_nbytes, packets)), self.parts[0][0].device)

    def _as_it_lies(
        self, packets: list[list[Packet]], here: Coord | None, sending: bool
    ) -> torch.Tensor | None:
        """The memory of the one tensor that is sent or received, if the packets lie in it in
        order."""
        job, out = self.parts[0]
        if len(self.parts) > 1 or self.most or here is None:
            return None
        if job.async_op if sending else job.task.op:
            return None
        outer = job.task.src.box(here) if sending else job.task.dst.box(here)
        if not tile([parcel.box for each in packets for *_, parcel in each], outer, job.order):
            return None
        value = job.local[0] if sending else out
        assert value is not None
        flat = value.permute(job.order)
        if not flat.is_contiguous() or value.is_conj() or value.is_neg():
            return None
        return as_bytes(flat)


def tile(boxes: list[Box], outer: Box, order: tuple[int, ...]) -> bool:
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
    return sum([parcel.numel * job.dtype.itemsize for job, _, _, parcel in packets])


def _slots(packets: list[Packet], flat: torch.Tensor) -> Iterator[tuple[Packet, torch.Tensor]]:
    """Each packet with its place in a buffer of bytes.

    Tensors of several dtypes may lie where they cannot be read: these are given as bytes.
    """
    dtypes = {job.dtype for job, *_ in packets}
    if len(dtypes) == 1:
        parts = flat.view(dtypes.pop()).split([parcel.numel for *_, parcel in packets])
        for packet, part in zip(packets, parts, strict=True):
            yield packet, _shaped(packet, part)
        return
    sizes = [parcel.numel * job.dtype.itemsize for job, _, _, parcel in packets]
    for packet, raw in zip(packets, flat.split(sizes), strict=True):
        fits = raw.storage_offset() % packet[0].dtype.itemsize == 0
        yield packet, _shaped(packet, raw.view(packet[0].dtype)) if fits else raw


def _shaped(packet: Packet, flat: torch.Tensor) -> torch.Tensor:
    return shaped(flat, packet[3].box, packet[0].order)


def shaped(flat: torch.Tensor, box: Box, order: tuple[int, ...]) -> torch.Tensor:
    """Elements as a tensor: they travel in the order in which the tensor's dims lie in memory."""
    shape = box_shape(box)
    if order == tuple(range(len(order))):
        return flat.view(shape)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[dim] for dim in order]).permute(inverse)


def _packed(packets: list[list[Packet]], flat: torch.Tensor) -> torch.Tensor:
    for (job, _, src, parcel), place in _slots(list(chain.from_iterable(packets)), flat):
        value = _held(job, src, parcel)
        place.copy_(value if place.shape == value.shape else as_bytes(value.permute(job.order)))
    return flat


def _held(job: Job, src: Coord, parcel: Parcel) -> torch.Tensor:
    return narrow(job.local[job.task.src.slot(src)], parcel.inside)


def _place(out: torch.Tensor | None, parcel: Parcel) -> torch.Tensor:
    assert out is not None
    return narrow(out, parcel.place)


def _keep(packets: list[Packet]) -> None:
    """What a rank gives itself goes from the source to the target without a buffer."""
    for job, out, src, parcel in packets:
        _place(out, parcel).copy_(_held(job, src, parcel))


def _unpack(packets: list[list[Packet]], flat: torch.Tensor, own: list[Packet]) -> None:
    """Put what came where it belongs, reduced with the rank's `own` if it is not among it."""
    given = [each for each in packets if each]
    if given and len(given[0]) > 1 and given[0][0][0].task.kind == "reduce_scatter":
        _unpack_rows(given, flat)
        return
    together: dict[tuple[int, Box], list[tuple[Coord, Packet, torch.Tensor]]] = {}
    for packet, place in _slots(list(chain.from_iterable(packets)), flat):
        job, out, src, parcel = packet
        if tuple(place.shape) != parcel.shape:
            place = _shaped(packet, place.clone().view(job.dtype))
        if job.task.op:
            together.setdefault((id(job), parcel.box), []).append((src, packet, place))
        else:
            _place(out, parcel).copy_(place)
    for packet in own:
        job, _, src, parcel = packet
        value = _held(job, src, parcel)
        together.setdefault((id(job), parcel.box), []).append((src, packet, value))
    for parts in together.values():
        parts.sort(key=lambda part: part[0])  # in the order of the mesh, whatever the ranks' is
        job, out, _, parcel = parts[0][1]
        reduce_into(_place(out, parcel), [place for *_, place in parts], job.task.op, job.task.over)


def _unpack_rows(given: list[list[Packet]], flat: torch.Tensor) -> None:
    """All senders give the same boxes: what they send is reduced as one row each."""
    job = given[0][0][0]
    rows = flat.view(job.dtype).view(len(given), -1)
    order = sorted(range(len(given)), key=lambda index: given[index][0][2])
    total = rows[order[0]]
    reduce_into(total, [rows[index] for index in order], job.task.op, job.task.over)
    parts = total.split([parcel.numel for *_, parcel in given[0]])
    for packet, part in zip(given[0], parts, strict=True):
        _place(packet[1], packet[3]).copy_(_shaped(packet, part))


def _post(
    channel: Channel,
    received: torch.Tensor,
    sent: torch.Tensor,
    incoming: list[int],
    outgoing: list[int],
) -> Callable[[], None]:
    """Start sending and receiving; the function that is returned waits."""
    on_cpu = received.device.type == "cpu"
    if channel.group is not None:
        work = under_way(all_to_all(channel.group, received, sent, incoming, outgoing))
        return partial(wait, work, channel.ranks, on_cpu)
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
    if on_cpu and works:
        return partial(wait, under_way(PairWork(works)), channel.ranks, on_cpu)

    def finish() -> None:
        for work in works:
            work.wait()

    return finish
