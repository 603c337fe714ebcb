"""What distributed forms are made of: a call on every shard, and the moving of its statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from math import prod
from typing import Any

import torch

from ..dispatch.infer import infer
from ..layout.geometry import Box, Cuts, all_coords, contiguous_stride, flat_index
from ..layout.mesh import Coord
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute import DimMap
from ..rules import Call
from ..rules.reductions import reduced_dims
from ..storage.halo import fetch_all
from ..storage.operands import all_in_layout, announce_moves
from ..storage.ragged import gather_plain, joined, reduce_partial
from ..storage.ragged import move_to as relaid
from ..storage.wrapper import Locals, wrap

__all__ = [
    "candidates",
    "columns",
    "gathered",
    "in_line",
    "lacking",
    "metas",
    "neighbours",
    "placed",
    "reduce_partial",
    "relaid",
    "rows_of",
    "sent_on",
    "shard_of",
    "sharded_on",
    "told",
    "told_of_rows",
]


def sharded_on(name: str = "dim") -> Callable[[Call], bool]:
    """Whether a call works along a dim that its first operand has in shards."""

    def when(call: Call) -> bool:
        spec = call.specs[0]
        return any(spec.dim_axes[dim] for dim in reduced_dims(call, name))

    return when


def metas(op: Any, x: Any, *args: Any, **kwargs: Any) -> tuple[TensorMeta, ...]:
    """Shapes, strides and dtypes of the results on one device."""
    return infer(op, (x, *args), kwargs, (x._spec,))[0]


def without_shards(spec: DTensorSpec, dims: Sequence[int]) -> DTensorSpec:
    """A layout with some dims replicated, and the others as they are."""
    places = [
        Replicate() if isinstance(place, Shard) and place.dim in dims else place
        for place in spec.placements
    ]
    cuts = None if spec.cuts is None else list(spec.cuts)
    for dim in dims if cuts is not None else ():
        cuts[dim] = None  # type: ignore[index]
    return spec.with_placements(places, cuts)


def gathered(op: Any, x: Any, dims: Sequence[int]) -> Any:
    """`x` with some dims whole on every rank, the others as they are."""
    return relaid(op, x, without_shards(x._spec, dims))


def placed(
    spec: DTensorSpec, meta: TensorMeta, cuts: Mapping[int, Cuts | None], dropped: int | None = None
) -> DTensorSpec:
    """The spec of a tensor in the shards of `spec`, some dims cut otherwise, one perhaps gone."""
    own = [cuts.get(dim, spec.cuts[dim] if spec.cuts else None) for dim in range(spec.ndim)]
    places: list[Placement] = list(spec.placements)
    if dropped is not None:
        del own[dropped]
        for axis, place in enumerate(places):
            if isinstance(place, Shard) and place.dim > dropped:
                places[axis] = Shard(place.dim - 1)
    return DTensorSpec(spec.topology, places, meta, cuts=own)


def shard_of(spec: DTensorSpec, dim: int, coord: Coord) -> int:
    """Which piece of a dim the rank at `coord` holds."""
    return flat_index(coord, spec.topology.shape, spec.dim_axes[dim])


def neighbours(spec: DTensorSpec, dim: int) -> list[list[int]]:
    """For each shard those that differ from it in their piece of `dim` alone, in order."""
    shape = tuple(spec.topology.shape[axis] for axis in spec.slot_axes)
    own = [spec.slot_axes.index(axis) for axis in spec.dim_axes[dim]]
    groups: dict[tuple[int, ...], list[int]] = {}
    found = []
    for shard, coord in enumerate(all_coords(shape)):
        rest = tuple(place for at, place in enumerate(coord) if at not in own)
        group = groups.setdefault(rest, [])
        group.append(shard)
        found.append(group)
    return found


def columns(rows: Sequence[tuple[torch.Tensor, ...]], count: int) -> list[tuple[torch.Tensor, ...]]:
    """Results per shard as local tensors per result; none on a rank outside the mesh."""
    return [tuple(row[index] for row in rows) for index in range(count)]


def candidates(
    op: Any,
    x: Any,
    dims: Sequence[int],
    most: int,
    local: Callable[[torch.Tensor, Box], tuple[torch.Tensor, ...]],
    dtypes: Sequence[torch.dtype],
) -> list[Any]:
    """What `local(part, box)` gives on every shard, gathered along `dims`.

    `local` leaves of each of `dims` as many places as the shard has, but no more than `most`. A
    shard without elements gives nothing, so no value has to stand for it.
    """
    spec = x._spec
    cuts = {dim: tuple(min(most, size) for size in spec.dim_cuts[dim]) for dim in dims}
    shape = tuple(sum(cuts[d]) if d in cuts else n for d, n in enumerate(spec.shape))
    made = [local(part, spec.box(c)) for c, part in zip(spec.slots, x._locals, strict=True)]
    moves = []
    for parts, dtype in zip(columns(made, len(dtypes)), dtypes, strict=True):
        meta = TensorMeta(shape, contiguous_stride(shape), dtype)
        x = wrap(placed(spec, meta, cuts), parts)
        moves.append((x, without_shards(x._spec, dims), False))
    announce_moves(op, [(i, to) for i, (_, to, _) in enumerate(moves)], [x for x, _, _ in moves])
    return [wrap(to, parts) for (_, to, _), parts in zip(moves, all_in_layout(moves), strict=True)]


def in_line(op: Any, x: Any) -> Any:
    """The elements of a tensor as a vector, shard by shard."""
    spec: DTensorSpec = x._spec
    mesh = spec.topology
    shape = tuple(n if axis in spec.slot_axes else 1 for axis, n in enumerate(mesh.shape))
    cuts = tuple(prod(spec.local_shape(coord)) for coord in all_coords(shape))
    places: list[Placement] = [Shard(0) if p.is_shard() else p for p in spec.placements]
    return joined(op, mesh, places, [part.reshape(-1) for part in x._locals], cuts=cuts)


def told(op: Any, spec: DTensorSpec, own: Sequence[torch.Tensor]) -> list[Any]:
    """The integers that every shard has, on every rank, as lists: axes outer to inner."""
    shape = (spec.num_shards, *own[0].shape)
    meta = TensorMeta(shape, contiguous_stride(shape), torch.int64)
    places = [Shard(0) if place.is_shard() else Replicate() for place in spec.placements]
    parts = tuple(part.unsqueeze(0) for part in own)
    made: list[Any] = gather_plain(
        op, wrap(DTensorSpec(spec.topology, places, meta), parts)
    ).tolist()
    return made


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


def sent_on(
    op: Any,
    like: DTensorSpec,
    vectors: Sequence[tuple[Locals, Sequence[Cuts]]],
    rows: Sequence[DTensorSpec | None] = (),
) -> list[list[list[torch.Tensor]]]:
    """For each vector, maybe of rows, and each slot what the shards have for it, in one exchange.

    Vectors are in as many shards as `like` is. Each is its local tensors and, for each of its
    shards, how many elements are before the end of what is for the first shard, the second and on.
    Rows that are in shards too are so as in `rows`, which are vectors of such rows.
    """
    wanted = []
    for (parts, splits), own in zip_longest(vectors, rows[: len(vectors)]):
        spec = _vector(like, parts, tuple(ends[-1] for ends in splits), own)
        for (start, _), ends in zip(spec.pieces(0), splits, strict=True):
            firsts = (0, *ends[:-1])
            table = tuple((start + a, start + b) for a, b in zip(firsts, ends, strict=True))
            wanted.append((spec, parts, {0: DimMap(spec.dim_axes[0], table)}))
    found = iter(fetch_all(op, wanted))
    made = []
    for parts, splits in vectors:
        pieces = [next(found) for _ in splits]
        made.append([[piece[slot] for piece in pieces] for slot in range(len(parts))])
    return made


def _vector(like: DTensorSpec, parts: Locals, cuts: Cuts, rows: DTensorSpec | None) -> DTensorSpec:
    """The layout of a vector that is in as many shards as `like` is."""
    if rows is None:
        shape = (sum(cuts), *parts[0].shape[1:])
        places: list[Placement] = [
            Shard(0) if place.is_shard() else Replicate() for place in like.placements
        ]
        rest: Sequence[Cuts | None] = [None] * (len(shape) - 1)
    else:
        shape, places = (sum(cuts), *rows.shape[1:]), list(rows.placements)
        rest = (rows.cuts or (None,) * len(shape))[1:]
    meta = TensorMeta(shape, contiguous_stride(shape), parts[0].dtype)
    return DTensorSpec(like.topology, places, meta, cuts=[cuts, *rest])


def lacking(spec: DTensorSpec, dim: int) -> int:
    """The bytes that a rank receives if a dim is made whole by a rule: all of the dim, or shards of
    another one that has places enough."""
    count = len(spec.dim_cuts[dim])
    local = spec.largest_shape
    others = [size for d, size in enumerate(local) if d != dim]
    most = prod(others) * spec.shape[dim] * spec.dtype.itemsize * (count - 1) // count
    return min([most, *(most * -(-size // count) // size for size in others if size)])
