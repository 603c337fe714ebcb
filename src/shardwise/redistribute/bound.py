"""What a part of a way costs at least, by placements alone: no box is worked out.

Prices count the rank that pays most, which pays no less than ranks do on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..mesh import Topology
from ..placement import Partial, Shard
from .ways import Hop, Order, Places, Way

__all__ = ["Bound"]

Axes = list[int]


class Bound:
    """The least that hops cost for a tensor of some sizes, cut as `torch.chunk` would."""

    __slots__ = (
        "_axes", "_fastest", "_itemsize", "_shape", "_sizes", "_slowest", "_speeds", "_starts",
    )  # fmt: skip

    def __init__(self, topology: Topology, sizes: Sequence[int], itemsize: int) -> None:
        self._shape, self._sizes, self._itemsize = topology.shape, sizes, itemsize
        self._starts = [link.start for link in topology.links]
        self._speeds = [link.per_byte for link in topology.links]
        self._slowest, self._fastest = max(self._speeds), min(self._speeds)
        self._axes = [axis for axis, size in enumerate(self._shape) if size > 1]

    def of_way(self, way: Way, enough: int) -> list[int]:
        """The least that each hop of a way costs, up to the one with which it is `enough`."""
        found, total = [], 0
        for hop in way:
            found.append(self.of(hop))
            total += found[-1]
            if total >= enough:
                break
        return found

    def of(self, hop: Hop) -> int:
        """The least that a hop costs."""
        src, dst, order = hop
        shape = self._shape
        held: list[Axes] = [[] for _ in self._sizes]  # the axes that cut each dim when it moves
        wanted: list[Axes] = [[] for _ in self._sizes]
        inside = [1] * len(self._sizes)  # into how many parts a reduction cuts each dim besides
        cut = 1  # into how many parts the tensor is cut when it is reduced
        scattered: Axes = []
        reduced: Axes = []
        made: Axes = []
        for axis in self._axes:
            have, want = src[axis], dst[axis]
            if isinstance(want, Shard):
                wanted[want.dim].append(axis)
            if isinstance(have, Shard):
                held[have.dim].append(axis)
                cut *= shape[axis]
                if isinstance(want, Partial) and want.reduce_op != "avg":
                    made.append(axis)
            elif isinstance(have, Partial):
                if isinstance(want, Shard):
                    scattered.append(axis)
                    inside[want.dim] *= shape[axis]
                elif not want.is_partial():
                    reduced.append(axis)
            elif isinstance(want, Shard):
                cut *= shape[axis]
        at_once = order is Order.AT_ONCE
        if made and not at_once:
            whole = self._made_whole(held, inside, made, order)
            if order is Order.SPREAD_FIRST:
                cut //= whole
        new, price, start = self._moved(held, wanted, None if at_once else inside)
        size = prod(self._sizes) // cut
        if scattered:
            size //= prod([shape[axis] for axis in scattered])
            first = max([self._starts[axis] for axis in scattered])
            start = max(start, first) if at_once else start + first
            price += self._scattered(src, scattered, new if at_once else size)
        if reduced:
            price += self._reduced(src, reduced, size)
        return start + price

    def _made_whole(self, held: list[Axes], inside: Axes, made: Axes, order: Order) -> int:
        """Take the axes away along which shards are put together before they move; how many parts
        become one. None are where others cut inside of them."""
        parts = 1
        for dim, axes in enumerate(held):
            if self._sizes[dim] % (inside[dim] * self._count(axes)):
                held[dim] = []  # shards of many lengths, or none: who has what is not so simple
            elif order is Order.SPREAD_FIRST or inside[dim] == 1:
                while axes and axes[-1] in made:
                    parts *= self._shape[axes.pop()]
        return parts

    def _count(self, axes: Axes) -> int:
        count = 1
        for axis in axes:
            count *= self._shape[axis]
        return count

    def _moved(
        self, held: Sequence[Axes], wanted: Sequence[Axes], inside: Sequence[int] | None
    ) -> tuple[int, int, int]:
        """How many elements a rank will hold, what it pays for those that it lacks, and what the
        start costs.

        If a dim is cut by one axis first and will be cut by another, some rank has nothing of what
        it will need.
        """
        new, kept, near, start = 1, 1, 1, 0
        for dim, (size, have, want) in enumerate(zip(self._sizes, held, wanted, strict=True)):
            after, parts = self._count(want), self._count(have)
            part = -(-size // after)
            new *= part
            if not have:
                kept, near = kept * part, near * part
                continue
            most = parts if inside is None else parts * inside[dim]
            slow = self._count([axis for axis in have if self._speeds[axis] == self._slowest])
            kept *= part if most <= after else -(-size // most)
            near *= part if slow <= after else -(-size // slow)
            if size % most or size % after:
                continue
            at = 0
            while at < len(have) and at < len(want) and have[at] == want[at]:
                at += 1
            if at == len(have):
                continue
            asked = have[at:]  # if all that is left is gathered, along all of these axes
            if at < len(want):
                asked, kept = have[at : at + 1], 0
                near = 0 if self._speeds[have[at]] == self._slowest else near
            start = max([start, *[self._starts[axis] for axis in asked]])
        far = max(0, new - near)
        lacking = max(new - kept, far)
        start = (start or min(self._starts)) if lacking else 0
        paid = lacking * self._fastest + far * (self._slowest - self._fastest)
        return new, paid * self._itemsize, start

    def _scattered(self, src: Places, axes: Axes, size: int) -> int:
        """What it costs at least to reduce and scatter, if `size` elements are left."""
        if len(axes) == 1:
            return (self._shape[axes[0]] - 1) * size * self._itemsize * self._speeds[axes[0]]
        left, price = self._count(axes), 0
        alike = len({src[axis] for axis in axes}) == 1  # then they are reduced together
        for axis in sorted(axes, key=self._speeds.__getitem__, reverse=alike):
            left //= self._shape[axis]
            price += (self._shape[axis] - 1) * left * size * self._itemsize * self._speeds[axis]
        return price

    def _reduced(self, src: Places, axes: Axes, size: int) -> int:
        """What it costs at least to reduce `size` elements so that all have them."""
        slowest = max(axes, key=self._speeds.__getitem__)
        count = self._count([axis for axis in axes if src[axis] is src[slowest]])
        received = 2 * (count - 1) * size // count
        return self._starts[slowest] + received * self._itemsize * self._speeds[slowest]
