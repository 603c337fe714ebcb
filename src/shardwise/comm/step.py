"""`Step`: one collective or one local change of a redistribution, and what it sends to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from ..layout.cost import slowest
from ..layout.geometry import Box, all_coords, box_numel, box_shape, flat_index, intersect, relative
from ..layout.layout import Layout
from ..layout.mesh import Coord


class Parcel(NamedTuple):
    """A piece that one rank sends another: its box, and where it is in the two local tensors."""

    box: Box
    shape: tuple[int, ...]
    numel: int
    inside: Box
    place: Box

    @staticmethod
    def of(box: Box, held: Box, wanted: Box) -> Parcel:
        shape = box_shape(box)
        return Parcel(box, shape, prod(shape), relative(box, held), relative(box, wanted))


@dataclass(frozen=True)
class Step:
    """One collective or local change.

    `kind` is one of
    - slice, make_partial, view: local;
    - all_reduce, reduce_scatter, all_gather, exchange;
    - reduce_exchange: an exchange in which each piece comes from every member along `reduced`;
    - transfer: between two meshes, or between boxes of which one axis shards several dims.

    `axes` are the axes whose members talk, `reduced` those that are reduced, `order` is the order
    in memory of the dims, outermost first.
    """

    kind: str
    src: Layout
    dst: Layout
    axes: tuple[int, ...] = ()
    op: str = ""
    reduced: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    _parcels: dict[tuple[Coord, Coord], Parcel | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _sources: dict[Coord, tuple[Coord, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    known_rows: dict[tuple[int, ...], bool] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _received: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def over(self) -> int:
        """The number by which the reduced total is divided."""
        return self._copies if self.op == "avg" else 1

    @cached_property
    def is_local(self) -> bool:
        """True if no rank receives anything."""
        return self.kind in ("slice", "make_partial", "view")

    def alike(self, dtype: torch.dtype) -> tuple[object, ...]:
        """The key of steps of tensors of this dtype that may share a collective."""
        ends = self.src.topology, self.dst.topology
        return *ends, self.kind, self.axes, self.op, self.over, dtype if self.op else None

    @property
    def shards(self) -> Layout:
        """The layout of the pieces that an all_gather takes, or a reduce_scatter gives."""
        return self.src if self.kind == "all_gather" else self.dst

    @cached_property
    def is_even(self) -> bool:
        """True if the shards of all members around this rank are equally large, and not empty."""
        here = self.src.topology.coordinate
        members = [] if here is None else self.src.topology.group_coords(here, self.axes)
        sizes = {box_numel(self.shards.box(member)) for member in members}
        return len(sizes) == 1 and 0 not in sizes

    @property
    def _copies(self) -> int:
        """The number of pieces that are reduced into one."""
        return prod([self.src.topology.shape[axis] for axis in self.reduced])

    # --- who sends what to whom ------------------------------------------------------------------

    def sends(self, src: Coord, dst: Coord) -> bool:
        """True if `src` may have a piece for `dst`."""
        if self.kind == "transfer":
            return src in self.sources(dst)
        pairs = enumerate(zip(src, dst, strict=True))
        return all(a == b or axis in self.axes for axis, (a, b) in pairs)

    def piece(self, src: Coord, dst: Coord) -> Box:
        """The part of the box of `dst` that `src` holds."""
        return intersect(self.src.box(src), self.dst.box(dst))

    def parcel(self, src: Coord, dst: Coord) -> Parcel | None:
        """The piece that `src` gives `dst`; None if there is none."""
        try:
            return self._parcels[src, dst]
        except KeyError:
            box = self.piece(src, dst)
            some = box_numel(box) > 0 and self.sends(src, dst)
            found = Parcel.of(box, self.src.box(src), self.dst.box(dst)) if some else None
            return self._parcels.setdefault((src, dst), found)

    def sources(self, dst: Coord) -> tuple[Coord, ...]:
        """The coordinates that give a piece to `dst`, itself perhaps among them."""
        found = self._sources.get(dst)
        if found is None:
            find = self._holders if self.kind == "transfer" else self._members
            found = self._sources[dst] = () if self.is_local else find(dst)
        return found

    def _members(self, dst: Coord) -> tuple[Coord, ...]:
        group = self.src.topology.group_coords(dst, self.axes)
        return tuple([each for each in group if box_numel(self.piece(each, dst))])

    def _holders(self, dst: Coord) -> tuple[Coord, ...]:
        """For each distinct shard that `dst` needs one rank that holds it: `dst` itself if it does,
        else the nearest on one mesh, and one of the replicas by turns on another."""
        a, b = self.src.topology, self.dst.topology
        replicas = [axis for axis in range(a.ndim) if axis not in self.src.axes]
        turn = flat_index(dst, b.shape, range(b.ndim))
        found = []
        for holder in a.coords(self.src.axes):
            if not box_numel(self.piece(holder, dst)):
                continue
            if a is b:
                near = [dst[axis] if axis in replicas else at for axis, at in enumerate(holder)]
                found.append(tuple(near))
                continue
            same = a.group_coords(holder, replicas)
            here = [member for member in same if a.rank_of(member) == b.rank_of(dst)]
            found.append(here[0] if here else same[turn % len(same)])
        return tuple(found)

    @cached_property
    def slices(self) -> list[tuple[int, Box | None, tuple[int, ...]]]:
        """For each local tensor of a slice its source, the part of that which stays (None if
        nothing does), and its shape."""
        found = []
        for coord in self.dst.slots:
            held, wanted = self.src.box(coord), self.dst.box(coord)
            inside = relative(wanted, held) if box_numel(wanted) else None
            found.append((self.src.slot(coord), inside, box_shape(wanted)))
        return found

    # --- what it costs ---------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """The number of ranks that talk to each other."""
        return prod([self.src.topology.shape[axis] for axis in self.axes])

    def received(self, coord: Coord, itemsize: int = 1) -> int:
        """The number of bytes that the rank at `coord` receives from others, for elements of
        `itemsize`."""
        if self.is_local:
            return 0
        size = box_numel(self.dst.box(coord))
        if self.kind == "all_reduce":
            return 2 * (self.count - 1) * size * itemsize // self.count
        own = self._on_source(coord)
        kept = 0 if own is None else box_numel(self.piece(own, coord))
        return (self._copies * size - kept) * itemsize

    def _on_source(self, coord: Coord) -> Coord | None:
        """The coordinate on the source's mesh of the rank that is at `coord` on the target's."""
        a, b = self.src.topology, self.dst.topology
        if a is b:
            return coord
        rank = b.rank_of(coord)
        return all_coords(a.shape)[a.ranks.index(rank)] if rank in a.ranks else None

    def sent(self, coord: Coord, itemsize: int = 1) -> int:
        """The number of bytes that the rank at `coord` of the source's mesh sends to others."""
        if self.kind == "all_reduce":
            return self.received(coord, itemsize)
        targets = all_coords(self.dst.topology.shape)
        others = [each for each in targets if self._on_source(each) != coord]
        pieces = [self.piece(coord, other) for other in others if coord in self.sources(other)]
        return sum(map(box_numel, pieces)) * itemsize

    def bytes_received(self, itemsize: int) -> int:
        """The number of bytes that a rank receives, for the rank that receives most."""
        found = self._received.get(itemsize)
        if found is None:
            found = self._received[itemsize] = bytes_received([self], [itemsize])
        return found

    def price(self, itemsize: int) -> int:
        """The price of the step by the slowest link that it uses."""
        if self.is_local:
            return 0
        links = [self.src.topology.links[axis] for axis in self.axes]
        if self.kind == "transfer":
            links = [*self.src.topology.links, *self.dst.topology.links]
        return slowest(links, self.bytes_received(itemsize))


def bytes_received(steps: Sequence[Step], itemsizes: Sequence[int]) -> int:
    """The bytes that a rank receives in these steps, for the rank that receives most."""
    where, axes = steps[0].dst.topology, set[int]()
    for step in steps:
        same = where is step.src.topology
        axes |= {*step.src.axes, *step.dst.axes, *step.axes} if same else {*range(where.ndim)}
    return max(
        sum([step.received(coord, size) for step, size in zip(steps, itemsizes, strict=True)])
        for coord in where.coords(axes)
    )
