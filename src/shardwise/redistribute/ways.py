"""Ways that a redistribution may take beside the plain one: layouts to go through."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import pairwise

from ..placement import Partial, Placement, Replicate, Shard
from ..spec import DTensorSpec

__all__ = ["Hop", "Order", "Places", "Way", "other_ways"]

Places = tuple[Placement, ...]


class Order(IntEnum):
    """How the steps of a part of a way follow each other."""

    PLAIN = 0
    AT_ONCE = 1
    """Reduce and move at once."""
    SPREAD_FIRST = 2
    """Make partial before reducing."""


Hop = tuple[Places, Places, Order]
Way = tuple[Hop, ...]


def other_ways(src: DTensorSpec, dst: DTensorSpec, reduced: set[int]) -> Iterator[Way]:
    """Ways that may be cheaper than the plain order, in which `reduced` axes are reduced: make
    partial first or last, reduce and move at once, move before reducing, or go axis by axis."""
    have, want = src.placements, dst.placements
    alike = len({link.per_byte for link in src.topology.links}) == 1
    moves = _may_move(src, dst)
    yield from _made_partial(have, want, moves, alike)
    if moves and reduced:
        scattered = [axis for axis in reduced if want[axis].is_shard()]
        if scattered:
            yield ((have, want, Order.AT_ONCE),)
        if len(scattered) < len(reduced):
            yield from map(_through, _moved_first(have, want))
    if not alike:
        yield from map(_through, _axis_by_axis(src, dst))


def _may_move(src: DTensorSpec, dst: DTensorSpec) -> bool:
    """Whether boxes may have to move, besides what is reduced: not if all are cut further inside,
    by reductions of one kind."""
    if src.cuts or dst.cuts or len({place for place in src.placements if place.is_partial()}) > 1:
        return True
    pairs = zip(src.dim_axes, dst.dim_axes, strict=True)
    return any(want[: len(have)] != have for have, want in pairs)


def _through(way: list[Places]) -> Way:
    return tuple([(a, b, Order.PLAIN) for a, b in pairwise(way)])


def _moved_first(src: Places, dst: Places) -> Iterator[list[Places]]:
    """The way that moves what is pending, and reduces it where it will be."""
    places = tuple(
        [
            have if have.is_partial() and not want.is_partial() else want
            for have, want in zip(src, dst, strict=True)
        ]
    )
    if places not in (src, dst):
        yield [src, places, dst]


def _made_partial(src: Places, dst: Places, moves: bool, alike: bool) -> Iterator[Way]:
    """The ways that make shards partial before all else, and after it.

    Before a reduction it helps only if that cuts the same dim; after a move only if there is one.
    """
    pairs = list(zip(src, dst, strict=True))
    made = {a.dim for a, b in pairs if isinstance(a, Shard) and b.is_partial()}
    if not made:
        return
    kinds = {place.reduce_op for place in (*src, *dst) if isinstance(place, Partial)}
    scattered = [b.dim for a, b in pairs if a.is_partial() and isinstance(b, Shard)]
    alike = alike and len(kinds) == 1
    if not alike:
        first = tuple([b if a.is_shard() and b.is_partial() else a for a, b in pairs])
        if first not in (src, dst):
            yield _through([src, first, dst])
    elif not made.isdisjoint(scattered):
        yield ((src, dst, Order.SPREAD_FIRST),)
    if moves:
        for before in {_before_partial(pairs, True): 0, _before_partial(pairs, alike): 0}:
            if before not in (src, dst):
                yield _through([src, before, dst])


def _before_partial(pairs: list[tuple[Placement, Placement]], joined: bool) -> Places:
    """The layout in which all else has moved. Shards to be made partial stay; with `joined` only
    those inside of which nothing cuts the same dim, so that they can be put together as they are.
    """
    places: list[Placement] = []
    cut: set[int] = set()
    for have, want in reversed(pairs):
        if isinstance(have, Shard) and isinstance(want, Partial):
            stays = have.dim not in cut and want.reduce_op != "avg"
            places.append(have if stays or not joined else Replicate())
            continue
        places.append(have if have.is_replicate() else want)
        if isinstance(want, Shard) and not have.is_replicate():
            cut.add(want.dim)
    return tuple(reversed(places))


def _axis_by_axis(src: DTensorSpec, dst: DTensorSpec) -> Iterator[list[Places]]:
    """Ways over layouts in between, for a mesh whose axes differ: fast axes first, and last."""
    links = src.topology.links
    pairs = list(zip(src.placements, dst.placements, strict=True))
    axes = [axis for axis, (a, b) in enumerate(pairs) if a is not b and not a.is_replicate()]
    if len({links[axis].per_byte for axis in axes}) < 2:
        return
    by_speed = sorted(axes, key=lambda axis: links[axis].per_byte)
    for order in (by_speed, by_speed[::-1]):
        way, places = [src.placements], list(src.placements)
        for axis in order[:-1]:
            places[axis] = dst.placements[axis]
            way.append(tuple(places))
        yield [*way, dst.placements]
    reduced = [axis for axis in by_speed if _stays_whole(*pairs[axis])]
    if len(reduced) > 1 and dst.ndim:
        # Scatter over the fast axis, reduce what is left over the slow one, gather over the fast.
        widest = max(range(dst.ndim), key=lambda dim: dst.meta.shape[dim])
        places = list(dst.placements)
        places[reduced[0]] = Shard(widest)
        yield [src.placements, tuple(places), dst.placements]


def _stays_whole(have: Placement, want: Placement) -> bool:
    """Whether an axis is reduced and every rank keeps the whole."""
    return have.is_partial() and want.is_replicate()
