"""Where the elements of given ranks are among sorted shards, as far as samples tell.

Elements are compared as integers in the same order; of equal ones those of earlier shards come
first. Each shard shows some of its own, evenly spread. What lies between two of them is unknown,
so that all ranks know of each shard how many elements come before a rank for sure, and which are
left to look at. Samples of those tell more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt, prod
from typing import Any, NamedTuple

import torch

from ..layout.cost import Link
from ..layout.geometry import all_coords
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..storage.wrapper import wrap
from .shards import gathered, shard_of

__all__ = [
    "BITS",
    "Keys",
    "Search",
    "bits_of",
    "keys_of",
    "known",
    "lines",
    "narrowed",
    "owner_of",
    "rounds",
    "spacing",
]

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


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """The narrowest integers for what stands for elements of a dtype."""
    return torch.int16 if dtype is torch.uint8 else BITS[dtype.itemsize]


def spacing(size: int, count: int) -> int:
    """How many samples a shard shows, so that they are about as many as what they leave unknown
    of `size` elements in `count` shards."""
    return 2 * isqrt(size // count) + 1


def rounds(
    size: int,
    count: int,
    rows: int,
    ranks: int,
    width: int,
    links: Sequence[Link],
    groups: int = 1,
) -> tuple[int, list[int]]:
    """How many samples each shard shows in turn, till it is least to send what is left, and the
    price of all that: for some ranks of each of `rows`, of `size` elements in `count` shards.

    There are so many `groups` of ranks that have other rows.
    """
    found = []
    for number in (1, 2, 3):
        most = 2 << -(-(size // count).bit_length() // (number + 1))
        asked = [rows, *[rows * ranks] * (number - 1)]
        left = size * 3**number // most**number
        steps = [each * (count - 1) * most * width for each in asked]
        steps.append(groups * rows * ranks * left * width)
        if groups > 1:
            steps.append(16 * groups * count * rows * ranks)
        found.append((max(sum(map(link.price, steps)) for link in links), [most] * number))
    return min(found)


class Search(NamedTuple):
    """Where elements of some ranks are to be found in rows.

    `row` is the row of each line. `low` and `high`, for each shard and line, say how many elements
    come before those ranks for sure, and at most. A line is about the ranks from `first` to `last`,
    or several such intervals.
    """

    row: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def begin(sizes: Sequence[int], first: torch.Tensor, last: torch.Tensor) -> Search:
        """Intervals of ranks for each row; nothing is known."""
        high = torch.tensor(sizes).unsqueeze(1).expand(len(sizes), len(first))
        return Search(torch.arange(len(first)), torch.zeros_like(high), high, first, last)

    def spots(self, most: int) -> torch.Tensor:
        """Places in the middle of blocks of what is unknown, for each shard and line."""
        width = (self.high - self.low).unsqueeze(-1)
        return self.low.unsqueeze(-1) + (2 * torch.arange(most) + 1) * width // (2 * most)

    def narrowed(self, keys: torch.Tensor, spots: torch.Tensor) -> Search:
        """A line for each interval; `keys` are samples `[line, shard * sample]` from `spots`."""
        order = keys.sort(stable=True).indices
        some = self.high > self.low  # an empty shard has nothing to show
        before = spots.diff(prepend=self.low.unsqueeze(-1) - 1) * some.unsqueeze(-1)
        after = spots.diff(append=self.high.unsqueeze(-1))
        steps = [each.movedim(0, 1).flatten(1).gather(1, order) for each in (before, after)]
        least = steps[0].cumsum(-1) + (self.low.sum(0).unsqueeze(1) - 1)
        most = steps[1].cumsum(-1) - steps[1] + spots[..., 0].sum(0).unsqueeze(1)
        surely, maybe = torch.searchsorted(most, self.first), torch.searchsorted(least, self.last)
        ranked = torch.empty_like(order).scatter_(1, order, _counting(order))
        own = ranked.view(len(order), *spots.shape[::2]).movedim(1, 0).contiguous()
        count = surely.expand(len(spots), *surely.shape), maybe.expand(len(spots), *maybe.shape)
        ends = torch.cat([self.low.unsqueeze(-1), spots + 1], -1)
        starts = torch.cat([spots, self.high.unsqueeze(-1)], -1)
        low, high = (
            table.gather(-1, torch.searchsorted(own, each.contiguous()))
            for table, each in zip((ends, starts), count, strict=True)
        )
        low = low.minimum(self.high.unsqueeze(-1))
        return Search(
            self.row.repeat_interleave(self.first.shape[1]),
            low.flatten(1),
            high.maximum(low).flatten(1),
            self.first.reshape(-1, 1),
            self.last.reshape(-1, 1),
        )


def _counting(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.shape[-1], device=like.device).expand_as(like)


def narrowed(
    op: Any,
    spec: DTensorSpec,
    dim: int,
    ordered: Sequence[torch.Tensor],
    searches: Sequence[Search],
    most: int,
    each: int = 1,
) -> list[Search]:
    """Searches of which each rank knows more; `ordered` are the keys of its rows, each in order, of
    which `each` has so many lines."""
    spots = [search.spots(most) for search in searches]
    shown = []
    for coord, rows, search, places in zip(spec.slots, ordered, searches, spots, strict=True):
        at = places[shard_of(spec, dim, coord)].clamp(max=max(rows.shape[1] - 1, 0)).to(rows.device)
        keys = rows[search.row].gather(1, at) if rows.numel() else at
        shown.append(keys.to(bits_of(spec.dtype)))
    found = _gathered(op, spec, dim, shown, each)
    made: dict[int, Search] = {}
    for coord, search, places in zip(spec.slots, searches, spots, strict=True):
        slot = found._spec.slot(coord)
        if slot not in made:
            keys = found._locals[slot].to("cpu", torch.int64)
            made[slot] = search.narrowed(keys, places)
    return [made[found._spec.slot(coord)] for coord in spec.slots]


def _gathered(op: Any, spec: DTensorSpec, dim: int, shown: Sequence[Any], each: int) -> Any:
    """What the shards of each row show, `[line, sample]`, side by side on all of their ranks."""
    mesh, count, most = spec.topology, len(spec.dim_cuts[dim]), shown[0].shape[1]
    others = [axis for axis in spec.slot_axes if axis not in spec.dim_axes[dim]]
    apart = all_coords(tuple(n if axis in others else 1 for axis, n in enumerate(mesh.shape)))
    shapes = [[n for d, n in enumerate(spec.local_shape(coord)) if d != dim] for coord in apart]
    lines = tuple(prod(shape) * each for shape in shapes)
    places: list[Placement] = [
        Shard(1) if axis in spec.dim_axes[dim] else Shard(0) if axis in others else Replicate()
        for axis in range(mesh.ndim)
    ]
    meta = TensorMeta((sum(lines), count * most), (count * most, 1), shown[0].dtype)
    cuts = [lines if others else None, None]
    return gathered(op, wrap(DTensorSpec(mesh, places, meta, cuts=cuts), tuple(shown)), [1])
