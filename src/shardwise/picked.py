"""What was picked by index from a sharded dim: each element comes from one rank, known to all.

The result is a pending sum, which passes through linear operators. Where it is needed as it is,
though, nothing has to be added up: each rank sends the places that it found, half the bytes of a
reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, ClassVar

import torch

from .geometry import contiguous_stride, flat_index
from .placement import Placement, Replicate, Shard
from .redistribute import DimMap, relaid
from .rules import Call
from .rules.indexing import has_mask
from .spec import DTensorSpec
from .windows import bring_all

__all__ = ["Picked", "Picker", "picker"]

Locals = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Picker:
    """A way to pick: the layout of the source along the indexed dim, where the places of the index
    stand in the result, and which operand is the index."""

    axes: tuple[int, ...]
    cuts: tuple[int, ...]
    first: int
    count: int
    operand: int = 1


@dataclass(frozen=True)
class Picked:
    """The index of a call, a DTensor, and what is seen of it and of the result as long as neither
    is written."""

    how: Picker
    index: Any
    seen: object
    size: ClassVar[None] = None  # it did not grow

    def brought(
        self, spec: DTensorSpec, local: Locals, target: DTensorSpec
    ) -> tuple[DTensorSpec, Locals]:
        """The pending result with nothing pending: its layout and local tensors.

        Where `target` cuts the places of the index along the axes that are pending, each rank gets
        its own; else every rank gets all.
        """
        how = self.how
        owner = self._owner(spec.meta.shape[how.first : how.first + how.count])
        places = [Replicate() if axis in how.axes else p for axis, p in enumerate(spec.placements)]
        many = len(how.cuts) > _MOST_SHARDS or not len(owner)
        for dim in range(how.first, how.first + how.count):
            cut = [Shard(dim) if axis in how.axes else p for axis, p in enumerate(places)]
            if target.placements == tuple(cut) and target.fine is None and not many:
                return target, self._apart(spec, local, target, owner, dim)
        return spec.with_placements(places, spec.cuts), self._everywhere(spec, local, owner)

    def _owner(self, lead: Sequence[int]) -> torch.Tensor:
        """For each place of the index, which is repeated to have the shape `lead`, the shard that
        it is picked from."""
        index, cuts = self.index._locals[0].expand(lead).flatten(), self.how.cuts
        ends = torch.tensor(list(accumulate(cuts)))
        return torch.bucketize(torch.where(index < 0, index + sum(cuts), index), ends, right=True)

    def _sent(
        self, spec: DTensorSpec, local: Locals, order: torch.Tensor, counts: Sequence[int]
    ) -> tuple[DTensorSpec, Locals]:
        """What the ranks have to give: the places of the first, then of the second."""
        how = self.how
        starts = [0, *accumulate(counts)]
        sent = self._in_order_of_owners(spec, counts)
        parts = []
        for coord in sent.slots:
            shard = flat_index(coord, spec.topology.shape, how.axes)
            part = local[spec.slot(coord)].flatten(how.first, how.first + how.count - 1)
            parts.append(part.index_select(how.first, order[starts[shard] : starts[shard + 1]]))
        return sent, tuple(parts)

    def _everywhere(self, spec: DTensorSpec, local: Locals, owner: torch.Tensor) -> Locals:
        how = self.how
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=len(how.cuts)).tolist()
        sent, parts = self._sent(spec, local, order, counts)
        places = [Replicate() if axis in how.axes else p for axis, p in enumerate(sent.placements)]
        found = relaid(sent, sent.with_placements(places, _but(sent.cuts, how.first)), parts)
        lead = spec.meta.shape[how.first : how.first + how.count]
        return tuple(
            each.index_select(how.first, torch.argsort(order)).unflatten(how.first, lead)
            for each in found
        )

    def _apart(
        self, spec: DTensorSpec, local: Locals, target: DTensorSpec, owner: torch.Tensor, dim: int
    ) -> Locals:
        """Each place on the shard that `target` has it on, which is cut on `dim`: what one shard
        gives another is a window of what it gives."""
        how, shards = self.how, len(self.how.cuts)
        lead = spec.meta.shape[how.first : how.first + how.count]
        inner = prod(spec.meta.shape[dim + 1 : how.first + how.count])
        ends = torch.tensor(list(accumulate(target.dim_cuts[dim])))
        taker = torch.bucketize(
            torch.arange(len(owner)) // inner % lead[dim - how.first], ends, right=True
        )
        pair = owner * shards + taker
        order = torch.argsort(pair, stable=True)
        counts = torch.bincount(pair, minlength=shards * shards).tolist()
        ends_of = list(accumulate(counts))
        windows = [(end - count, end) for end, count in zip(ends_of, counts, strict=True)]
        given = [sum(counts[row * shards : (row + 1) * shards]) for row in range(shards)]
        sent, parts = self._sent(spec, local, order, given)
        tables = [tuple(windows[row * shards : (row + 1) * shards]) for row in range(shards)]
        came = bring_all([(sent, parts, {how.first: DimMap(how.axes, table)}) for table in tables])
        made = []
        for slot, coord in enumerate(target.slots):
            shard = flat_index(coord, spec.topology.shape, how.axes)
            held = torch.cat([order[slice(*table[shard])] for table in tables])
            rows = torch.cat([each[slot] for each in came], how.first)
            rows = rows.index_select(how.first, torch.argsort(held))
            own = target.local_shape(coord)[how.first : how.first + how.count]
            made.append(rows.unflatten(how.first, own))
        return tuple(made)

    def _in_order_of_owners(self, spec: DTensorSpec, counts: Sequence[int]) -> DTensorSpec:
        """The layout of what the ranks send: the places of the first rank, then of the second."""
        how = self.how
        shape = [
            *spec.meta.shape[: how.first],
            sum(counts),
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


def _but(cuts: Any, dim: int) -> Any:
    """The cuts of all dims but one."""
    return None if cuts is None else [None if d == dim else own for d, own in enumerate(cuts)]


_MOST_SHARDS = 16
"""With more of them the plan of who gives what to whom costs more than it saves."""
_NAMES = frozenset(("aten::index_select", "aten::gather", "aten::index", "aten::embedding"))


def picker(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Picker | None:
    """How a call picks, if its pending result is made of places that each come from one rank, and
    every rank can read on its own which place comes from whom."""
    if call.op._schema.name not in _NAMES or inputs[0].topology.device_type != "cpu":
        return None
    out, source = outputs[0], inputs[0]
    if source.fine is not None or any(not each.is_replicated() for each in inputs[1:]):
        return None
    used = _indexed(call, source)
    if used is None or not used[2]:
        return None
    dim, first, count, operand = used
    axes = source.dim_axes[dim]
    ordered = out.meta.stride == contiguous_stride(out.meta.shape)
    shards = [p.dim for p in out.placements if isinstance(p, Shard)]
    if not axes or not ordered or any(first <= d < first + count for d in shards):
        return None
    if tuple(out.sums) != tuple(axes) or source.sums:
        return None
    if any(not out.placements[axis].is_partial("sum") for axis in axes):
        return None
    return Picker(tuple(axes), tuple(source.dim_cuts[dim]), first, count, operand)


def _indexed(call: Call, source: DTensorSpec) -> tuple[int, int, int, int] | None:
    """The indexed dim that is in shards, where the dims of the indices stand in the result, and
    which operand is the index of that dim."""
    shape = call.shape(0)
    if call.op._schema.name == "aten::embedding":
        return 0, 0, len(call.shape(1)), 1
    if call.op._schema.name == "aten::index":
        given = call.get("indices")
        used = [dim for dim, each in enumerate(given) if each is not None]
        cut = [dim for dim in used if source.dim_axes[dim]]
        if len(cut) != 1 or has_mask(call):
            return None
        first = used[0] if used[-1] - used[0] == len(used) - 1 else 0
        count = max(len(call.shape(given[dim])) for dim in used)
        return cut[0], first, count, int(given[cut[0]])
    if not shape or not call.shape(1):
        return None
    dim = call.get("dim") % len(shape)
    return (dim, 0, len(shape), 1) if call.op._schema.name == "aten::gather" else (dim, dim, 1, 1)
