"""The process engine: one rank per process, collectives through `torch.distributed`.

Only collectives that every backend has are used. What only moves travels as bytes, so any dtype
does. Metadata is known to every rank: a collective that would carry nothing is skipped by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CommunicationError
from ..mesh import Coord, Topology, VirtualMesh
from ..trace import record
from .faults import forgive, wait
from .protocol import Cut, Hop, Locals, Shape
from .reduction import finished, reduce_list, widened

__all__ = ["ProcessEngine", "as_bytes"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class ProcessEngine:
    """Collectives over the process groups that exist: those of the mesh's axes, and the world.

    No group is ever made here. `dist.new_group` needs every rank of the world, also those outside
    the mesh (or, with local synchronization, ranks that have made equally many groups before): a
    deadlock otherwise. What no one group serves goes lane by lane, one after another.
    """

    def all_reduce(self, hop: Hop, local: Locals, op: str) -> list[torch.Tensor]:
        if not hop.targets:
            return []
        value = local[0]
        if value.numel() == 0:
            return [value.clone()]
        if not _backends_reduce(value.dtype, op):
            (parts,) = self.all_gather(hop, local, lambda *_: tuple(value.shape))
            return [reduce_list(parts, op)]
        total = _to_wire(value, op)
        if total.data_ptr() == value.data_ptr():
            total = total.clone()
        for lane in _lanes(hop):
            _run(
                dist.all_reduce, total, _wire_op(value.dtype, op), group=_group(hop.topology, lane)
            )
        return [_from_wire(total, value.dtype, op, len(hop.members(hop.targets[0])))]

    def all_gather(self, hop: Hop, local: Locals, shape: Shape) -> list[list[torch.Tensor]]:
        if not hop.targets:
            return []
        (here,) = hop.targets
        shapes = [_known(shape(member, here)) for member in hop.members(here)]
        width = max(map(prod, shapes))
        if width == 0:
            return [[local[0].new_empty(each) for each in shapes]]
        rows = _padded(as_bytes(local[0]), width * local[0].element_size())
        for lane in reversed(_lanes(hop)):  # inner axes first, so that rows end in group order
            group = _group(hop.topology, lane)
            order = _order(hop.topology, hop.topology.group_coords(here, lane), group)
            gathered = rows.new_empty(len(order) * rows.numel())
            _run(dist.all_gather_single, gathered, rows, group=group)
            rows = gathered.view(len(order), -1)
            if order != sorted(order):
                rows = rows[order]
            rows = rows.view(-1)
        dtype = local[0].dtype
        parts = rows.view(len(shapes), -1)
        return [
            [
                part[: _nbytes(each, dtype)].view(dtype).view(each)
                for part, each in zip(parts, shapes, strict=True)
            ]
        ]

    def reduce_scatter(
        self, hop: Hop, local: Locals, shape: Shape, cut: Cut, op: str
    ) -> list[torch.Tensor]:
        if not hop.targets:
            return []
        (here,) = hop.targets
        value, mine = local[0], _known(shape(here, here))
        lanes = _lanes(hop)
        if len(lanes) != 1 or not _backends_reduce(value.dtype, op):
            (parts,) = self.exchange(hop, local, shape, cut)
            return [reduce_list([part for part in parts if part is not None], op)]
        group, members = _group(hop.topology, lanes[0]), hop.members(here)
        width = max(prod(_known(shape(here, member))) for member in members)
        if width == 0:
            return [value.new_empty(mine)]
        wire = _to_wire(value, op)
        sent = wire.new_zeros((len(members), width))
        for index, member in zip(_order(hop.topology, members, group), members, strict=True):
            part = cut(wire, here, member)
            sent[index, : part.numel()] = part.reshape(-1)
        total = wire.new_empty(width)
        kind = _wire_op(value.dtype, op)
        _run(dist.reduce_scatter_single, total, sent.view(-1), kind, group=group)
        return [_from_wire(total[: prod(mine)].view(mine), value.dtype, op, len(members))]

    def exchange(
        self, hop: Hop, local: Locals, shape: Shape, cut: Cut
    ) -> list[list[torch.Tensor | None]]:
        if not hop.targets:
            return []
        (here,) = hop.targets
        members, value = hop.members(here), local[0]
        held: Mail = {
            (here, member): as_bytes(cut(value, here, member))
            for member in members
            if shape(here, member) is not None
        }
        post = _Post(hop, here, shape, value)
        done: tuple[int, ...] = ()
        for lane in _lanes(hop):
            held = post.forward(held, lane, done)
            done += lane
        pieces: list[torch.Tensor | None] = []
        for member in members:
            size = shape(member, here)
            whole = None if size is None else held[member, here].view(value.dtype).view(size)
            pieces.append(whole)
        return [pieces]

    def check_equal(self, topology: Topology, digest: int) -> bool:
        if topology.coordinate is None:
            return True
        every = tuple(range(topology.ndim))
        record("check", topology, every, 16)
        low = torch.tensor([digest, -digest], device=topology.device_type)
        for lane in _lanes(Hop(topology, every, every, ())):
            _run(dist.all_reduce, low, dist.ReduceOp.MIN, group=_group(topology, lane))
        return bool(low[0] == -low[1])


Mail = dict[tuple[Coord, Coord], torch.Tensor]
"""Bytes on their way, by sender and receiver."""


@dataclass(frozen=True)
class _Post:
    """Brings mail nearer to its receivers, one lane of axes at a time; all sizes are known."""

    hop: Hop
    here: Coord
    shape: Shape
    like: torch.Tensor

    def forward(self, held: Mail, lane: tuple[int, ...], done: tuple[int, ...]) -> Mail:
        """Give each peer along `lane` the mail of receivers that stand where it does on `lane`."""
        topology = self.hop.topology
        group = _group(topology, lane)
        peers = list(topology.group_coords(self.here, lane))
        by_rank = [
            peer for _, peer in sorted(zip(_order(topology, peers, group), peers, strict=True))
        ]
        leaving = [self._mail(self.here, peer, lane, done) for peer in by_rank]
        coming = [self._mail(peer, self.here, lane, done) for peer in by_rank]
        empty = self.like.new_empty(0, dtype=torch.uint8)
        sent = torch.cat([empty, *(held[label] for labels in leaving for label in labels)])
        outgoing = [sum(map(self._nbytes, labels)) for labels in leaving]
        incoming = [sum(map(self._nbytes, labels)) for labels in coming]
        received = sent.new_empty(sum(incoming))
        _run(dist.all_to_all_single, received, sent, incoming, outgoing, group=group)
        arrived: Mail = {}
        start = 0
        for label in (label for labels in coming for label in labels):
            stop = start + self._nbytes(label)
            arrived[label] = received[start:stop]
            start = stop
        return arrived

    def _mail(
        self, src: Coord, dst: Coord, lane: tuple[int, ...], done: tuple[int, ...]
    ) -> list[tuple[Coord, Coord]]:
        """What `src` forwards to `dst`: mail that has come to `src` along the axes in `done`."""
        topology = self.hop.topology
        ahead = [axis for axis in self.hop.axes if axis not in done and axis not in lane]
        return [
            (sender, receiver)
            for sender in topology.group_coords(src, done)
            for receiver in topology.group_coords(dst, ahead)
            if self.shape(sender, receiver) is not None
        ]

    def _nbytes(self, label: tuple[Coord, Coord]) -> int:
        return _nbytes(self.shape(*label), self.like.dtype)


def _run(collective: Callable[..., Any], *args: Any, group: dist.ProcessGroup) -> None:
    """Run a collective to its end, or until another rank is known to have failed."""
    forgive()
    wait(collective(*args, group=group, async_op=True), args[0].device.type == "cpu")


def _lanes(hop: Hop) -> list[tuple[int, ...]]:
    """The axes of `hop` in parts that one existing process group serves each."""
    shape = hop.topology.shape
    axes = tuple(axis for axis in hop.axes if shape[axis] > 1)
    if len(axes) > 1 and prod(shape[axis] for axis in axes) == dist.get_world_size():
        return [axes]
    return [(axis,) for axis in axes]


def _group(topology: Topology, lane: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise CommunicationError("torch.distributed is not initialised any more.")
    assert not isinstance(topology.mesh, VirtualMesh)
    return topology.mesh.get_group(lane[0]) if len(lane) == 1 else world


def _order(topology: Topology, members: Iterable[Coord], group: dist.ProcessGroup) -> list[int]:
    """The rank in `group` of each member: groups are in order of rank, whatever the mesh's is."""
    return [dist.get_group_rank(group, topology.rank_of(member)) for member in members]


