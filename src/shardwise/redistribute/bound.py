"""What a part of a way costs at least, by placements alone: no box is worked out.

Prices count the rank that pays most, which pays no less than ranks do on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import prod

from ..mesh import Topology
from ..placement import Partial, Shard
from .step import summed_price
from .ways import Hop, Order, Places

__all__ = ["Bound"]

Axes = list[int]


class Bound:
    """The least that hops cost for a tensor of some sizes, cut as `torch.chunk` would."""

    __slots__ = (
        "_axes", "_cuts", "_fastest", "_itemsize", "_shape", "_sizes", "_slowest",
        "_speeds", "_starts", "_uncut",
    )  # fmt: skip

    def __init__(self, topology: Topology, sizes: Sequence[int], itemsize: int) -> None:
        self._shape, self._sizes, self._itemsize = topology.shape, sizes, itemsize
        self._starts = [link.start for link in topology.links]
        self._speeds = [link.per_byte for link in topology.links]
        self._slowest, self._fastest = max(self._speeds), min(self._speeds)
        self._axes = [axis for axis, size in enumerate(self._shape) if size > 1]
        self._uncut: list[Axes] = [[] for _ in sizes]
        self._cuts: dict[Places, list[Axes]] = {}

    def of(self, hop: Hop) -> int:
        """The least that a hop costs."""
        src, dst, order = hop
        scattered: Axes = []
        reduced: Axes = []
        made: Axes = []
        for axis in self._axes:
            have, want = src[axis], dst[axis]
            if have is want:
                continue
            if isinstance(have, Partial):
                if isinstance(want, Shard):
                    scattered.append(axis)
                elif not isinstance(want, Partial):
                    reduced.append(axis)
            elif isinstance(want, Partial) and isinstance(have, Shard) and want.reduce_op != "avg":
                made.append(axis)
        held, wanted = self._cut(src), self._cut(dst)
        inside, parts, alike = self._uncut, 1, True
        if scattered or reduced:
            alike = len({place for place in src if isinstance(place, Partial)}) == 1
        if order is Order.AT_ONCE:
            # Of several kinds one is reduced at once, but the others before it or after it.
            some = alike and scattered  # a reduction over axes of one rank each is none
            return self._at_once(held, wanted, scattered, reduced) if some else 0
        if scattered:
            inside = [[axis for axis in axes if axis in scattered] for axes in wanted]
        if made:
            held, parts = self._made_whole(held, inside, made, order)
        _, lacking, far, start = self._moved(held, wanted, inside if alike else self._uncut)
        price = lacking * self._fastest + far * (self._slowest - self._fastest)
        if scattered or reduced:
            size = self._size(src, dst) * parts
            start += self._start(scattered) + self._start(reduced)
            price += size * self._scattered(scattered, alike)
            price += self._reduced(reduced, size, alike)
        return start + price * self._itemsize

    def _at_once(self, held: list[Axes], wanted: list[Axes], scattered: Axes, reduced: Axes) -> int:
        """What it costs at least if each piece comes from every member along `scattered` axes."""
        new, lacking, far, start = self._moved(held, wanted, self._uncut)
        speeds = 0, self._fastest, self._slowest
        free, fast, slow = [self._summed(scattered, speed) for speed in speeds]
        price = (new - lacking) * free + (lacking - far) * fast + far * slow
        start = max(start, self._start(scattered)) + self._start(reduced)
        return start + (price + self._reduced(reduced, new, True)) * self._itemsize

    def _start(self, axes: Axes) -> int:
        return max([self._starts[axis] for axis in axes]) if axes else 0

    def _cut(self, places: Places) -> list[Axes]:
        """The axes that cut each dim."""
        found = self._cuts.get(places)
        if found is None:
            found = self._cuts[places] = [[] for _ in self._sizes]
            for axis in self._axes:
                place = places[axis]
                if isinstance(place, Shard):
                    found[place.dim].append(axis)
        return found

    def _count(self, axes: Axes) -> int:
        count = 1
        for axis in axes:
            count *= self._shape[axis]
        return count

    def _made_whole(
        self, held: list[Axes], inside: list[Axes], made: Axes, order: Order
    ) -> tuple[list[Axes], int]:
        """The axes that are left where shards are put together before they move, and how many parts
        become one. None do where others cut inside of them."""
        parts, rest = 1, []
        for size, axes, inner in zip(self._sizes, held, inside, strict=True):
            left = list(axes)
            if size % self._count(axes + inner):
                left = []  # shards of many lengths, or none: who has what is not so simple
            elif order is Order.SPREAD_FIRST or not inner:
                while left and left[-1] in made:
                    parts *= self._shape[left.pop()]
            rest.append(left)
        return rest, parts if order is Order.SPREAD_FIRST else 1

    def _moved(
        self, held: list[Axes], wanted: list[Axes], inside: list[Axes]
    ) -> tuple[int, int, int, int]:
        """How many elements a rank will hold, how many of them it lacks, how many of these come
        over the slowest links, and what the start costs."""
        new, kept, near, start = 1, 1, 1, 0
        for size, have, want, inner in zip(self._sizes, held, wanted, inside, strict=True):
            after = self._count(want)
            part = own = close = -(-size // after)
            if not self._is_cut_inside(have, want, inner, held):
                digits = have + inner
                parts = self._count(digits)
                if size % after or size % parts:
                    own = min(part, -(-size // parts))
                    held_near = self._count(have) // self._count(self._slow(have))
                    close = min(part, -(-size // self._count(have)) * held_near)
                else:
                    asked = self._asked(digits, want)
                    start = max([start, *[self._starts[axis] for axis in asked]])
                    own = self._left(part, asked, digits[len(want) :])
                    close = self._left(part, self._slow(asked), digits[len(want) :])
            new, kept, near = new * part, kept * own, near * close
        lacking = new - min(kept, near)
        start = (start or min(self._starts)) if lacking else 0
        return new, lacking, new - near, start

    def _is_cut_inside(self, have: Axes, want: Axes, inner: Axes, held: list[Axes]) -> bool:
        """Whether the parts of a dim are only cut further, into what will be held. A reduction does
        not cut them so inside of an axis that still cuts another dim."""
        if have != want[: len(have)]:
            return False
        if not inner:
            return True
        outer = want[len(have) : want.index(inner[-1])]
        return not any(axis in axes for axis in outer for axes in held)

    def _slow(self, axes: Axes) -> Axes:
        return [axis for axis in axes if self._speeds[axis] == self._slowest]

    def _asked(self, digits: Axes, want: Axes) -> Axes:
        """The axes along which some rank must ask for what it will need of a dim.

        Where shards are of one length each axis that cuts the dim is a digit of a shard's place. A
        digit that is another axis after than before, or none, is at times asked of others there.
        """
        asked = []
        for before, after in zip_longest(digits, want[: len(digits)]):
            if before != after:
                asked.append(before)
                if after is not None and self._shape[before] != self._shape[after]:
                    break  # from here on the digits are not the same ones
        return asked

    def _left(self, part: int, asked: Axes, gathered: Axes) -> int:
        """How much of a part a rank has that asks nobody along these axes: its share if all are
        gathered, else at times nothing."""
        for axis in asked:
            part = part // self._shape[axis] if axis in gathered else 0
        return part

    def _size(self, src: Places, dst: Places) -> int:
        """How many elements a rank has when all that is to be scattered is."""
        size = prod(self._sizes)
        for axis in self._axes:
            if isinstance(src[axis], Shard) or isinstance(dst[axis], Shard):
                size //= self._shape[axis]
        return size

    def _summed(self, axes: Axes, per_byte: int) -> int:
        return summed_price([(self._speeds[axis], self._shape[axis]) for axis in axes], per_byte)

    def _scattered(self, axes: Axes, together: bool) -> int:
        """What it costs at least to reduce and scatter, for each element that is left."""
        if not axes:
            return 0
        if together:
            return self._summed(axes, 0)
        left, price = self._count(axes), 0
        for axis in sorted(axes, key=self._speeds.__getitem__):
            left //= self._shape[axis]
            price += (self._shape[axis] - 1) * left * self._speeds[axis]
        return price

    def _reduced(self, axes: Axes, size: int, together: bool) -> int:
        """What it costs at least to reduce `size` elements so that all have them."""
        if not axes:
            return 0
        slowest = max(axes, key=self._speeds.__getitem__)
        count = self._count(axes if together else [slowest])
        return 2 * (count - 1) * size // count * self._speeds[slowest]
