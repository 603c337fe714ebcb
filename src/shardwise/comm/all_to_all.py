"""One uneven all-to-all for many tensors: pieces packed into a bounded buffer, round by round.

All ranks know all boxes, so they agree on rounds and sizes without communication. A piece that
stays on its rank is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch

from .._torch import is_tracing
from ..config import current
from ..layout.geometry import Box, box_numel
from ..layout.mesh import Coord
from .dtypes import as_bytes, buffer_width, reduce_list
from .events import on_free
from .group import Group, all_to_all
from .protocol import Job, Launch, Wait, narrow
from .recording import recorder
from .step import Parcel

Item = TypeVar("Item")

# --- the buffer ----------------------------------------------------------------------------------


def buffer_size() -> int:
    """The bytes that a collective may pack and unpack at a time."""
    return current().buffer


def give_back(parts: Iterable[torch.Tensor], kept: Iterable[torch.Tensor] = ()) -> None:
    """Free the memory of tensors that nobody needs any more, but not that of `kept`.

    To drop them is not enough: gloo's thread may hold its tensors for a while after the wait, and
    another buffer is made meanwhile.
    """
    if is_tracing() or recorder() is not None:  # a graph frees by itself
        return
    keep = {each.untyped_storage().data_ptr() for each in kept}
    for part in parts:
        memory = part.untyped_storage()
        if part.device.type != "meta" and memory.data_ptr() not in keep:
            memory.resize_(0)
            for observer in on_free:
                observer(memory)


def batches(items: Iterable[tuple[Item, int]], room: int) -> Iterator[list[Item]]:
    """Items, given with their bytes: as many together as `room` has place for, at least one."""
    some: list[Item] = []
    total = 0
    for item, nbytes in items:
        if some and total + nbytes > room:
            yield some
            some, total = [], 0
        some.append(item)
        total += nbytes
    if some:
        yield some


def chunks(box: Box, most: int) -> list[Box]:
    """A box cut into boxes of at most `most` elements, in order; none if it is empty.

    >>> chunks(((0, 3), (0, 4)), 8)
    [((0, 2), (0, 4)), ((2, 3), (0, 4))]
    >>> chunks(((0, 2), (0, 4)), 3)
    [((0, 1), (0, 3)), ((0, 1), (3, 4)), ((1, 2), (0, 3)), ((1, 2), (3, 4))]
    """
    numel = box_numel(box)
    if numel <= most:
        return [box] if numel else []
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, most * (stop - start) // numel)
    ends = [(at, min(at + step, stop)) for at in range(start, stop, step)]
    return [each for end in ends for each in chunks((*box[:dim], end, *box[dim + 1 :]), most)]


# --- who sends what ------------------------------------------------------------------------------


def largest_share(group: Group, job: Job) -> int:
    """The elements that a rank sends or receives at most; the same number on every rank."""
    step, count = job.step, len(group.ranks)
    copies = count if step.kind in ("all_gather", "all_reduce") else 1
    return max(step.src.most * copies, step.dst.most * (count if step.op else 1))


def in_chunks(group: Group, job: Job) -> Iterator[Launch]:
    """A tensor too large for the buffer: in each round the next chunk of every piece."""
    most = max(1, buffer_size() // 2 // (len(group.ranks) * buffer_width(job.step, job.dtype)))
    pairs = [(src, dst) for src in group.senders for dst in group.receivers if src and dst]
    parcels = [parcel for pair in pairs if (parcel := job.step.parcel(*pair))]
    counts = [len(chunks(parcel.box, most)) for parcel in parcels]
    for index in range(max(counts, default=0)):
        yield partial(launch, group, [job], index, most)


class Packet(NamedTuple):
    """A piece of a job's tensor, and who sends it."""

    job: Job
    src: Coord
    parcel: Parcel

    @property
    def nbytes(self) -> int:
        return self.parcel.numel * self.job.dtype.itemsize

    def held(self) -> torch.Tensor:
        """The piece in the source of its sender."""
        return narrow(self.job.local[self.job.step.src.slot(self.src)], self.parcel.inside)

    def place(self) -> torch.Tensor:
        """The place of the piece in the result."""
        return narrow(self.job.out, self.parcel.place)


def packets(
    jobs: Sequence[Job], src: Coord | None, dst: Coord | None, index: int = 0, most: int = 0
) -> list[Packet]:
    """The message of `src` to `dst`: a piece of each job, or chunk number `index` of it if pieces
    are sent in chunks of at most `most` elements."""
    found: list[Packet] = []
    if src is None or dst is None:
        return found
    for job in jobs:
        parcel = job.step.parcel(src, dst)
        if parcel is None:
            continue
        if most:
            cut = chunks(parcel.box, most)[index : index + 1]
            ends = job.step.src.box(src), job.step.dst.box(dst)
            found += [Packet(job, src, Parcel.of(box, *ends)) for box in cut]
        else:
            found.append(Packet(job, src, parcel))
    return found


