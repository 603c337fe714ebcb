"""The process engine: one rank per process, collectives through `torch.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist

from ..errors import CommunicationError
from ..mesh import Coord, Topology, VirtualMesh
from .protocol import Cut, Hop, Locals, Shape

__all__ = ["ProcessEngine"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
"""dtypes that some backends refuse to reduce, and what they are reduced in."""


class ProcessEngine:
    """Collectives over process groups: those of the mesh, or made when first needed."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], dist.ProcessGroup] = {}

    def all_reduce(self, hop: Hop, local: Locals, op: str) -> list[torch.Tensor]:
        if not hop.targets:
            return []
        group = self._group(hop)
        value = _reducible(local[0], op).contiguous()
        if value is local[0]:
            value = value.clone()
        dist.all_reduce(value, _OPS["sum" if op == "avg" else op], group=group)
        return [_reduced(value, local[0].dtype, op, dist.get_world_size(group))]

    def all_gather(self, hop: Hop, local: Locals, shape: Shape) -> list[list[torch.Tensor]]:
        if not hop.targets:
            return []
        (here,) = hop.targets
        group, members = self._group(hop), hop.members(here)
        shapes = [_known(shape(member, here)) for member in members]
        width = max(prod(each) for each in shapes)
        dtype = local[0].dtype
        sent = _padded_bytes(local[0], width)
        gathered = sent.new_empty(len(members) * sent.numel())
        dist.all_gather_into_tensor(gathered, sent, group=group)
        rows = gathered.view(len(members), sent.numel())
        order = self._order(hop, members, group)
        return [
            [
                rows[index][: prod(each) * dtype.itemsize].view(dtype).view(each)
                for index, each in zip(order, shapes, strict=True)
            ]
        ]

    def reduce_scatter(
        self, hop: Hop, local: Locals, shape: Shape, cut: Cut, op: str
    ) -> list[torch.Tensor]:
        if not hop.targets:
            return []
        (here,) = hop.targets
        group, members = self._group(hop), hop.members(here)
        order = self._order(hop, members, group)
        value = _reducible(local[0], op)
        width = max(prod(_known(shape(here, member))) for member in members)
        sent = value.new_zeros((len(members), width))
        for index, member in zip(order, members, strict=True):
            part = cut(value, here, member)
            sent[index, : part.numel()] = part.reshape(-1)
        received = value.new_empty(width)
        total = _OPS["sum" if op == "avg" else op]
        dist.reduce_scatter_tensor(received, sent.view(-1), total, group=group)
        mine = _known(shape(here, here))
        result = received[: prod(mine)].view(mine)
        return [_reduced(result, local[0].dtype, op, len(members))]

    def exchange(
        self, hop: Hop, local: Locals, shape: Shape, cut: Cut
    ) -> list[list[torch.Tensor | None]]:
        if not hop.targets:
            return []
        (here,) = hop.targets
        group, members = self._group(hop), hop.members(here)
        dtype = local[0].dtype
        by_rank = sorted(zip(self._order(hop, members, group), members, strict=True))
        parts = [
            cut(local[0], here, member).contiguous().view(-1).view(torch.uint8)
            for _, member in by_rank
            if shape(here, member) is not None
        ]
        outgoing = [_bytes(shape(here, member), dtype) for _, member in by_rank]
        incoming = [_bytes(shape(member, here), dtype) for _, member in by_rank]
        sent = torch.cat(parts) if parts else local[0].new_empty(0, dtype=torch.uint8)
        received = sent.new_empty(sum(incoming))
        dist.all_to_all_single(received, sent, incoming, outgoing, group=group)
        pieces: dict[Coord, torch.Tensor | None] = {}
        for (_, member), part in zip(by_rank, received.split(incoming), strict=True):
            size = shape(member, here)
            pieces[member] = None if size is None else part.clone().view(dtype).view(size)
        return [[pieces[member] for member in members]]

    def check_equal(self, topology: Topology, digest: int) -> bool:
        if topology.coordinate is None:
            return True
        every = tuple(range(topology.ndim))
        hop = Hop(topology, every, every, ())
        group = self._group(hop)
        low = torch.tensor([digest, -digest], device=_device(topology))
        dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
        return bool(low[0] == -low[1])

    def _group(self, hop: Hop) -> dist.ProcessGroup:
        """The process group of this rank over the axes of `hop`; made once, by its members alone."""
        mesh, here = hop.topology.mesh, hop.topology.coordinate
        assert here is not None and not isinstance(mesh, VirtualMesh)
        if len(hop.axes) == 1:
            return mesh.get_group(hop.axes[0])
        ranks = sorted(hop.topology.rank_of(member) for member in hop.members(here))
        world = dist.group.WORLD
        if world is None:
            raise CommunicationError("torch.distributed is not initialised any more.")
        if ranks == list(range(dist.get_world_size())):
            return world
        key = (world, hop.topology, hop.axes)
        found = self._groups.get(key)
        if found is None:
            found = dist.new_group(ranks, use_local_synchronization=True)
            self._groups[key] = found
        return found

    def _order(
        self, hop: Hop, members: Sequence[Coord], group: dist.ProcessGroup
    ) -> list[int]:
        """The rank in `group` of each member."""
        return [dist.get_group_rank(group, hop.topology.rank_of(member)) for member in members]


def _device(topology: Topology) -> torch.device:
    return torch.device(topology.device_type)


def _known(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    return (0,) if shape is None else shape


def _bytes(shape: tuple[int, ...] | None, dtype: torch.dtype) -> int:
    return 0 if shape is None else prod(shape) * dtype.itemsize


def _padded_bytes(value: torch.Tensor, width: int) -> torch.Tensor:
    """The elements as bytes, padded to `width` elements: any dtype, any size travels like this."""
    flat = value.contiguous().view(-1).view(torch.uint8)
    wanted = width * value.element_size()
    if flat.numel() == wanted:
        return flat
    padded = flat.new_zeros(wanted)
    padded[: flat.numel()] = flat
    return padded


def _reducible(value: torch.Tensor, op: str) -> torch.Tensor:
    wider = _WIDER.get(value.dtype)
    return value if wider is None else value.to(wider)


def _reduced(value: torch.Tensor, dtype: torch.dtype, op: str, count: int) -> torch.Tensor:
    if op == "avg":
        value = value.div_(count)
    return value if value.dtype is dtype else value.to(dtype)
