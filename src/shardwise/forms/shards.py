"""Helpers of distributed forms: layouts of results, and candidates found on every shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dispatch.infer import infer
from ..layout.geometry import Box, contiguous_stride
from ..layout.placement import Replicate
from ..layout.spec import DTensorSpec, TensorMeta
from ..storage.operands import all_in_layout, announce_moves
from ..storage.wrapper import wrap


def metas(op: Any, x: Any, *args: Any, **kwargs: Any) -> tuple[TensorMeta, ...]:
    """Shapes, strides and dtypes of the results on one device."""
    return infer(op, (x, *args), kwargs, (x._spec,))[0]


def without_shards(spec: DTensorSpec, dim: int) -> DTensorSpec:
    """A layout with one dim replicated, and the others as they are."""
    places = [Replicate() if place.is_shard(dim) else place for place in spec.placements]
    own = spec.cuts or [None] * spec.ndim
    return spec.with_placements(places, [None if d == dim else c for d, c in enumerate(own)])


def columns(rows: Sequence[tuple[torch.Tensor, ...]], count: int) -> list[tuple[torch.Tensor, ...]]:
    """Results per shard as local tensors per result; none on a rank outside the mesh."""
    return [tuple(row[index] for row in rows) for index in range(count)]


def candidates(
    op: Any,
    x: Any,
    dim: int,
    most: int,
    local: Callable[[torch.Tensor, Box], tuple[torch.Tensor, ...]],
    dtypes: Sequence[torch.dtype],
) -> list[Any]:
    """The results of `local(part, box)` on every shard, gathered along `dim`.

    The results of `local` have the size of the shard along `dim`, at most `most`. An empty shard
    gives an empty result, so no value has to stand for it.
    """
    spec = x._spec
    kept = tuple(min(most, size) for size in spec.dim_cuts[dim])
    cuts = [kept if d == dim else own for d, own in enumerate(spec.cuts or [None] * spec.ndim)]
    shape = tuple(sum(kept) if d == dim else n for d, n in enumerate(spec.shape))
    made = [local(part, spec.box(c)) for c, part in zip(spec.slots, x._locals, strict=True)]
    moves = []
    for parts, dtype in zip(columns(made, len(dtypes)), dtypes, strict=True):
        meta = TensorMeta(shape, contiguous_stride(shape), dtype)
        x = wrap(DTensorSpec(spec.topology, spec.placements, meta, cuts=cuts), parts)
        moves.append((x, without_shards(x._spec, dim), False))
    announce_moves(op, [(i, to) for i, (_, to, _) in enumerate(moves)], [x for x, _, _ in moves])
    return [wrap(to, parts) for (_, to, _), parts in zip(moves, all_in_layout(moves), strict=True)]
