"""Elements that change their place along a sharded dim: only those that change owner move."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..dispatch.fallback import laid_out
from ..dispatch.infer import meta_of
from ..dispatch.operator import register_form
from ..layout.geometry import Cuts, Interval, chunk_cuts, contiguous_stride, intervals
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute import DimMap, in_order
from ..rules import Call
from ..storage.halo import fetch, fetch_all
from ..storage.wrapper import Wrapper, wrap
from .shards import metas, placed, relaid, shard_of

__all__ = ["cat", "chunk_cat", "flip", "repeat", "roll"]

aten = torch.ops.aten


# --- turning ---------------------------------------------------------------------------------


def _turns_shards(call: Call) -> bool:
    spec = call.specs[0]
    return any(spec.dim_axes[dim] for dim in call.get("dims") or range(spec.ndim))


@register_form("flip", when=_turns_shards)
def flip(x: Any, dims: Sequence[int]) -> Any:
    """Every rank fetches the mirror image of its box."""
    op, spec = aten.flip.default, x._spec
    tables = {}
    for dim in {dim % x.ndim for dim in dims}:
        size = x.shape[dim]
        tables[dim] = [(size - stop, size - start) for start, stop in intervals(spec.dim_cuts[dim])]
    parts = fetch(op, x, tables)
    return wrap(placed(spec, metas(op, x, dims)[0], {}), tuple(op(part, dims) for part in parts))


@register_form("roll", when=_turns_shards)
def roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Every rank fetches its box from where it was before; without dims in the flat tensor."""
    if not dims:
        return aten.roll.default(x.reshape(-1), shifts, [0]).reshape(x.shape)
    made = x
    for shift, dim in zip(shifts, dims, strict=True):
        made = _cyclic(aten.roll.default, made, dim % x.ndim, -shift, x.shape[dim])
    meta = metas(aten.roll.default, x, shifts, dims)[0]
    return wrap(made._spec.with_meta(meta), in_order(made._locals, meta.stride))


def _cyclic(op: Any, x: Any, dim: int, shift: int, size: int) -> Any:
    """`size` places of a dim, each at `place + shift` in `x`, which goes on from its start."""
    spec, period = x._spec, x.shape[dim]
    cuts = spec.dim_cuts[dim] if size == period else chunk_cuts(size, _counts(spec, dim))
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    meta = TensorMeta(shape, contiguous_stride(shape), x.dtype)
    places = intervals(cuts)
    heads = [_head(place, shift, period) for place in places]
    tails = [_tail(place, head) for place, head in zip(places, heads, strict=True)]
    axes = spec.dim_axes[dim]
    first, second = fetch_all(
        op, [(spec, x._locals, {dim: DimMap(axes, tuple(table))}) for table in (heads, tails)]
    )
    parts = []
    for coord, *pair in zip(spec.slots, first, second, strict=True):
        start, stop = places[shard_of(spec, dim, coord)]
        parts.append(_wound(pair, dim, (start + shift) % max(period, 1), stop - start, period))
    return wrap(placed(spec, meta, {dim: cuts}), in_order(parts, meta.stride))


def _counts(spec: DTensorSpec, dim: int) -> tuple[int, ...]:
    return tuple(spec.topology.shape[axis] for axis in spec.dim_axes[dim])


def _head(place: Interval, shift: int, period: int) -> Interval:
    """What a place needs up to where the period ends; all of it if it needs that much."""
    size = place[1] - place[0]
    if size >= period:
        return 0, period
    start = (place[0] + shift) % period
    return start, min(period, start + size)


def _tail(place: Interval, head: Interval) -> Interval:
    """What a place needs from the start of the period."""
    rest = place[1] - place[0] - (head[1] - head[0])
    return (0, rest) if rest <= head[0] else (0, 0)


