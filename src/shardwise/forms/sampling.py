"""Where the elements of given ranks are among sorted shards, as far as samples tell.

Elements are compared as integers in the same order; of equal ones those of earlier shards come
first. Each shard shows some of its own, evenly spread. What lies between two of them is unknown,
so that every rank knows of each shard how many elements come before a rank for sure, and how many
may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt, prod
from typing import Any, NamedTuple

import torch

from ..geometry import Box
from ..spec import DTensorSpec
from .shards import candidates

__all__ = ["BITS", "Bounds", "Keys", "bounds", "keys_of", "known", "lines", "owner_of", "spacing"]

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131
"""Multiples of it have high bits that depend on all bits of a number."""
Keys = Callable[[torch.Tensor], torch.Tensor]


def known(dtype: torch.dtype) -> bool:
    """Whether there are integers in the order of elements of this dtype."""
    return not dtype.is_complex and dtype not in (
        torch.bool,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    )


def keys_of(part: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the elements; NaN is the largest, and zeros are equal."""
    if not part.dtype.is_floating_point:
        return part.to(torch.int64)
    most = (1 << (8 * part.dtype.itemsize - 1)) - 1
    bits = (part + 0.0).contiguous().view(BITS[part.dtype.itemsize]).to(torch.int64)
    return torch.where(bits < 0, bits ^ most, bits).masked_fill(part.isnan(), most)


def owner_of(keys: torch.Tensor, count: int) -> torch.Tensor:
    """A rank out of so many that a value tells, whoever has it."""
    return ((keys * _ODD) >> 40) % count


def lines(part: torch.Tensor, dim: int) -> torch.Tensor:
    """A row for each column of a tensor along `dim`."""
    turned = part.movedim(dim, -1)
    return turned.reshape(prod(turned.shape[:-1]), turned.shape[-1])


def spacing(size: int, count: int) -> int:
    """How many samples a shard shows, so that they are about as many as what they leave unknown
    of `size` elements in `count` shards."""
    return 2 * isqrt(size // count) + 1


class Bounds(NamedTuple):
    """For each shard, row and rank: how many elements come before it for sure, and at most."""

    low: torch.Tensor
    high: torch.Tensor


class _Samples(NamedTuple):
    """For the samples of all shards in turn: how many there are of each, where each is in its
    shard, and how far it is from the sample before and to the next."""

    counts: list[int]
    place: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor

    @staticmethod
    def of(sizes: Sequence[int], most: int) -> _Samples:
        places = [_spread(size, most) for size in sizes]
        before, after = [], []
        for place, size in zip(places, sizes, strict=True):
            before.append(place.diff(prepend=torch.tensor([-1])))
            after.append(place.diff(append=torch.tensor([size])))
        parts = map(torch.cat, (places, before, after))
        return _Samples([len(place) for place in places], *parts)


def _spread(size: int, most: int) -> torch.Tensor:
    """Places in the middle of equal blocks, no more than `most`."""
    count = min(size, most)
    return (2 * torch.arange(count) + 1) * size // (2 * max(count, 1))


def bounds(
    op: Any,
    x: Any,
    dim: int,
    ordered: Sequence[torch.Tensor],
    keys: Keys,
    ranks: torch.Tensor,
    most: int,
) -> list[Bounds]:
    """What is known on each rank of the shards that have pieces of its rows.

    `ordered` are the rows of each local tensor, each in order; `ranks` are asked for in every row.
    """
    spec: DTensorSpec = x._spec
    sizes = spec.dim_cuts[dim]
    each = iter(ordered)

    def local(part: torch.Tensor, box: Box) -> tuple[torch.Tensor]:
        rows = next(each)
        shown = rows[:, _spread(rows.shape[1], most).to(rows.device)]
        rest = [size for d, size in enumerate(part.shape) if d != dim]
        return (shown.view(*rest, shown.shape[1]).movedim(-1, dim),)

    (found,) = candidates(op, x, [dim], most, local, [x.dtype])
    samples = _Samples.of(sizes, most)
    made = {}
    for coord in spec.slots:
        slot = found._spec.slot(coord)
        if slot not in made:
            rows = keys(lines(found._locals[slot], dim)).cpu()
            made[slot] = _bounds(rows, samples, sizes, ranks)
    return [made[found._spec.slot(coord)] for coord in spec.slots]


def _bounds(
    rows: torch.Tensor, samples: _Samples, sizes: Sequence[int], ranks: torch.Tensor
) -> Bounds:
    order = rows.sort(stable=True).indices
    least = samples.before[order].cumsum(-1) - 1
    steps = samples.after[order]
    starts = samples.place.split(samples.counts)
    most = steps.cumsum(-1) - steps + sum(int(place[0]) for place in starts if len(place))
    asked = ranks.expand(len(rows), len(ranks)).contiguous()
    surely, maybe = torch.searchsorted(most, asked), torch.searchsorted(least, asked)
    spots = torch.empty_like(order).scatter_(1, order, torch.arange(rows.shape[1]).expand_as(order))
    low, high = [], []
    for place, size, own in zip(starts, sizes, spots.split(samples.counts, 1), strict=True):
        own = own.contiguous()
        ends = torch.cat([place.new_zeros(1), place + 1])
        low.append(ends[torch.searchsorted(own, surely)])
        high.append(torch.cat([place, place.new_tensor([size])])[torch.searchsorted(own, maybe)])
    return Bounds(torch.stack(low), torch.stack(high))
