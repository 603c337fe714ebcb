"""Owner exchange: each element goes to the shard that owns it, and one answer comes back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from ..errors import OutOfRangeError
from ..layout.geometry import Cuts, contiguous_stride
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute import DimMap
from ..storage.halo import fetch_all
from ..storage.ragged import gather_plain
from ..storage.wrapper import Locals, wrap


def index_dtype(size: int) -> torch.dtype:
    """The narrower of int32 and int64 that holds the indices of a dim of `size`."""
    return torch.int32 if size < 1 << 31 else torch.int64


def told(op: Any, spec: DTensorSpec, own: Sequence[torch.Tensor]) -> list[Any]:
    """The integers of every shard as lists, on every rank; `own` are those of the local shards."""
    shape = (spec.num_shards, *own[0].shape)
    meta = TensorMeta(shape, contiguous_stride(shape), torch.int64)
    parts = tuple(part.unsqueeze(0) for part in own)
    whole = gather_plain(op, wrap(DTensorSpec(spec.topology, _on_dim_0(spec), meta), parts))
    made: list[Any] = whole.tolist()
    return made


def sent_on(
    op: Any, like: DTensorSpec, vectors: Sequence[tuple[Locals, Sequence[Cuts]]]
) -> list[list[list[torch.Tensor]]]:
    """For each vector and each local shard the elements that the shards have for it, in one
    collective.

    Vectors may have rows. They have as many shards as `like`. Each is given by its local tensors
    and, for each of its shards, where the elements for the first shard end, for the second, and so
    on.
    """
    wanted = []
    for parts, splits in vectors:
        cuts = tuple(ends[-1] for ends in splits)
        shape = (sum(cuts), *parts[0].shape[1:])
        meta = TensorMeta(shape, contiguous_stride(shape), parts[0].dtype)
        rest = [None] * (len(shape) - 1)
        spec = DTensorSpec(like.topology, _on_dim_0(like), meta, cuts=[cuts, *rest])
        for (start, _), ends in zip(spec.pieces(0), splits, strict=True):
            firsts = (0, *ends[:-1])
            table = tuple((start + a, start + b) for a, b in zip(firsts, ends, strict=True))
            wanted.append((spec, parts, {0: DimMap(spec.dim_axes[0], table)}))
    found = iter(fetch_all(op, wanted))
    made = []
    for parts, splits in vectors:
        pieces = [next(found) for _ in splits]
        made.append([[piece[slot] for piece in pieces] for slot in range(len(parts))])
    return made


def _on_dim_0(spec: DTensorSpec) -> list[Placement]:
    """Dim 0 sharded on the axes on which `spec` is sharded."""
    return [Shard(0) if place.is_shard() else Replicate() for place in spec.placements]


class Exchange(NamedTuple):
    """Vectors of which each element is sent to the shard that owns it.

    The vectors are sharded as `spec` is. `orders` sorts the elements of each local vector by owner,
    `counts[i][j]` is how many elements shard i sends to shard j.
    """

    op: Any
    spec: DTensorSpec
    orders: list[torch.Tensor]
    counts: list[list[int]]

    def send(self, *vectors: Sequence[torch.Tensor]) -> list[Locals]:
        """What arrives of each vector, in order of the sending shards; all in one collective."""
        ordered = [
            tuple(part[order] for part, order in zip(parts, self.orders, strict=True))
            for parts in vectors
        ]
        return self._ship(ordered, self.counts)

    def reply(self, answers: Sequence[torch.Tensor]) -> Locals:
        """One answer for each element that arrived, in the order of the elements sent."""
        (found,) = self._ship([tuple(answers)], list(zip(*self.counts, strict=True)))
        return tuple(
            torch.empty_like(new).index_copy_(0, order, new)
            for order, new in zip(self.orders, found, strict=True)
        )

    def _ship(self, vectors: Sequence[Locals], counts: Sequence[Sequence[int]]) -> list[Locals]:
        ends: list[Cuts] = [tuple(accumulate(row)) for row in counts]
        came = sent_on(self.op, self.spec, [(parts, ends) for parts in vectors])
        return [tuple(torch.cat(pieces) for pieces in each) for each in came]


def exchange(
    op: Any,
    index: DTensorSpec,
    indices: Sequence[torch.Tensor],
    owned: DTensorSpec,
    dim: int,
    wrapped: bool = False,
) -> Exchange:
    """The exchange of `indices` of a sharded dim of `owned`; they are sharded as `index` is.

    An index that is out of range raises on every rank. If they are `wrapped`, the size of the dim
    was added to negative ones.
    """
    stops = torch.tensor(list(accumulate(owned.dim_cuts[dim])), device=indices[0].device)
    orders, facts = [], []
    for part in indices:
        owner = torch.bucketize(part, stops, right=True).clamp_(max=len(stops) - 1)
        orders.append(owner.sort(stable=True).indices)
        limits = torch.stack(torch.aminmax(torch.cat([part, part.new_zeros(1)])))
        facts.append(torch.cat([limits, torch.bincount(owner, minlength=len(stops))]))
    table = told(op, index, facts)
    low, high = min(row[0] for row in table), max(row[1] for row in table)
    size = owned.shape[dim]
    if low < 0 or high >= size:
        bad = high if high >= size else low - size * wrapped
        raise OutOfRangeError(f"index {bad} is out of bounds for dimension {dim} with size {size}")
    return Exchange(op, index, orders, [row[2:] for row in table])


def exchange_cost(index: DTensorSpec, *widths: int) -> tuple[int, ...]:
    """The bytes received for the table of counts, and for each vector that has `width` bytes for
    an index."""
    count = index.num_shards
    received = prod(index.largest_shape) * (count - 1) // count
    return (8 * (count - 1) * (count + 2), *(received * width for width in widths))
