"""One step of a redistribution: what kind it is, between which layouts, and what it moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..comm import Parcel
from ..layout.geometry import Box, box_numel, flat_index, intersect
from ..layout.lazy import lazy
from ..layout.mesh import Coord
from .layout import DimMap, Grid, Layout, grid_of, largest
from .routes import DimMove, Routes, between_routes, dim_moves, routes

__all__ = ["Step", "summed_price"]


@dataclass(frozen=True)
class Step:
    """One collective or local move.

    `kind` is slice, make_partial (both local), all_reduce, reduce_scatter, all_gather, exchange,
    reduce_exchange (an exchange in which each piece comes from every member along `reduced`), or
    transfer (from one mesh to another, or on one to boxes that no placement names).
    """

    kind: str
    src: Layout
    dst: Layout
    axes: tuple[int, ...] = ()
    op: str = ""
    reduced: tuple[int, ...] = ()

    @property
    def over(self) -> int:
        """What the total is divided by."""
        if self.op != "avg":
            return 1
        shape = self.src.topology.shape
        return prod([shape[axis] for axis in self.reduced or self.axes])

    @property
    def is_local(self) -> bool:
        return self.kind in ("slice", "make_partial")

    @lazy
    def routes(self) -> Routes:
        """From whom each member receives, if not from its whole group: by coordinate, on one mesh
        for those on the axes of `span`, the other axes at 0."""
        return (between_routes if self.kind == "transfer" else routes)(self.src, self.dst)

    @property
    def span(self) -> tuple[int, ...]:
        """The axes of the dims that change."""
        return self._grid.axes

    @property
    def _is_whole(self) -> bool:
        """Whether every member of a group gives something to every other."""
        return self.kind in ("all_reduce", "reduce_scatter", "all_gather")

    def sends(self, src: Coord, dst: Coord) -> bool:
        """Whether `src` gives a piece to `dst`."""
        if self.kind == "transfer":
            return src in self.routes[dst]
        asked = self.axes if self._is_whole else (*self.span, *self.reduced)
        pairs = enumerate(zip(src, dst, strict=True))
        if any(a != b and axis not in asked for axis, (a, b) in pairs):
            return False
        if self._is_whole:
            return True
        if self.reduced:
            src = tuple(
                [
                    b if i in self.reduced else a
                    for i, (a, b) in enumerate(zip(src, dst, strict=True))
                ]
            )
        return self._on_span(src) in self.routes[self._on_span(dst)]

    def _on_span(self, coord: Coord) -> Coord:
        return tuple([c if axis in self.span else 0 for axis, c in enumerate(coord)])

    def piece(self, src: Coord, dst: Coord) -> Box:
        """What `src` has of the box that `dst` will have."""
        return intersect(self.src.box(src), self.dst.box(dst))

    @lazy
    def _parcels(self) -> dict[tuple[Coord, Coord], Parcel | None]:
        return {}

    def parcel(self, src: Coord, dst: Coord) -> Parcel | None:
        """What `src` gives `dst`; None if nothing."""
        try:
            return self._parcels[src, dst]
        except KeyError:
            box = self.piece(src, dst)
            some = box_numel(box) > 0 and self.sends(src, dst)
            found = Parcel.of(box, self.src.box(src), self.dst.box(dst)) if some else None
            return self._parcels.setdefault((src, dst), found)

    def sources(self, dst: Coord) -> tuple[Coord, ...]:
        """Who gives a piece to `dst`, itself perhaps among them."""
        if self.is_local:
            return ()
        if self.kind == "transfer":
            return self.routes[dst]
        if self._is_whole:
            return self.src.topology.group_coords(dst, self.axes)
        found = [
            tuple(
                [
                    r if axis in self.span else d
                    for axis, (r, d) in enumerate(zip(route, dst, strict=True))
                ]
            )
            for route in self.routes[self._on_span(dst)]
        ]
        group = self.src.topology.group_coords
        return tuple(sorted([each for member in found for each in group(member, self.reduced)]))

    # --- what it moves ---------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many ranks talk to each other."""
        return prod(self.src.topology.shape[axis] for axis in self.axes)

    def received(self, coord: Coord) -> int:
        """How many elements the rank at `coord` receives from others."""
        if self.is_local:
            return 0
        if self.kind == "transfer":
            return self._transferred(coord)
        if self._sums:
            return self._of_sum(box_numel(self.dst.box(coord)))
        shape = self.src.topology.shape
        others = prod([b - a for a, b in [dim.at(coord, shape) for dim in self._same]])
        return others * self._received[flat_index(coord, shape, self.span)]

    @property
    def _sums(self) -> bool:
        return self.kind in ("all_reduce", "reduce_scatter")

    def _of_sum(self, size: int) -> int:
        """How many elements a rank receives that has `size` elements of a sum in the end."""
        once = (self.count - 1) * size
        return 2 * once // self.count if self.kind == "all_reduce" else once

    @lazy
    def _moves(self) -> list[DimMove]:
        """The dims that change."""
        return dim_moves(self.src, self.dst)

    @lazy
    def _same(self) -> list[DimMap]:
        """The dims that stay as they are."""
        pairs = zip(self.src.dims, self.dst.dims, strict=True)
        return [have for have, want in pairs if have == want]

    @lazy
    def _grid(self) -> Grid:
        return grid_of(self.src.topology.shape, *[each.grid.axes for each in self._moves])

    @lazy
    def _received(self) -> list[int]:
        """How many elements are received at every place of the span, for each place of the dims
        that stay: all of the new box, but for what the rank itself has of it."""
        copies = prod([self.src.topology.shape[axis] for axis in self.reduced])
        new = self._product([each.sizes for each in self._moves])
        kept = self._product([each.kept for each in self._moves])
        return [copies * size - own for size, own in zip(new, kept, strict=True)]

    def _product(self, numbers: Sequence[Sequence[int]]) -> Sequence[int]:
        """Numbers for each dim that changes, multiplied at every place of the span."""
        if len(numbers) == 1:
            return numbers[0]
        found = [1] * prod(self._grid.sizes)
        for each, own in zip(self._moves, numbers, strict=True):
            places = self._grid.indices(each.grid.axes)
            found = [n * own[place] for n, place in zip(found, places, strict=True)]
        return found

    def _largest(self, values: Sequence[int]) -> int:
        """The largest of some values on the span, for all places of the dims that stay."""
        return largest(self.src.topology.shape, self.span, values, self._same)

    def _transferred(self, coord: Coord) -> int:
        others = (source for source in self.sources(coord) if not self._is_one(source, coord))
        return sum(box_numel(self.piece(source, coord)) for source in others)

    def sent(self, coord: Coord) -> int:
        """How many elements the rank at `coord`, of the source's mesh, sends to others."""
        if self.is_local:
            return 0
        if self.kind == "all_reduce":
            return self.received(coord)
        if self.kind == "transfer":
            targets = [target for target, sources in self.routes.items() if coord in sources]
        else:
            members = self.src.topology.group_coords(coord, self.axes)
            targets = [member for member in members if self.sends(coord, member)]
        others = (target for target in targets if not self._is_one(coord, target))
        return sum(box_numel(self.piece(coord, target)) for target in others)

    def _is_one(self, src: Coord, dst: Coord) -> bool:
        """Whether the source's coordinate and the target's are one rank."""
        a, b = self.src.topology, self.dst.topology
        return src == dst if a is b else a.rank_of(src) == b.rank_of(dst)

    @lazy
    def elements_received(self) -> int:
        """How many elements a rank receives, for the rank that receives most."""
        if self.is_local:
            return 0
        if self.kind == "transfer":
            return max(map(self.received, self.routes))
        return self._of_sum(self.dst.most) if self._sums else self._largest(self._received)

    @property
    def elements_made(self) -> int:
        """How many elements a rank holds after the step, for the rank that holds most."""
        return self.dst.most

    def price(self, itemsize: int) -> int:
        """What the step costs by the links of its mesh; each piece by the slowest that it takes."""
        if self.is_local:
            return 0
        links = [self.src.topology.links[axis] for axis in self.axes]
        if self.kind == "transfer":
            links = [*self.src.topology.links, *self.dst.topology.links]
        start = max([link.start for link in links])
        speeds = {link.per_byte for link in links}
        if self.kind in ("all_reduce", "transfer") or len(speeds) == 1:
            return start + self.elements_received * itemsize * max(speeds)
        if self.kind == "reduce_scatter":
            return start + self.dst.most * self._paid(0) * itemsize
        return start + self._weighted(sorted(speeds, reverse=True)) * itemsize

    def _weighted(self, speeds: list[int]) -> int:
        """What the rank for which that is most pays, each element by the slowest link it takes.

        What comes from ranks at the same place on the slow axes has not crossed them.
        """
        links = self.src.topology.links
        left = self._product([each.sizes for each in self._moves])
        total = [0] * len(left)
        for speed in speeds:
            slow = {axis for axis in self.axes if links[axis].per_byte >= speed}
            kept = self._product([each.staying(slow) for each in self._moves])
            price = self._paid(speed)
            total = [t + price * (a - b) for t, a, b in zip(total, left, kept, strict=True)]
            left = kept
        if self.reduced:
            free = self._paid(0)
            total = [t + free * n for t, n in zip(total, left, strict=True)]
        return self._largest(total)

    def _paid(self, per_byte: int) -> int:
        """What an element costs that crosses a link of this price; if it is summed on its way, one
        from each member."""
        where = self.src.topology
        summed = self.axes if self.kind == "reduce_scatter" else self.reduced
        members = [(where.links[axis].per_byte, where.shape[axis]) for axis in summed]
        return summed_price(members, per_byte)


def summed_price(members: list[tuple[int, int]], per_byte: int) -> int:
    """What an element costs that crosses a link of this price and is summed on its way, so that one
    comes from each of the members: by links of some price along each axis, and so many of them."""
    total, rest = per_byte, 1
    for price, count in sorted(members):
        total += (count - 1) * rest * max(price, per_byte)
        rest *= count
    return total
