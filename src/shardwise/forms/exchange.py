"""Owner exchange: each element goes to the shard that owns it, and one answer comes back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from ..errors import OutOfRangeError
from ..layout.geometry import Cuts
from ..layout.spec import DTensorSpec
from ..storage.wrapper import Locals
from .shards import sent_on, told


def index_dtype(size: int) -> torch.dtype:
    """The narrower of int32 and int64 that holds the indices of a dim of `size`."""
    return torch.int32 if size < 1 << 31 else torch.int64


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
