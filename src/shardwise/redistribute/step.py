"""One step of a redistribution: what kind it is, between which layouts, and what it moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from ..cost import Link
from ..engine import Parcel
from ..geometry import Box, box_numel, intersect
from ..mesh import Coord, Topology
from .layout import Layout

__all__ = ["Routes", "Step", "coords_of"]

Routes = dict[Coord, tuple[Coord, ...]]


@dataclass(frozen=True)
class Step:
    """One collective or local move.

    `kind` is slice, make_partial (both local), all_reduce, reduce_scatter, all_gather, exchange,
    reduce_exchange (an exchange in which each piece comes from every member along `reduced`), or
    transfer (from one mesh to another). `routes` says from whom each member of an exchange
    receives, for every coordinate on the axes of `span`, the other axes at 0.
    """

    kind: str
    src: Layout
    dst: Layout
    axes: tuple[int, ...] = ()
    op: str = ""
    span: tuple[int, ...] = ()
    routes: Routes = field(default_factory=dict)
    reduced: tuple[int, ...] = ()

    @property
    def is_local(self) -> bool:
        return self.kind in ("slice", "make_partial")

    def sends(self, src: Coord, dst: Coord) -> bool:
        """Whether `src` gives a piece to `dst`."""
        if self.kind == "transfer":
            return src in self.routes[dst]
        pairs = enumerate(zip(src, dst, strict=True))
        if any(a != b and axis not in self.axes for axis, (a, b) in pairs):
            return False  # they are not in one group
        if not self.routes:
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

    @cached_property
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
        if not self.routes:
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
        if self.kind == "all_reduce":
            return 2 * (self.count - 1) * box_numel(self.src.box(coord)) // self.count
        if self.kind == "reduce_scatter":
            return (self.count - 1) * box_numel(self.dst.box(coord))
        if self.kind == "transfer":
            others = (source for source in self.sources(coord) if not self._is_one(source, coord))
            return sum(box_numel(self.piece(source, coord)) for source in others)
        # All of the new box comes from somewhere, but for what the rank itself has of it.
        new = self.dst.box(coord)
        copies = prod([self.src.topology.shape[axis] for axis in self.reduced])
        return copies * box_numel(new) - box_numel(intersect(self.src.box(coord), new))

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

    @cached_property
    def elements_received(self) -> int:
        """How many elements a rank receives, for the rank that receives most."""
        if self.is_local:
            return 0
        return max(map(self.received, self._targets))

    @property
    def _targets(self) -> tuple[Coord, ...]:
        if self.kind == "transfer":
            return tuple(self.routes)
        return coords_of(self.src.topology, {*self.src.axes, *self.dst.axes, *self.axes})

    def price(self, itemsize: int) -> int:
        """What the step costs by the links of its mesh; each piece by the slowest that it takes."""
        if self.is_local:
            return 0
        links = [self.src.topology.links[axis] for axis in self.axes]
        if self.kind == "transfer":
            links = [*self.src.topology.links, *self.dst.topology.links]
        start = max(link.start for link in links)
        slowest = max(link.per_byte for link in links)
        if self.kind in ("all_reduce", "transfer") or len({link.per_byte for link in links}) == 1:
            return start + self.elements_received * itemsize * slowest
        return start + itemsize * max(map(self._weighted, self._targets))

    def _weighted(self, coord: Coord) -> int:
        links = self.src.topology.links
        return sum(
            box_numel(self.piece(source, coord)) * slowest_between(links, source, coord)
            for source in self.sources(coord)
        )


def slowest_between(links: tuple[Link, ...], a: Coord, b: Coord) -> int:
    """The price of a byte on the slowest axis along which two coordinates differ."""
    crossed = [link.per_byte for link, i, j in zip(links, a, b, strict=True) if i != j]
    return max(crossed, default=0)


def coords_of(topology: Topology, axes: set[int]) -> tuple[Coord, ...]:
    """Every coordinate of `axes`, the other axes at 0."""
    return topology.group_coords((0,) * topology.ndim, sorted(axes))
