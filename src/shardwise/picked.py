"""What was picked by index from a sharded dim: each element comes from one rank, known to all.

The result is a pending sum, which passes through linear operators. Where it is needed as it is,
though, nothing has to be added up: each rank sends the places that it found, half the bytes of a
reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from .geometry import contiguous_stride, flat_index
from .placement import Placement, Replicate, Shard
from .redistribute import relaid
from .rules import Call
from .spec import DTensorSpec

__all__ = ["Picked", "Picker", "picker"]

Locals = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Picker:
    """A way to pick: the layout of the source along the indexed dim, and where the places of the
    index stand in the result."""

    axes: tuple[int, ...]
    cuts: tuple[int, ...]
    first: int
    count: int


@dataclass(frozen=True)
class Picked:
    """The index of a call, a DTensor, and what is seen of it and of the result as long as neither
    is written."""

    how: Picker
    index: Any
    seen: object

    def brought(self, spec: DTensorSpec, local: Locals) -> tuple[DTensorSpec, Locals]:
        """The pending result with every place on every rank: its layout and local tensors."""
        how = self.how
        index = self.index._locals[0].flatten()
        size = sum(how.cuts)
        ends = torch.tensor(list(accumulate(how.cuts)))
        owner = torch.bucketize(torch.where(index < 0, index + size, index), ends, right=True)
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=len(how.cuts)).tolist()
        starts = [0, *accumulate(counts)]
        sent = self._in_order_of_owners(spec, counts)
        parts = []
        for coord in sent.slots:
            shard = flat_index(coord, spec.topology.shape, how.axes)
            mine = order[starts[shard] : starts[shard + 1]]
            part = local[spec.slot(coord)].flatten(how.first, how.first + how.count - 1)
            parts.append(part.index_select(how.first, mine))
        whole = sent.with_placements(
            [Replicate() if axis in how.axes else p for axis, p in enumerate(sent.placements)]
        )
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        lead = spec.meta.shape[how.first : how.first + how.count]
        found = relaid(sent, whole, tuple(parts))
        places = [Replicate() if axis in how.axes else p for axis, p in enumerate(spec.placements)]
        done = spec.with_placements(places, spec.cuts)
        return done, tuple(
            each.index_select(how.first, back).unflatten(how.first, lead) for each in found
        )

    def _in_order_of_owners(self, spec: DTensorSpec, counts: Sequence[int]) -> DTensorSpec:
        """The layout of what the ranks send: the places of the first rank, then of the second."""
        how = self.how
        shape = [
            *spec.meta.shape[: how.first],
            self.index.numel(),
            *spec.meta.shape[how.first + how.count :],
        ]
        shift = how.count - 1
        places: list[Placement] = []
        for axis, place in enumerate(spec.placements):
            if axis in how.axes:
                places.append(Shard(how.first))
            elif isinstance(place, Shard) and place.dim > how.first:
                places.append(Shard(place.dim - shift))
            else:
                places.append(place)
        own = spec.cuts or (None,) * spec.ndim
        cuts = [*own[: how.first], tuple(counts), *own[how.first + how.count :]]
        meta = spec.meta._replace(shape=tuple(shape), stride=contiguous_stride(shape))
        return DTensorSpec(spec.topology, places, meta, cuts=cuts)


_NAMES = frozenset(("aten::index_select", "aten::gather", "aten::index", "aten::embedding"))


def picker(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Picker | None:
    """How a call picks, if its pending result is made of places that each come from one rank, and
    every rank can read on its own which place comes from whom."""
    if call.op._schema.name not in _NAMES or inputs[0].topology.device_type != "cpu":
        return None
    used = _indexed(call)
    out, source = outputs[0], inputs[0]
    if (
        used is None
        or not used[2]
        or len(inputs) != 2
        or not inputs[1].is_replicated()
        or source.fine is not None
    ):
        return None
    dim, first, count = used
    axes = source.dim_axes[dim]
    ordered = out.meta.stride == contiguous_stride(out.meta.shape)
    shards = [p.dim for p in out.placements if isinstance(p, Shard)]
    if not axes or not ordered or any(first <= d < first + count for d in shards):
        return None
    if tuple(out.sums) != tuple(axes) or source.sums or inputs[1] is not call.specs[1]:
        return None
    if any(not out.placements[axis].is_partial("sum") for axis in axes):
        return None
    return Picker(tuple(axes), tuple(source.dim_cuts[dim]), first, count)


def _indexed(call: Call) -> tuple[int, int, int] | None:
    """The indexed dim, and where the dims of the one index stand in the result."""
    shape = call.shape(0)
    if call.op._schema.name == "aten::embedding":
        return 0, 0, len(call.shape(1))
    if call.op._schema.name == "aten::index":
        used = [dim for dim, each in enumerate(call.get("indices")) if each is not None]
        if len(used) != 1 or call.specs[1].dtype in (torch.bool, torch.uint8):
            return None
        return used[0], used[0], len(call.shape(1))
    if not shape or not call.shape(1):
        return None
    dim = call.get("dim") % len(shape)
    return (dim, 0, len(shape)) if call.op._schema.name == "aten::gather" else (dim, dim, 1)