def launch(group: Group, jobs: Sequence[Job], index: int = 0, most: int = 0) -> Wait:
    """Start one all-to-all: the pieces of some jobs, or a chunk of each piece of one."""
    me, dtype = group.me, one_dtype(jobs)
    leaving = [packets(jobs, group.senders[me], dst, index, most) for dst in group.receivers]
    own, leaving[me] = [(packet, packet.held()) for packet in leaving[me]], []
    coming = [
        [] if at == me else packets(jobs, src, group.receivers[me], index, most)
        for at, src in enumerate(group.senders)
    ]
    outgoing, incoming = (
        [sum([packet.nbytes for packet in each]) for each in way] for way in (leaving, coming)
    )
    sent = pack(leaving, jobs[0], dtype)
    received = sent.new_empty(sum(incoming))
    wait = all_to_all(group, received, sent, incoming, outgoing)
    if not any(job.async_op for job in jobs):
        if not jobs[0].step.op:
            _put(own)
            own = []
    else:  # the program may write into the source meanwhile
        own = [(packet, value.clone()) for packet, value in own]

    def land() -> None:
        wait()
        _put([*unpacked(coming, received, dtype), *own])
        give_back([sent, received])

    return land


_SUMMED = (torch.float32, torch.float64)
"""The dtypes whose sums are formed in place, one value after another."""


# --- packing -------------------------------------------------------------------------------------


def _split(
    packets: list[list[Packet]], flat: torch.Tensor
) -> Iterator[tuple[Packet, torch.Tensor]]:
    """Each packet with its bytes in a buffer."""
    every = list(chain.from_iterable(packets))
    return zip(every, flat.split([packet.nbytes for packet in every]), strict=True)


def one_dtype(jobs: Iterable[Job]) -> torch.dtype | None:
    """The dtype of real tensors, if all jobs are of one; few calls then serve them all."""
    found = {job.dtype for job in jobs}
    dtype = found.pop() if len(found) == 1 else None
    return None if dtype is None or dtype.is_complex else dtype


def pack(packets: list[list[Packet]], job: Job, dtype: torch.dtype | None) -> torch.Tensor:
    """A buffer with the bytes of packets, on the device of `job`."""
    every = [packet for each in packets for packet in each]
    flat = torch.empty(sum([p.nbytes for p in every]), dtype=torch.uint8, device=job.device)
    values = [packet.job.in_order(packet.held()) for packet in every]
    if dtype is None:
        for (_, raw), value in zip(_split(packets, flat), values, strict=True):
            raw.copy_(as_bytes(value))
    elif values and all(value.is_contiguous() for value in values):
        torch.cat([value.view(-1) for value in values], out=flat.view(dtype))
    else:
        for packet, place in _shaped(every, flat.view(dtype)):
            place.copy_(packet.held())
    return flat


def _shaped(packets: list[Packet], flat: torch.Tensor) -> Iterator[tuple[Packet, torch.Tensor]]:
    """Packets of one dtype with their values, which lie one after another in `flat`."""
    parts = flat.split_with_sizes([packet.parcel.numel for packet in packets])
    for packet, part in zip(packets, parts, strict=True):
        yield packet, packet.job.shaped(part, packet.parcel.shape)


def unpacked(
    packets: list[list[Packet]], flat: torch.Tensor, dtype: torch.dtype | None
) -> Iterator[tuple[Packet, torch.Tensor]]:
    """Each packet with its values."""
    if dtype is not None:
        yield from _shaped(list(chain.from_iterable(packets)), flat.view(dtype))
        return
    for packet, raw in _split(packets, flat):
        aligned = raw.storage_offset() % packet.job.dtype.itemsize == 0
        raw = raw if aligned else raw.clone()
        yield packet, packet.job.shaped(raw.view(packet.job.dtype), packet.parcel.shape)


def put_in_place(pairs: Sequence[tuple[Packet, torch.Tensor]]) -> None:
    """Copy pieces to their places in the results."""
    places = [packet.place() for packet, _ in pairs]
    torch._foreach_copy_(places, [value for _, value in pairs])


def _put(received: Iterable[tuple[Packet, torch.Tensor]]) -> None:
    """Put pieces into the results; those of one box are reduced if the jobs reduce."""
    pairs = list(received)
    if not pairs:
        return
    if not pairs[0][0].job.step.op:
        put_in_place(pairs)
        return
    reduced = list(by_place(pairs))
    if _adds_up(reduced):
        places = [packet.place() for packet, _ in reduced]
        columns = zip(*[values for _, values in reduced], strict=True)
        torch._foreach_copy_(places, list(next(columns)))
        for column in columns:
            torch._foreach_add_(places, list(column))
        return
    for packet, values in reduced:
        step = packet.job.step
        reduce_list(values, step.op, step.over, out=packet.place())


def _adds_up(reduced: list[tuple[Packet, list[torch.Tensor]]]) -> bool:
    """True if all packets are sums of as many values, in a dtype in which sums are formed."""
    alike = len({len(values) for _, values in reduced}) == 1
    jobs = [packet.job for packet, _ in reduced]
    return alike and all(job.step.op == "sum" and job.dtype in _SUMMED for job in jobs)


def by_place(
    received: Iterable[tuple[Packet, torch.Tensor]],
) -> Iterable[tuple[Packet, list[torch.Tensor]]]:
    """The values of each place in a result, in the order of the mesh."""
    found: dict[tuple[int, Box], tuple[Packet, list[torch.Tensor]]] = {}
    for packet, value in sorted(received, key=lambda pair: pair[0].src):
        key = id(packet.job), packet.parcel.box
        found.setdefault(key, (packet, []))[1].append(value)
    return found.values()
