"""Running the steps of a redistribution on local tensors, through the engine of the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from ..engine import Cut, Hop, Locals, Shape, engine_of, identity
from ..geometry import Box, box_numel, box_shape, intersect, is_dense, relative
from ..mesh import Coord
from ..trace import is_heard, record
from .plan import Step

__all__ = ["assemble", "cut_for", "in_order", "ordered", "piece_of", "run_steps"]


def run_steps(
    steps: Sequence[Step], local: Locals, stride: Sequence[int], *, fresh: bool = False
) -> tuple[torch.Tensor, ...]:
    """The local tensors after `steps`. With `fresh` none of them shares memory with the source.

    `stride` is that of the global tensor: local tensors are made with its order of dims.
    """
    now = tuple(local)
    for step in steps:
        if not step.is_local and is_heard():
            record(step.kind, step.src.topology, step.axes, step.elements_received * _itemsize(now))
        now = in_order(_run(step, now), stride)
    if fresh and all(step.kind == "slice" for step in steps):
        return tuple(part.clone() for part in now)
    return now


def _run(step: Step, local: Locals) -> list[torch.Tensor]:
    if step.kind == "slice":
        return _slice(step, local)
    if step.kind == "make_partial":
        return _make_partial(step, local)
    engine = engine_of(step.src.topology)
    hop = Hop(step.src.topology, step.axes, step.src.axes, step.dst.axes)
    if step.kind == "all_reduce":
        return engine.all_reduce(hop, local, step.op)
    if step.kind == "reduce_scatter":
        return engine.reduce_scatter(hop, local, _shape(step), cut_for(step), step.op)
    received: Sequence[Sequence[torch.Tensor | None]]
    if step.kind == "all_gather":
        received = engine.all_gather(hop, local, lambda src, _: box_shape(step.src.box(src)))
    else:
        received = engine.exchange(hop, local, _shape(step), cut_for(step))
    pairs: Iterator[tuple[Coord, Sequence[torch.Tensor | None]]] = zip(
        hop.targets, received, strict=True
    )
    return [assemble(step, target, parts, local[0]) for target, parts in pairs]


def _itemsize(local: Locals) -> int:
    return local[0].element_size() if local else 0


def piece_of(step: Step, src: Coord, dst: Coord) -> Box:
    """The region that one rank holds before `step` and another after it."""
    return intersect(step.src.box(src), step.dst.box(dst))


def _shape(step: Step) -> Shape:
    """The shape of what one rank sends to another in `step`."""

    def shape(src: Coord, dst: Coord) -> tuple[int, ...] | None:
        if step.kind == "exchange" and not step.sends(src, dst):
            return None
        return box_shape(piece_of(step, src, dst))

    return shape


def cut_for(step: Step) -> Cut:
    """How a rank cuts out of its local tensor what another needs in `step`."""

    def cut(value: torch.Tensor, src: Coord, dst: Coord) -> torch.Tensor:
        return _narrow(value, relative(piece_of(step, src, dst), step.src.box(src)))

    return cut


def _narrow(value: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, stop) in enumerate(box):
        if stop - start != value.shape[dim]:
            value = value.narrow(dim, start, stop - start)
    return value


def _slice(step: Step, local: Locals) -> list[torch.Tensor]:
    parts = []
    for coord in step.dst.slots:
        held, wanted = step.src.box(coord), step.dst.box(coord)
        value = local[step.src.slot(coord)]
        if box_numel(wanted):
            parts.append(_narrow(value, relative(wanted, held)))
        else:
            parts.append(value.new_empty(box_shape(wanted)))
    return parts


def _make_partial(step: Step, local: Locals) -> list[torch.Tensor]:
    """The value on coordinate 0 of each new pending axis, the identity elsewhere (avg: everywhere).

    A rank that holds only a piece of its new box pads it with the identity instead: the pieces of
    the members make up the whole.
    """
    have = dict(step.src.partial)
    made = [(axis, op) for axis, op in step.dst.partial if have.get(axis) != op]
    sharded = {axis for dim in step.src.dims for axis in dim.axes}
    parts = []
    for coord in step.dst.slots:
        value = local[step.src.slot(coord)]
        held, wanted = step.src.box(coord), step.dst.box(coord)
        result = value.new_empty(box_shape(wanted))
        if held != wanted:
            result.fill_(identity(made[0][1], value.dtype))
        _narrow(result, relative(held, wanted)).copy_(value)
        outer_is_identity = False
        for axis, op in step.dst.partial:
            # Below an identity the inner axes reduce to it: its own value on 0, theirs elsewhere.
            new = (axis, op) in made and axis not in sharded
            if coord[axis] and op != "avg" and (new or outer_is_identity):
                result.fill_(identity(op, value.dtype))
                outer_is_identity = True
        parts.append(result)
    return parts


def assemble(
    step: Step, target: Coord, parts: Sequence[torch.Tensor | None], like: torch.Tensor
) -> torch.Tensor:
    """Put the pieces that `target` received into its box."""
    box = step.dst.box(target)
    members = list(step.src.topology.group_coords(target, step.axes))
    result = like.new_empty(box_shape(box))
    for member, part in zip(members, parts, strict=True):
        if part is not None and part.numel():
            _narrow(result, relative(piece_of(step, member, target), box)).copy_(part)
    return result


def in_order(parts: Sequence[torch.Tensor], stride: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Local tensors with their dims in the order of a global tensor with these strides."""
    order = sorted(range(len(stride)), key=lambda dim: -stride[dim])
    return tuple(ordered(part, order) for part in parts)


def ordered(part: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """`part` dense in memory, with its dims in the order that the global tensor has them."""
    if is_dense(part.shape, part.stride()):
        sizes = [(part.stride(d), d) for d in order if part.shape[d] != 1]
        if all(a[0] >= b[0] for a, b in pairwise(sizes)):
            return part
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return part.permute(*order).contiguous().permute(*inverse)
