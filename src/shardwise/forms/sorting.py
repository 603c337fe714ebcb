"""Sorting along a dim in shards: each element is moved once, to the rank that has its place.

Each rank sorts its own. Samples tell which elements surely belong into a piece of the result, and
of which few it is not known: those go to both pieces, and whoever has all that may belong into a
piece can tell what does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from ..dispatch.fallback import mesh_of
from ..dispatch.operator import register_form
from ..layout.geometry import Cuts, all_coords, contiguous_stride, flat_index
from ..layout.spec import DTensorSpec, TensorMeta
from ..rules import Call
from ..storage.wrapper import wrap
from .exchange import sent_on, told
from .sampling import Keys, Search, keys_of, known, lines, narrowed, spacing
from .shards import columns, lacking, neighbours, reduce_partial, shard_of

__all__ = ["price", "sort", "sorts"]

aten = torch.ops.aten


def _narrow(size: int) -> torch.dtype:
    """The narrowest integers that count so many."""
    kinds = (torch.int8, torch.int16, torch.int32)
    return next((kind for kind in kinds if size <= torch.iinfo(kind).max + 1), torch.int64)


def _rows(spec: DTensorSpec, dim: int) -> int:
    """The most rows along a dim that a rank holds."""
    return prod(max(cuts) for d, cuts in enumerate(spec.dim_cuts) if d != dim)


def price(spec: DTensorSpec, dim: int) -> int | None:
    """What sorting costs on the dearest axis; None if there is nothing to send, or no order."""
    dim %= max(spec.ndim, 1)
    if not prod(spec.shape) or not spec.ndim or not spec.dim_axes[dim]:
        return None
    if not known(spec.dtype) and spec.dtype is not torch.bool:
        return None
    cuts, rows, width = spec.dim_cuts[dim], _rows(spec, dim), spec.dtype.itemsize
    count, each = len(cuts), width + _narrow(max(cuts)).itemsize
    most = _samples(spec, dim)
    unknown = 3 * spec.shape[dim] // most if max(cuts) > most else 0
    steps = [
        rows * (count - 1) * most * width,
        rows * (max(cuts) * (count - 1) // count + unknown) * each,
    ]
    if spec.num_shards > count:
        steps.append(16 * rows * count * spec.num_shards)
    links = [spec.topology.links[axis] for axis in spec.slot_axes]
    return max(sum(map(link.price, steps)) for link in links)


def sorts(call: Call) -> bool:
    """Whether moving each element once is less than what a rule moves."""
    spec = call.specs[0].reduced
    dim = call.get("dim")
    found = price(spec, dim) if -spec.ndim <= dim < spec.ndim else None  # PyTorch's error
    if found is None:
        return False
    dim %= spec.ndim
    links = [spec.topology.links[axis] for axis in spec.dim_axes[dim]]
    return all(found < link.price(lacking(spec, dim)) for link in links)


class Table(NamedTuple):
    """For each shard, row and piece of the result: where in the row of the shard what may belong
    into the piece begins and ends. `groups` are the shards that have pieces of the same rows."""

    starts: torch.Tensor
    stops: torch.Tensor
    groups: list[list[int]]

    def sizes(self, source: int) -> torch.Tensor:
        return self.stops[source] - self.starts[source]

    def ends(self) -> list[Cuts]:
        """How much of what each shard sends is before the end of what is for each other one."""
        found = []
        for source, group in enumerate(self.groups):
            row = [0] * len(self.groups)
            for shard, size in zip(group, self.sizes(source).sum(0).tolist(), strict=True):
                row[shard] = size
            found.append(tuple(accumulate(row)))
        return found


def _table(op: Any, spec: DTensorSpec, dim: int, seen: Sequence[Search]) -> Table:
    """What every shard sends; `seen` is what each rank found out of its own rows."""
    groups = neighbours(spec, dim)
    count = len(spec.dim_cuts[dim])
    filled = torch.tensor(spec.dim_cuts[dim]) > 0

    def sent(found: Search) -> torch.Tensor:  # what is for no place is sent to nobody
        starts, stops = (each.unflatten(1, (-1, count)) for each in (found.low, found.high))
        return torch.stack([starts, torch.where(filled, stops, starts)])

    if spec.num_shards == count:
        starts, stops = sent(seen[0])
        return Table(starts, stops, groups)
    own = [  # other ranks know nothing of these rows
        sent(found)[:, shard_of(spec, dim, coord)].movedim(0, 1)
        for coord, found in zip(spec.slots, seen, strict=True)
    ]
    starts, stops = told_of_rows(op, spec, dim, own).unbind(2)
    return Table(starts, stops, groups)


def _seen(op: Any, spec: DTensorSpec, dim: int, keys: Sequence[torch.Tensor]) -> list[Search]:
    """What is known of each piece of the result; `keys` are those of the rows, in order."""
    cuts = spec.dim_cuts[dim]
    last = torch.tensor(list(accumulate(cuts)))
    first = last - torch.tensor(cuts)
    begun = [
        Search.begin(cuts, *(each.repeat(len(rows), 1) for each in (first, last))) for rows in keys
    ]
    return narrowed(op, spec, dim, keys, begun, _samples(spec, dim))


def _samples(spec: DTensorSpec, dim: int) -> int:
    cuts = spec.dim_cuts[dim]
    return min(spacing(sum(cuts), len(cuts)), max(cuts))


def _turned(part: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Segments of sizes `[a, b]`, given row by row, column by column."""
    rows, columns = sizes.shape
    if rows == 1 or columns < 2:
        return part
    pieces = part.split(sizes.flatten().tolist())
    return torch.cat([pieces[a * columns + b] for b in range(columns) for a in range(rows)])


