"""The process engine: one rank per process, collectives through `torch.distributed`.

Only collectives that every backend has are used. What only moves travels as bytes, so any dtype
does. Metadata is known to every rank: a collective that would carry nothing is skipped by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist

from ..errors import CommunicationError
from ..mesh import Coord, Topology, VirtualMesh
from .protocol import Cut, Hop, Locals, Shape
from .reduction import finished, reduce_list, widened

__all__ = ["ProcessEngine"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class ProcessEngine:
    """Collectives over process groups: those of the mesh, or made when first needed."""

    def __init__(self) -> None:
        self._of_axes: dict[tuple[object, ...], dist.ProcessGroup] = {}
        self._of_ranks: dict[tuple[object, ...], dist.ProcessGroup] = {}

    def all_reduce(self, hop: Hop, local: Locals, op: str) -> list[torch.Tensor]:
        if not hop.targets:
            return []
        value = local[0]
        if value.numel() == 0:
            return [value.clone()]
        if not _backends_reduce(value.dtype, op):
            (parts,) = self.all_gather(hop, local, lambda *_: tuple(value.shape))
            return [reduce_list(parts, op)]
        group = self._group(hop)
        total = _to_wire(value, op)
        if total.data_ptr() == value.data_ptr():
            total = total.clone()
        dist.all_reduce(total, _wire_op(value.dtype, op), group=group)
        return [_from_wire(total, value.dtype, op, dist.get_world_size(group))]

    def all_gather(self, hop: Hop, local: Locals, shape: Shape) -> list[list[torch.Tensor]]:
        if not hop.targets:
            return []
        (here,) = hop.targets
        group, members = self._group(hop), hop.members(here)
        shapes = [_known(shape(member, here)) for member in members]
        width = max(map(prod, shapes))
        if width == 0:
            return [[local[0].new_empty(each) for each in shapes]]
        sent = _padded(_as_bytes(local[0]), width * local[0].element_size())
        gathered = sent.new_empty(len(members) * sent.numel())
        dist.all_gather_into_tensor(gathered, sent, group=group)
        rows = gathered.view(len(members), sent.numel())
        order = _order(hop, members, group)
        dtype = local[0].dtype
        return [
            [
                rows[index, : _nbytes(each, dtype)].view(dtype).view(each)
                for index, each in zip(order, shapes, strict=True)
            ]
        ]

    def reduce_scatter(
        self, hop: Hop, local: Locals, shape: Shape, cut: Cut, op: str
    ) -> list[torch.Tensor]:
        if not hop.targets:
            return []
        (here,) = hop.targets
        value, mine = local[0], _known(shape(here, here))
        if not _backends_reduce(value.dtype, op):
            (parts,) = self.exchange(hop, local, shape, cut)
            return [reduce_list([part for part in parts if part is not None], op)]
        group, members = self._group(hop), hop.members(here)
        width = max(prod(_known(shape(here, member))) for member in members)
        if width == 0:
            return [value.new_empty(mine)]
        wire = _to_wire(value, op)
        sent = wire.new_zeros((len(members), width))
        for index, member in zip(_order(hop, members, group), members, strict=True):
            part = cut(wire, here, member)
            sent[index, : part.numel()] = part.reshape(-1)
        total = wire.new_empty(width)
        kind = _wire_op(value.dtype, op)
        dist.reduce_scatter_tensor(total, sent.view(-1), kind, group=group)
        return [_from_wire(total[: prod(mine)].view(mine), value.dtype, op, len(members))]

    def exchange(
        self, hop: Hop, local: Locals, shape: Shape, cut: Cut
    ) -> list[list[torch.Tensor | None]]:
        if not hop.targets:
            return []
        (here,) = hop.targets
        group, members = self._group(hop), hop.members(here)
        value = local[0]
        by_rank = sorted(zip(_order(hop, members, group), members, strict=True))
        leaving = [shape(here, member) for _, member in by_rank]
        coming = [shape(member, here) for _, member in by_rank]
        parts = [
            _as_bytes(cut(value, here, member))
            for (_, member), size in zip(by_rank, leaving, strict=True)
            if size is not None
        ]
        sent = torch.cat(parts) if parts else value.new_empty(0, dtype=torch.uint8)
        outgoing = [_nbytes(size, value.dtype) for size in leaving]
        incoming = [_nbytes(size, value.dtype) for size in coming]
        received = sent.new_empty(sum(incoming))
        dist.all_to_all_single(received, sent, incoming, outgoing, group=group)
        pieces: dict[Coord, torch.Tensor | None] = {}
        stops = accumulate(incoming)
        for (_, member), size, count, stop in zip(by_rank, coming, incoming, stops, strict=True):
            part = received[stop - count : stop]
            pieces[member] = None if size is None else part.view(value.dtype).view(size)
        return [[pieces[member] for member in members]]

    def check_equal(self, topology: Topology, digest: int) -> bool:
        if topology.coordinate is None:
            return True
        every = tuple(range(topology.ndim))
        group = self._group(Hop(topology, every, every, ()))
        low = torch.tensor([digest, -digest], device=topology.device_type)
        dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
        return bool(low[0] == -low[1])

    def _group(self, hop: Hop) -> dist.ProcessGroup:
        """The process group of this rank over the axes of `hop`; made once, by its members."""
        world = dist.group.WORLD
        if world is None:
            raise CommunicationError("torch.distributed is not initialised any more.")
        key = (world, hop.topology, hop.axes)
        found = self._of_axes.get(key)
        if found is None:
            found = self._of_axes[key] = self._find_group(hop, world)
        return found

    def _find_group(self, hop: Hop, world: dist.ProcessGroup) -> dist.ProcessGroup:
        mesh, here = hop.topology.mesh, hop.topology.coordinate
        assert here is not None and not isinstance(mesh, VirtualMesh)
        if len(hop.axes) == 1:
            return mesh.get_group(hop.axes[0])
        ranks = sorted(hop.topology.rank_of(member) for member in hop.members(here))
        if ranks == list(range(dist.get_world_size())):
            return world
        key = (world, *ranks)
        if key not in self._of_ranks:
            self._of_ranks[key] = dist.new_group(ranks, use_local_synchronization=True)
        return self._of_ranks[key]


def _order(hop: Hop, members: Sequence[Coord], group: dist.ProcessGroup) -> list[int]:
    """The rank in `group` of each member: groups are in order of rank, whatever the mesh's is."""
    return [dist.get_group_rank(group, hop.topology.rank_of(member)) for member in members]


def _known(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    return (0,) if shape is None else shape


def _nbytes(shape: tuple[int, ...] | None, dtype: torch.dtype) -> int:
    return 0 if shape is None else prod(shape) * dtype.itemsize


def _dense(value: torch.Tensor) -> torch.Tensor:
    """`value` contiguous, with no conjugation or change of sign still to be done."""
    return value.resolve_conj().resolve_neg().contiguous()


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    return _dense(value).view(-1).view(torch.uint8)


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