def _wound(
    pair: Sequence[torch.Tensor], dim: int, start: int, size: int, period: int
) -> torch.Tensor:
    """The two parts joined; a whole period as often as it takes."""
    head, tail = pair
    if not size or not period or head.shape[dim] < period:
        return torch.cat([head, tail], dim)
    turns = -(-(start + size) // period)
    return torch.cat([head] * turns, dim).narrow(dim, start, size)


def _repeats_shards(call: Call) -> bool:
    spec, times = call.specs[0], call.get("repeats")
    lead = len(times) - spec.ndim
    return any(spec.dim_axes[dim] and times[lead + dim] != 1 for dim in range(spec.ndim))


@register_form("repeat", when=_repeats_shards)
def repeat(x: Any, repeats: Sequence[int]) -> Any:
    """The repeated dim is in shards too, cut as `torch.chunk` would."""
    op, times = aten.repeat.default, list(repeats)
    lead = len(times) - x.ndim
    for dim in range(x.ndim):
        if x._spec.dim_axes[dim] and times[lead + dim] != 1:
            x = _cyclic(op, x, dim, 0, x.shape[dim] * times[lead + dim])
            times[lead + dim] = 1
    return op(x, times)


# --- joining ---------------------------------------------------------------------------------


def _joins_shards(call: Call) -> bool:
    dim = call.get("dim", 0) % len(call.results[0].shape)
    ndim = len(call.results[0].shape)
    return any(spec.ndim == ndim and spec.dim_axes[dim] for spec in call.specs)


@register_form("cat", when=_joins_shards)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """The result is in shards along the joined dim, cut as `torch.chunk` would."""
    op = aten.cat.default
    mesh = next(x._spec.topology for x in tensors if isinstance(x, Wrapper))
    given = [x if isinstance(x, Wrapper) else laid_out(x, mesh) for x in tensors]
    examples = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given
    ]
    example = op(examples, dim)
    dim %= example.ndim
    given = [x for x in given if x.ndim == example.ndim]
    out = _joined_spec(given, dim, example)
    ready = [_pending_as(op, x, out) for x in given]
    places = intervals(x.shape[dim] for x in given)
    wanted = [
        (x._spec, x._locals, _windows(out, dim, place))
        for x, place in zip(ready, places, strict=True)
    ]
    made = [
        torch.cat([part.to(out.dtype) for part in parts], dim)
        for parts in zip(*fetch_all(op, wanted), strict=True)
    ]
    return wrap(out, in_order(made, out.stride))


def _joined_spec(given: Sequence[Any], dim: int, example: torch.Tensor) -> DTensorSpec:
    """The layout of the result: on each axis that of most bytes."""
    specs = [x._spec for x in given]
    order = sorted(specs, key=lambda spec: -spec.shape.numel() * spec.dtype.itemsize)
    places: list[Placement] = []
    for axis in range(specs[0].topology.ndim):
        weights: dict[Placement, int] = {}
        for spec in specs:
            place = spec.placements[axis]
            if isinstance(place, Shard):
                nbytes = spec.shape.numel() * spec.dtype.itemsize
                weights[place] = weights.get(place, 0) + nbytes
        pending = {spec.placements[axis] for spec in specs} - {Replicate()}
        sizes = [spec.shape.numel() * spec.placements[axis].is_partial() for spec in specs]
        most = 2 * sum(sizes) >= sum(spec.shape.numel() for spec in specs)
        if weights:
            places.append(max(weights, key=lambda place: weights[place]))
        elif len(pending) == 1 and most and len({s.dtype for s in specs}) == 1:
            places.append(pending.pop())
        else:
            places.append(Replicate())
    plain = DTensorSpec(specs[0].topology, places, meta_of(example))
    cuts: list[Cuts | None] = []
    for d in range(example.ndim):
        same = [
            s for s in order if s.dim_axes[d] == plain.dim_axes[d] and s.shape[d] == plain.shape[d]
        ]
        cuts.append(same[0].dim_cuts[d] if same and plain.dim_axes[d] else None)
    return plain.with_placements(places, cuts)


def _windows(out: DTensorSpec, dim: int, place: Interval) -> dict[int, DimMap]:
    """What every rank needs of the operand that is at `place` of the joined dim."""
    first, size = place[0], place[1] - place[0]
    dims = {d: DimMap(out.dim_axes[d], intervals(out.dim_cuts[d])) for d in range(out.ndim)}
    windows = [
        (min(max(start - first, 0), size), min(max(stop - first, 0), size))
        for start, stop in dims[dim].table
    ]
    dims[dim] = DimMap(out.dim_axes[dim], tuple(windows))
    return dims


def _pending_as(op: Any, x: Any, out: DTensorSpec) -> Any:
    """`x` pending where `out` is, and with what is pending elsewhere reduced: into its shards
    there."""
    spec = x._spec
    places, cuts = list(spec.placements), list(spec.cuts or (None,) * spec.ndim)
    for axis, (have, there) in enumerate(zip(spec.placements, out.placements, strict=True)):
        if there is not have and (have.is_partial() or there.is_partial()):
            places[axis] = there
            if isinstance(there, Shard):
                cuts[there.dim] = None
    return relaid(op, x, spec.with_placements(places, cuts))


@register_form("_chunk_cat")
def chunk_cat(tensors: Sequence[Any], dim: int, num_chunks: int) -> Any:
    """Chunks of every tensor side by side; a dim that falls short is filled up with zeros."""
    parts = []
    for x in tensors:
        at = dim % x.ndim
        lead, size, rest = x.shape[:at], x.shape[at], x.shape[at + 1 :]
        each = -(-size // num_chunks)
        if each * num_chunks > size:
            x = torch.cat([x, x.new_zeros((*lead, each * num_chunks - size, *rest))], at)
        parts.append(x.reshape(*lead, num_chunks, each * prod(rest)))
    return torch.cat(parts, dim % tensors[0].ndim + 1)