def _sorted(op: Any, x: Any, dim: int, descending: bool) -> tuple[Any, Any]:
    mesh_of(op, [x])
    x = reduce_partial(op, x)
    spec: DTensorSpec = x._spec
    dim %= x.ndim
    cuts = spec.dim_cuts[dim]

    def keys(part: torch.Tensor) -> torch.Tensor:
        return ~keys_of(part) if descending else keys_of(part)

    own = [lines(part, dim) for part in x._locals]
    found, orders = columns([keys(part).sort(stable=True) for part in own], 2)
    ordered = [part.gather(1, order) for part, order in zip(own, orders, strict=True)]
    table = _table(op, spec, dim, _seen(op, spec, dim, found))
    shards = [flat_index(coord, spec.topology.shape, spec.slot_axes) for coord in spec.slots]
    narrow = _narrow(max(cuts))
    given, ends = (ordered, [order.to(narrow) for order in orders]), table.ends()
    sent = [tuple(map(partial(_sent, table), parts, shards)) for parts in given]
    came = sent_on(op, spec, [(parts, ends) for parts in sent])
    made = [
        _kept(values, places, table, shard, spec.pieces(dim), len(rows), keys)
        for values, places, shard, rows in zip(*came, shards, own, strict=True)
    ]
    values, places = columns(made, 2)
    return _wrapped(spec, dim, x.dtype, values), _wrapped(spec, dim, torch.int64, places)


def _wrapped(spec: DTensorSpec, dim: int, dtype: torch.dtype, parts: Sequence[torch.Tensor]) -> Any:
    """A tensor in the layout of `spec`, given as rows along `dim`."""
    turned = []
    for coord, part in zip(spec.slots, parts, strict=True):
        shape = list(spec.local_shape(coord))
        size = shape.pop(dim)
        turned.append(part.view(*shape, size).movedim(-1, dim).contiguous())
    meta = TensorMeta(spec.shape, contiguous_stride(spec.shape), dtype)
    return wrap(spec.with_meta(meta), tuple(turned))


def _sent(table: Table, rows: torch.Tensor, shard: int) -> torch.Tensor:
    """What a shard has for each piece, row by row."""
    starts, stops = (each[shard, : len(rows)].tolist() for each in (table.starts, table.stops))
    pieces = [
        rows[row, starts[row][piece] : stops[row][piece]]
        for piece in range(table.starts.shape[-1])
        for row in range(len(rows))
    ]
    return torch.cat(pieces) if pieces else rows.flatten()


def _kept(
    values: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    table: Table,
    shard: int,
    pieces: Sequence[tuple[int, int]],
    count: int,
    keys: Keys,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of a piece of the result and their places, of what came from all shards."""
    group = table.groups[shard]
    piece = group.index(shard)
    starts, stops = (each[group, :count, piece] for each in (table.starts, table.stops))
    sizes = stops - starts
    near = [(values[at], places[at].to(torch.int64) + pieces[i][0]) for i, at in enumerate(group)]
    mine, at = (_turned(torch.cat(each), sizes) for each in zip(*near, strict=True))
    first, last = pieces[piece]
    before, lengths = starts.sum(0).tolist(), sizes.sum(0).tolist()
    kept = []
    for row, skipped, spots in zip(mine.split(lengths), before, at.split(lengths), strict=True):
        order = keys(row).sort(stable=True).indices[first - skipped : last - skipped]
        kept.append((row[order], spots[order]))
    if not kept:
        return mine, at
    found = [torch.cat(each) for each in zip(*kept, strict=True)]
    return found[0], found[1]


@register_form("sort.default", when=sorts)
def sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    """Elements in order, and where each was; equal ones keep their order."""
    return _sorted(aten.sort.default, x, dim, descending)


@register_form("sort.stable", when=sorts)
def sort_stable(x: Any, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    """As `sort`, which is stable anyway."""
    return _sorted(aten.sort.stable, x, dim, descending)


def rows_of(spec: DTensorSpec, dim: int) -> list[torch.Tensor]:
    """For each shard which of the rows along `dim` it has pieces of, counted through the others."""
    mesh = spec.topology
    found = []
    for coord in all_coords(
        tuple(n if a in spec.slot_axes else 1 for a, n in enumerate(mesh.shape))
    ):
        rows = torch.zeros((), dtype=torch.int64)
        for d, (start, stop) in enumerate(spec.box(coord)):
            if d != dim:
                rows = rows.unsqueeze(-1) * spec.shape[d] + torch.arange(start, stop)
        found.append(rows.flatten())
    return found


def told_of_rows(op: Any, spec: DTensorSpec, dim: int, own: Sequence[torch.Tensor]) -> torch.Tensor:
    """The integers that every shard has for each of its rows along `dim`, on every rank; zeros
    where it has fewer rows than others."""
    most = prod(max(cuts) for d, cuts in enumerate(spec.dim_cuts) if d != dim)
    filled = [torch.cat([p, p.new_zeros(most - len(p), *p.shape[1:])]) for p in own]
    return torch.tensor(told(op, spec, [p.to(spec.topology.device_type) for p in filled]))
