"""Rows by an index that all ranks know: shards take rows of others, or add to them.

Each shard gets a row once however often it takes it, and sends one sum back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..forms.grouped_mm import laid
from ..forms.index import Shipment, ship
from ..layout.geometry import Cuts, flat_index, intervals
from ..layout.mesh import Coord, Topology
from ..layout.placement import Partial, Placement, Replicate, Shard
from ..layout.spec import DTensorSpec
from ..storage.ragged import move_to
from ..storage.wrapper import Locals, wrap
from ..tensor.autograd import as_gradient

OP = "shardwise.dispatch"


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

    def shard(self, coord: Coord) -> int:
        return flat_index(coord, self.mesh.shape, self.axes)

    def held(self, coord: Coord) -> Tensor:
        """The rows that a rank takes, as indices of its own shard."""
        start, _ = intervals(self.src_cuts)[flat_index(coord, self.mesh.shape, self.src_axes)]
        piece: Tensor = self.index.split(self.cuts)[self.shard(coord)]
        return piece - start

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

    def sent(self, coord: Coord) -> Tensor:
        """The rows that a rank sends, in order of the shards that take them."""
        start, stop = intervals(self.src_cuts)[self.shard(coord)]
        every = [rows[(rows >= start) & (rows < stop)] for rows, _ in self.taken]
        return torch.cat(every) - start

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
    """Each tensor is moved into its layout; what changes owner is sent; the rest is local."""
    layouts = [each.layouts(x._spec, adds) for each, x in zip(rows, values, strict=True)]
    moved = [move_to(OP, x, now) for x, (now, _) in zip(values, layouts, strict=True)]
    prepare, finish = (_summed_once, _summed_at_owners) if adds else (_leaving, _repeated)
    far = [(each, x) for each, x in zip(rows, moved, strict=True) if each.counts is not None]
    arrived = iter(ship(OP, [_shipment(each, x, prepare(each, x), adds) for each, x in far]))
    local = _added_here if adds else _picked_here
    return [
        wrap(to, local(each, x, to) if each.counts is None else finish(each, next(arrived), to))
        for each, x, (_, to) in zip(rows, moved, layouts, strict=True)
    ]


def _shipment(rows: Rows, x: Any, parts: Locals, back: bool) -> Shipment:
    """Rows on their way to those who take them, or back."""
    table = rows.counts or []
    counts = list(map(list, zip(*table, strict=True))) if back else table
    cuts = tuple(map(sum, counts))
    shape = (sum(cuts), *x._spec.meta.shape[1:])
    return laid(x._spec, x._spec.placements, 0, cuts, shape, x.dtype), parts, counts


# --- taking --------------------------------------------------------------------------------------


def _picked_here(rows: Rows, x: Any, to: DTensorSpec) -> Locals:
    parts = [(x._locals[x._spec.slot(c)], rows.held(c)) for c in to.slots]
    return tuple(
        [part.contiguous() if _is_all(index, part) else part[index] for part, index in parts]
    )


def _is_all(index: Tensor, part: Tensor) -> bool:
    """True if an index names all rows in their order."""
    return len(index) == len(part) and torch.equal(index, torch.arange(len(index)).to(index))


def _leaving(rows: Rows, x: Any) -> Locals:
    pairs = zip(x._locals, x._spec.slots, strict=True)
    return tuple([part[rows.sent(coord)] for part, coord in pairs])


def _repeated(rows: Rows, arrived: Locals, to: DTensorSpec) -> Locals:
    pairs = zip(arrived, to.slots, strict=True)
    return tuple([part[rows.taken[rows.shard(c)][1]] for part, c in pairs])


# --- adding --------------------------------------------------------------------------------------


def sum_rows(size: int, index: Tensor, part: Tensor) -> Tensor:
    """`size` rows, each the sum of the rows of `part` that name it. Narrow floats are summed in
    single precision."""
    if size == len(part) and _is_all(index, part):
        return part.contiguous()
    narrow = part.dtype in (torch.bfloat16, torch.float16)
    total = part.new_zeros((size, *part.shape[1:]), dtype=torch.float32 if narrow else part.dtype)
    return total.index_add(0, index, part.to(total.dtype)).to(part.dtype)


def _added_here(rows: Rows, x: Any, to: DTensorSpec) -> Locals:
    return tuple(
        sum_rows(to.local_shape(c)[0], rows.held(c), x._locals[x._spec.slot(c)]) for c in to.slots
    )


def _summed_once(rows: Rows, x: Any) -> Locals:
    made = []
    for part, coord in zip(x._locals, x._spec.slots, strict=True):
        taken, inverse = rows.taken[rows.shard(coord)]
        made.append(sum_rows(len(taken), inverse, part))
    return tuple(made)


def _summed_at_owners(rows: Rows, arrived: Locals, to: DTensorSpec) -> Locals:
    pairs = zip(arrived, to.slots, strict=True)
    return tuple(sum_rows(to.local_shape(c)[0], rows.sent(c), part) for part, c in pairs)
