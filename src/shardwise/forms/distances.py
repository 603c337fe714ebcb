"""Distances of rows whose columns are in shards: each rank knows its columns' part of every power.

What is added up, or for the largest difference compared, is of the size of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, prod
from typing import Any

import torch

from ..entry import register_form
from ..placement import Partial, Replicate, Shard
from ..ragged import as_dtensor
from ..replicated import mesh_of
from ..rules import Call
from ..spec import DTensorSpec, TensorMeta
from ..wrapper import wrap
from .shards import lacking, relaid, settled

__all__ = ["cdist", "euclidean", "pdist"]

aten = torch.ops.aten


def _pays(call: Call) -> bool:
    """Whether only columns are in shards, and the result is less than what a rule moves."""
    cut = [spec for spec in call.specs if spec.is_sharded()]
    if not cut or any(not prod(spec.shape) or spec.groups is not None for spec in cut):
        return False
    if any(any(spec.dim_axes[:-1]) for spec in cut):
        return False
    count = cut[0].num_shards
    size = prod(call.results[0].shape) * call.results[0].dtype.itemsize
    for axis in cut[0].slot_axes:
        link = cut[0].topology.links[axis]
        gathered = [
            link.price(prod(spec.shape) * spec.dtype.itemsize * (count - 1) // count)
            for spec in cut
        ]
        rows = [link.price(lacking(spec, spec.ndim - 1)) for spec in cut]
        if len(call.specs) == 1:
            now = gathered[0]
        elif len(cut) == 1:
            now = rows[0]
        else:
            now = min(rows[0] + gathered[1], rows[1] + gathered[0])
        if link.price(2 * size * (count - 1) // count) >= now:
            return False
    return True


def _joined(op: Any, local: Callable[..., torch.Tensor], power: float, *given: Any) -> Any:
    """The distances that `local` gives for some columns as those of all columns."""
    mesh = mesh_of(op, list(given))
    tensors = [settled(op, as_dtensor(each, mesh)) for each in given]
    like = next(each._spec for each in tensors if each._spec.is_sharded())
    last = like.dim_cuts[-1]
    columns = []
    for each in tensors:
        places = [
            Shard(each.ndim - 1) if place.is_shard() else Replicate() for place in like.placements
        ]
        cuts = [*[None] * (each.ndim - 1), last]
        columns.append(relaid(op, each, each._spec.with_placements(places, cuts)))
    found = [local(*parts) for parts in zip(*(each._locals for each in columns), strict=True)]
    parts = [part if power in (0, 1, inf) else part**power for part in found]
    kind = "max" if power == inf else "sum"
    pending = [Partial(kind) if place.is_shard() else Replicate() for place in like.placements]
    meta = TensorMeta(tuple(parts[0].shape), parts[0].stride(), parts[0].dtype)
    made = settled(op, wrap(DTensorSpec(like.topology, pending, meta), tuple(parts)))
    return made if power in (0, 1, inf) else made ** (1 / power)


@register_form("_cdist_forward", when=_pays)
def cdist(x: Any, y: Any, p: float, compute_mode: int | None) -> Any:
    """Distances of the rows of one tensor from those of another."""
    op = aten._cdist_forward.default
    return _joined(op, lambda a, b: op(a, b, p, compute_mode), p, x, y)


@register_form("_euclidean_dist", when=_pays)
def euclidean(x: Any, y: Any) -> Any:
    """As `cdist`, by products."""
    op = aten._euclidean_dist.default
    return _joined(op, op, 2, x, y)


@register_form("_pdist_forward", when=_pays)
def pdist(x: Any, p: float = 2) -> Any:
    """Distances of all pairs of rows."""
    op = aten._pdist_forward.default
    return _joined(op, partial(op, p=p), p, x)
