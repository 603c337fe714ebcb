"""Counting: histograms and bincount. Each rank counts what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..dispatch.fallback import fallback_form, mesh_of
from ..dispatch.operator import register_form
from ..layout.placement import Partial, Placement, Replicate
from ..layout.spec import DTensorSpec, TensorMeta
from ..storage.ragged import (
    as_dtensor,
    divided,
    gather_plain,
    joined,
    move_to,
    reduce_partial,
    requested,
)
from ..storage.wrapper import wrap

__all__ = ["bincount", "histc", "histogram", "repeat_interleave"]

aten = torch.ops.aten


def _summed(x: Any, count: Callable[..., torch.Tensor], *others: Any) -> Any:
    """The sum, left pending, of what `count` gives for the local tensors of DTensors cut alike."""
    spec = x._spec
    parts = [count(*local) for local in zip(x._locals, *(o._locals for o in others), strict=True)]
    places: list[Placement] = [
        Partial() if place.is_shard() else Replicate() for place in spec.placements
    ]
    first = parts[0]
    meta = TensorMeta(tuple(first.shape), first.stride(), first.dtype)
    return wrap(DTensorSpec(spec.topology, places, meta), tuple(parts))


# --- bincount ----------------------------------------------------------------------------------


@register_form("bincount")
def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """The largest value tells the size of the result; then each rank counts."""
    op = aten.bincount.default
    mesh = mesh_of(op, [x, weights])
    x = reduce_partial(op, as_dtensor(x, mesh))
    fits = x.ndim == 1 and x.numel() and (weights is None or weights.shape == x.shape)
    if not fits or minlength < 0 or int(x.min()) < 0:
        return fallback_form(op)(x, weights, minlength)  # nothing to count, or PyTorch's error
    if weights is not None:
        weights = reduce_partial(op, as_dtensor(weights, mesh))
        like = weights._spec if x._spec.is_replicated() else x._spec
        x, weights = (
            move_to(op, t, t._spec.with_placements(like.placements, like.cuts))
            for t in (x, weights)
        )
    size = max(int(x.max()) + 1, minlength)
    if weights is None:
        made = _summed(x, lambda part: op(part, None, size))
    else:
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
        made = _summed(x, lambda part, own: op(part, own, size).to(dtype), weights)
    return divided(op, made, x._spec.slot_axes)


# --- histograms --------------------------------------------------------------------------------


@register_form("histc", always=True)
def histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """The range is that of all values, if none is given; then each rank counts."""
    op = aten.histc.default
    x = reduce_partial(op, x)
    if min == max and x.numel():
        min, max = x.min().item(), x.max().item()
    if min == max:
        min, max = min - 1, max + 1
    return _summed(x, lambda part: op(part, bins, min, max))


def _weighed(op: object, x: Any, weight: Any) -> tuple[Any, list[Any]]:
    """Points and their weights, cut alike; points have one dim more or as many."""
    mesh = mesh_of(op, [x, weight])
    x = reduce_partial(op, as_dtensor(x, mesh))
    if weight is None:
        return x, []
    weight = as_dtensor(weight, mesh)
    cuts = None if x._spec.cuts is None else x._spec.cuts[: weight.ndim]
    return x, [move_to(op, weight, weight._spec.with_placements(x._spec.placements, cuts))]


def _density(counts: Any, edges: Sequence[torch.Tensor]) -> Any:
    """Counts over their sum and over the size of each bin."""
    counts = counts / counts.sum()
    for dim, edge in enumerate(edges):
        width = edge.diff().to(counts.dtype)
        counts = counts / width.view(-1, *[1] * (len(edges) - dim - 1))
    return counts


@register_form("histogram.bin_ct", always=True)
def histogram(
    x: Any, bins: int = 100, *, range: Any = None, weight: Any = None, density: bool = False
) -> tuple[Any, Any]:
    """The range is that of all values, if none is given; then each rank counts."""
    op = aten.histogram.bin_ct
    x, weights = _weighed(op, x, weight)
    if not range and x.numel():
        range = [x.min().item(), x.max().item()]
    edges = op(x._locals[0].new_empty(0), bins, range=range)[1]
    return _histogram(x, weights, edges, partial(op, bins=bins, range=range), density)


@register_form("histogram.bins_tensor", always=True)
def histogram_of_bins(
    x: Any, bins: Any, *, weight: Any = None, density: bool = False
) -> tuple[Any, Any]:
    """Each rank counts in the bins that are given."""
    op = aten.histogram.bins_tensor
    mesh = mesh_of(op, [x, bins, weight])
    x, weights = _weighed(op, as_dtensor(x, mesh), weight)
    edges = gather_plain(op, as_dtensor(bins, mesh)).clone()
    return _histogram(x, weights, edges, partial(op, bins=edges), density)


def _histogram(
    x: Any, weights: list[Any], edges: torch.Tensor, count: Any, density: bool
) -> tuple[Any, Any]:
    counts = _summed(x, lambda part, own=None: count(part, weight=own)[0], *weights)
    if density:
        counts = _density(counts, [edges])
    return counts, as_dtensor(edges, x._spec.topology)


def _spread(x: Any, range: Any) -> Any:
    """The range of each column of points, all smallest and largest ones in turn."""
    if range or not x.numel():
        return range
    flat = x.reshape(-1, x.shape[-1])
    return torch.stack([flat.amin(0), flat.amax(0)], 1).reshape(-1).tolist()


def _splits_points(x: Any) -> bool:
    return bool(x._spec.dim_axes[-1])


@register_form("_histogramdd_bin_edges", always=True)
def bin_edges(
    x: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False
) -> list[Any]:
    """The edges follow from the range of all points."""
    op = aten._histogramdd_bin_edges.default
    x = reduce_partial(op, as_dtensor(x, mesh_of(op, [x, weight])))
    none = x._locals[0].new_empty(0, x.shape[-1])
    return [as_dtensor(e, x._spec.topology) for e in op(none, bins, range=_spread(x, range))]


@register_form("_histogramdd_from_bin_cts", always=True)
def histogramdd(
    x: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    """As `histogram`, for points of several dims."""
    op = aten._histogramdd_from_bin_cts.default
    mesh = mesh_of(op, [x, weight])
    x = as_dtensor(x, mesh)
    if _splits_points(x):
        return fallback_form(op)(x, bins, range=range, weight=weight, density=density)
    x, weights = _weighed(op, x, weight)
    range = _spread(x, range)
    counts = _summed(x, lambda part, own=None: op(part, bins, range=range, weight=own), *weights)
    if not density:
        return counts
    none = x._locals[0].new_empty(0, x.shape[-1])
    return _density(counts, aten._histogramdd_bin_edges.default(none, bins, range=range))


@register_form("_histogramdd_from_bin_tensors", always=True)
def histogramdd_of_bins(x: Any, bins: Any, *, weight: Any = None, density: bool = False) -> Any:
    """Each rank counts in the bins that are given."""
    op = aten._histogramdd_from_bin_tensors.default
    mesh = mesh_of(op, [x, *bins, weight])
    x = as_dtensor(x, mesh)
    if _splits_points(x):
        return fallback_form(op)(x, bins, weight=weight, density=density)
    x, weights = _weighed(op, x, weight)
    edges = [gather_plain(op, as_dtensor(each, mesh)) for each in bins]
    counts = _summed(x, lambda part, own=None: op(part, edges, weight=own), *weights)
    return _density(counts, edges) if density else counts


# --- repeat_interleave ---------------------------------------------------------------------------


@register_form("repeat_interleave.Tensor")
def repeat_interleave(repeats: Any, *, output_size: int | None = None) -> Any:
    """Each rank repeats the places of its shard."""
    op = aten.repeat_interleave.Tensor
    repeats = reduce_partial(op, repeats)
    spec = repeats._spec
    if spec.is_replicated() or repeats.ndim != 1:
        return fallback_form(op)(repeats, output_size=output_size)
    parts = [
        op(part) + spec.box(coord)[0][0]
        for coord, part in zip(spec.slots, repeats._locals, strict=True)
    ]
    made = joined(op, spec.topology, spec.placements, parts)
    if output_size is not None and made.numel() != output_size:
        raise RuntimeError(
            f"repeat_interleave: the repeats add up to {made.numel()}, but output_size is "
            f"{output_size}."
        )
    return requested(op, made)
