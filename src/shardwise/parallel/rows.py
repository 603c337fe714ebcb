"""Rows by an index that all ranks know: shards take rows of others, or add to them.

Each shard gets a row once however often it takes it, and sends one sum back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..config import communication
from ..forms.grouped_mm import laid
from ..layout.geometry import Cuts, flat_index, intervals
from ..layout.layout import DimMap
from ..layout.mesh import Coord, Topology
from ..layout.placement import Partial, Placement, Replicate, Shard
from ..layout.spec import DTensorSpec
from ..storage.halo import fetch_all
from ..storage.ragged import move_to
from ..storage.wrapper import Locals, wrap
from ..tensor.autograd import as_gradient

OP = "shardwise.dispatch_tokens"

Shipment = tuple[DTensorSpec, Locals, Sequence[Sequence[int]]]
"""Rows: their layout, the local tensors, and how many of each shard's rows each shard gets."""


def ship(op: Any, shipments: Sequence[Shipment]) -> list[Locals]:
    """Send rows in one collective: what arrives at each shard, in order of the sending shards."""
    wanted = []
    for spec, parts, counts in shipments:
        for (start, _), row in zip(spec.pieces(0), counts, strict=True):
            table = tuple(pairwise([start, *(start + end for end in accumulate(row))]))
            wanted.append((spec, parts, {0: DimMap(spec.dim_axes[0], table)}))
    found = iter(fetch_all(op, wanted))
    return [
        tuple(map(torch.cat, zip(*[next(found) for _ in counts], strict=True)))
        for _, _, counts in shipments
    ]


@dataclass(frozen=True, eq=False)
class Rows:
    """Row `index[i]` of a tensor is row `i` of another, which is cut into what each shard takes.

    Dim 0 of the first is cut over the mesh axes `src_axes`, that of the second over `axes`. If
    these differ, every rank holds the rows that it takes.
    """

    mesh: Topology
    index: Tensor
    src_axes: tuple[int, ...]
    src_cuts: Cuts
    axes: tuple[int, ...]
    cuts: Cuts

    @cached_property
    def taken(self) -> list[tuple[Tensor, Tensor]]:
        """For each shard the rows that it takes, each once and sorted, and their inverse."""
        pieces = self.index.split(self.cuts)
        return [torch.unique(piece, return_inverse=True) for piece in pieces]

    @cached_property
    def counts(self) -> list[list[int]] | None:
        """How many rows each shard sends each; None if every shard holds what it takes."""
        if self.src_axes != self.axes:
            return None
        stops = torch.tensor(list(accumulate(self.src_cuts)), device=self.index.device)
        owners = [torch.bucketize(rows, stops, right=True) for rows, _ in self.taken]
        table = torch.stack([torch.bincount(own, minlength=len(stops)) for own in owners], dim=1)
        alone = torch.equal(table, table.diag().diag())
        return None if alone else table.tolist()

    def own(self, coord: Coord) -> tuple[Tensor, Tensor]:
        """The rows that a rank sends, as indices of its shard, in order of the shards that take
        them; and which of the rows that it takes each of its rows is."""
        start, stop = intervals(self.src_cuts)[flat_index(coord, self.mesh.shape, self.src_axes)]
        mine = self.taken[flat_index(coord, self.mesh.shape, self.axes)]
        every = [mine] if self.counts is None else self.taken
        sent = [rows[(rows >= start) & (rows < stop)] for rows, _ in every]
        return torch.cat(sent) - start, mine[1]

    def count(self, coord: Coord) -> int:
        """How many rows a rank takes, each counted once."""
        return len(self.taken[flat_index(coord, self.mesh.shape, self.axes)][0])

    def layouts(self, spec: DTensorSpec, adds: bool) -> tuple[DTensorSpec, DTensorSpec]:
        """The layout that a tensor, now in `spec`, must have, and that of the result. Axes that do
        not cut rows keep their Shards and pending sums."""
        first: list[Placement] = []
        second: list[Placement] = []
        for axis, place in enumerate(spec.placements):
            stays = place.is_partial("sum") or (place.is_shard() and not place.is_shard(0))
            other = place if stays and axis not in self.axes else Replicate()
            summed: Placement = Partial() if adds and axis in self.axes else other
            first.append(Shard(0) if axis in self.src_axes else summed)
            second.append(Shard(0) if axis in self.axes else other)
        pairs = ((first, self.src_cuts), (second, self.cuts))
        now, then = reversed(pairs) if adds else pairs
        shape = (sum(then[1]), *spec.meta.shape[1:])
        return laid(spec, now[0], 0, now[1]), laid(spec, then[0], 0, then[1], shape, spec.dtype)


