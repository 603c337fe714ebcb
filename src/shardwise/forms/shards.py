"""Helpers of distributed forms: layouts of results, and candidates found on every shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..dispatch.infer import infer
from ..layout.geometry import Box, Cuts, contiguous_stride, flat_index
from ..layout.mesh import Coord
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..rules import Call
from ..rules.reductions import reduced_dims
from ..storage.operands import all_in_layout, announce_moves
from ..storage.ragged import move_to as relaid
from ..storage.ragged import reduce_partial
from ..storage.wrapper import wrap

__all__ = [
    "candidates",
    "columns",
    "gathered",
    "if_sharded",
    "metas",
    "placed",
    "reduce_partial",
    "relaid",
    "shard_of",
]


def if_sharded(call: Call) -> tuple[()] | None:
    """The cost of a form for calls whose first operand is sharded along `dim`."""
    spec = call.specs[0]
    return () if any(spec.dim_axes[dim] for dim in reduced_dims(call)) else None


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