def _known(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    return (0,) if shape is None else shape


def _nbytes(shape: tuple[int, ...] | None, dtype: torch.dtype) -> int:
    return 0 if shape is None else prod(shape) * dtype.itemsize


def _dense(value: torch.Tensor) -> torch.Tensor:
    """`value` contiguous, with no conjugation or change of sign still to be done."""
    return value.resolve_conj().resolve_neg().contiguous()


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, without a copy if it is contiguous."""
    flat = _dense(value).view(-1)
    # A single element may keep any stride, but only a stride of 1 can be read as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _padded(flat: torch.Tensor, count: int) -> torch.Tensor:
    if flat.numel() == count:
        return flat
    padded = flat.new_zeros(count)
    padded[: flat.numel()] = flat
    return padded


def _backends_reduce(dtype: torch.dtype, op: str) -> bool:
    """Complex numbers are reduced as pairs of reals, which is no product."""
    return not (dtype.is_complex and op == "product")


def _wire_op(dtype: torch.dtype, op: str) -> dist.ReduceOp.RedOpType:
    if dtype is torch.bool:
        return _OPS[{"sum": "max", "product": "min"}.get(op, op)]
    return _OPS[op]


def _to_wire(value: torch.Tensor, op: str) -> torch.Tensor:
    """`value` in a form that every backend reduces rightly; `_from_wire` undoes it."""
    if value.dtype is torch.bool:
        return _dense(value).view(torch.uint8)
    wide = _dense(widened(value, op))
    if op not in ("max", "min") or not wide.dtype.is_floating_point:
        return wide
    # Backends lose NaN in max and min. Integers in the order of the floats keep it, at either end.
    wide = wide if wide.dtype in _BITS else wide.to(torch.float32)
    bits = _flip_negative(wide.view(_BITS[wide.dtype]))
    limits = torch.iinfo(bits.dtype)
    return bits.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def _from_wire(total: torch.Tensor, dtype: torch.dtype, op: str, count: int) -> torch.Tensor:
    if dtype is torch.bool:
        return total.view(torch.bool)
    if op in ("max", "min") and dtype.is_floating_point:
        total = _flip_negative(total)
        total = total.view(torch.float64 if total.dtype is torch.int64 else torch.float32)
    return finished(total, dtype, op, count)


def _flip_negative(bits: torch.Tensor) -> torch.Tensor:
    """The bits of floats as integers in the same order, and back: negative floats count down."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