class Pick(torch.autograd.Function):
    """Take rows of several tensors in one collective."""

    @staticmethod
    def forward(ctx: Any, rows: Sequence[Rows], *values: Any) -> Any:
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return tuple(_both_ways(rows, values, adds=False))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *_backward(Add, ctx.rows, grads)


class Add(torch.autograd.Function):
    """Add rows of several tensors to the rows that they were taken of, in one collective."""

    @staticmethod
    def forward(ctx: Any, rows: Sequence[Rows], *values: Any) -> Any:
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return tuple(_both_ways(rows, values, adds=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *_backward(Pick, ctx.rows, grads)


def _backward(function: Any, rows: Sequence[Rows], grads: Sequence[Any]) -> list[Any]:
    found = [(each, g) for each, g in zip(rows, grads, strict=True) if g is not None]
    given = [as_gradient(g, each.mesh) for each, g in found]
    made = iter(function.apply([each for each, _ in found], *given)) if found else iter(())
    return [None if g is None else next(made) for g in grads]


def _both_ways(rows: Sequence[Rows], values: Sequence[Any], adds: bool) -> list[Any]:
    """Each tensor is moved into its layout, what changes owner is sent, the rest is local."""
    made: list[tuple[Rows, DTensorSpec, Locals]] = []
    far: list[Shipment] = []
    for each, value in zip(rows, values, strict=True):
        now, then = each.layouts(value._spec, adds)
        x = move_to(OP, value, now)
        parts = []
        for coord in (now if adds else then).slots:
            sent, inverse = each.own(coord)
            part = x._locals[now.slot(coord)]
            size = each.count(coord)
            parts.append(sum_rows(size, inverse, part) if adds else pick_rows(part, sent))
        made.append((each, then, tuple(parts)))
        if each.counts is not None:
            far.append(_shipment(each, now, tuple(parts), adds))
    with communication("auto"):  # the program asks for it
        arrived = iter(ship(OP, far))
    return [
        wrap(to, _at_goal(each, parts if each.counts is None else next(arrived), to, adds))
        for each, to, parts in made
    ]


def _shipment(rows: Rows, spec: DTensorSpec, parts: Locals, back: bool) -> Shipment:
    """Rows on their way to those who take them, or back."""
    table = rows.counts or []
    counts = list(map(list, zip(*table, strict=True))) if back else table
    cuts = tuple(map(sum, counts))
    shape = (sum(cuts), *spec.meta.shape[1:])
    return laid(spec, spec.placements, 0, cuts, shape, spec.dtype), parts, counts


def _at_goal(rows: Rows, parts: Locals, to: DTensorSpec, adds: bool) -> Locals:
    found = []
    for part, coord in zip(parts, to.slots, strict=True):
        sent, inverse = rows.own(coord)
        size = to.local_shape(coord)[0]
        found.append(sum_rows(size, sent, part) if adds else pick_rows(part, inverse))
    return tuple(found)


# --- local tensors -------------------------------------------------------------------------------


def pick_rows(part: Tensor, index: Tensor) -> Tensor:
    """The rows that an index names: all of them are not copied."""
    return part.contiguous() if _is_all(index, len(part)) else part[index]


def sum_rows(size: int, index: Tensor, part: Tensor) -> Tensor:
    """`size` rows, each the sum of the rows of `part` that name it. Narrow floats are summed in
    single precision."""
    if _is_all(index, size):
        return part.contiguous()
    narrow = part.dtype in (torch.bfloat16, torch.float16)
    total = part.new_zeros((size, *part.shape[1:]), dtype=torch.float32 if narrow else part.dtype)
    return total.index_add(0, index, part.to(total.dtype)).to(part.dtype)


def _is_all(index: Tensor, size: int) -> bool:
    """True if an index names all rows in their order."""
    return len(index) == size and torch.equal(index, torch.arange(size, device=index.device))
