"""What a part of a way costs at least, by placements alone: no box is worked out.

Prices count the rank that pays most, which pays no less than ranks do on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import prod

from ..mesh import Topology
from ..placement import Partial, Shard
from .ways import Hop, Order, Places

__all__ = ["least_price"]

Axes = list[int]


def least_price(topology: Topology, sizes: Sequence[int], itemsize: int, hop: Hop) -> int:
    """The least that a hop costs for a tensor of these sizes, cut as `torch.chunk` would."""
    src, dst, order = hop
    shape = topology.shape
    held: list[Axes] = [[] for _ in sizes]  # the axes that cut each dim when it moves
    wanted: list[Axes] = [[] for _ in sizes]
    inside = [1] * len(sizes)  # into how many parts a reduction cuts each dim besides
    cut = 1  # into how many parts the tensor is cut when it is reduced
    scattered, reduced, made = [], [], set()
    for axis, (size, have, want) in enumerate(zip(shape, src, dst, strict=True)):
        if size == 1:
            continue
        if isinstance(want, Shard):
            wanted[want.dim].append(axis)
        if isinstance(have, Shard):
            held[have.dim].append(axis)
            cut *= size
            if isinstance(want, Partial) and want.reduce_op != "avg":
                made.add(axis)
        elif isinstance(have, Partial):
            if isinstance(want, Shard):
                scattered.append(axis)
                inside[want.dim] *= size
            elif not want.is_partial():
                reduced.append(axis)
        elif isinstance(want, Shard):
            cut *= size
    at_once = order is Order.AT_ONCE
    if made and not at_once:
        for dim, axes in enumerate(held):
            if sizes[dim] % (inside[dim] * prod([shape[axis] for axis in axes])):
                held[dim] = []  # shards of many lengths, or none: who has what is not so simple
            elif order is Order.SPREAD_FIRST or inside[dim] == 1:
                # They are put together before they move, unless others cut inside of them.
                whole = len(list(takewhile(made.__contains__, reversed(axes))))
                held[dim], gone = axes[: len(axes) - whole], axes[len(axes) - whole :]
                if order is Order.SPREAD_FIRST:
                    cut //= prod([shape[axis] for axis in gone])
    alone = [1] * len(sizes)
    new, lacking, far = _lacking(topology, sizes, held, wanted, alone if at_once else inside)
    links = topology.links
    price = 0
    size = prod(sizes) // cut
    if scattered:
        size //= prod([shape[axis] for axis in scattered])
        price += _scattered(topology, src, scattered, new if at_once else size, itemsize)
    if reduced:
        price += _reduced(topology, src, reduced, size, itemsize)
    if lacking and not at_once:
        price += min([link.start for link in links])
    speeds = [link.per_byte for link in links]
    slowest, fastest = max(speeds), min(speeds)
    return price + (lacking * fastest + far * (slowest - fastest)) * itemsize


def _lacking(
    topology: Topology,
    sizes: Sequence[int],
    held: Sequence[Axes],
    wanted: Sequence[Axes],
    inside: Sequence[int],
) -> tuple[int, int, int]:
    """How many elements a rank will hold, and must receive, and must receive over the slowest axes.

    If a dim is cut by one axis first and will be cut by another, some rank has nothing of what it
    will need.
    """
    shape, links = topology.shape, topology.links
    slowest = max([link.per_byte for link in links])
    new, kept, near = 1, 1, 1
    for size, have, want, more in zip(sizes, held, wanted, inside, strict=True):
        after = prod([shape[axis] for axis in want])
        slow = prod([shape[axis] for axis in have if links[axis].per_byte == slowest])
        parts = more * prod([shape[axis] for axis in have])
        new *= -(-size // after)
        kept *= -(-size // max(parts, after))
        near *= -(-size // max(slow, after))
        for axis, other in zip(have, want, strict=False):
            if axis != other:
                if size % parts == 0 == size % after:
                    kept = 0
                    if links[axis].per_byte == slowest:
                        near = 0
                break
    far = max(0, new - near)
    return new, max(0, new - kept, far), far


def _scattered(topology: Topology, src: Places, axes: Axes, size: int, itemsize: int) -> int:
    """What it costs at least to reduce and scatter, if `size` elements are left."""
    links, left = topology.links, prod([topology.shape[axis] for axis in axes])
    alike = len({src[axis] for axis in axes}) == 1  # then they are reduced together
    price = max([links[axis].start for axis in axes])
    for axis in sorted(axes, key=lambda axis: links[axis].per_byte, reverse=alike):
        count = topology.shape[axis]
        left //= count
        price += (count - 1) * left * size * itemsize * links[axis].per_byte
    return price


def _reduced(topology: Topology, src: Places, axes: Axes, size: int, itemsize: int) -> int:
    """What it costs at least to reduce `size` elements so that all have them."""
    links = topology.links
    slowest = max(axes, key=lambda axis: links[axis].per_byte)
    together = [axis for axis in axes if src[axis] is src[slowest]]
    count = prod([topology.shape[axis] for axis in together])
    return links[slowest].price(2 * (count - 1) * size // count * itemsize)
