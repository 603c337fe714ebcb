"""Counting: histograms, bincount and unique. Each rank counts what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from ..entry import register_form
from ..geometry import contiguous_stride, flat_index
from ..placement import Partial, Placement, Replicate, Shard
from ..ragged import as_dtensor, divided, is_requested, joined, laid, requested, settled, whole
from ..replicated import fallback_form, mesh_of
from ..spec import DTensorSpec, TensorMeta
from ..wrapper import wrap
from .shards import told

__all__ = ["bincount", "histc", "histogram", "repeat_interleave", "unique"]

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
    x = settled(op, as_dtensor(x, mesh))
    fits = x.ndim == 1 and x.numel() and (weights is None or weights.shape == x.shape)
    if not fits or minlength < 0 or int(x.min()) < 0:
        return fallback_form(op)(x, weights, minlength)  # nothing to count, or PyTorch's error
    if weights is not None:
        weights = settled(op, as_dtensor(weights, mesh))
        like = weights._spec if x._spec.is_replicated() else x._spec
        x, weights = (
            laid(op, t, t._spec.with_placements(like.placements, like.cuts)) for t in (x, weights)
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
    x = settled(op, x)
    if min == max and x.numel():
        min, max = x.min().item(), x.max().item()
    if min == max:
        min, max = min - 1, max + 1
    return _summed(x, lambda part: op(part, bins, min, max))


def _weighed(op: object, x: Any, weight: Any) -> tuple[Any, list[Any]]:
    """Points and their weights, cut alike; points have one dim more or as many."""
    mesh = mesh_of(op, [x, weight])
    x = settled(op, as_dtensor(x, mesh))
    if weight is None:
        return x, []
    weight = as_dtensor(weight, mesh)
    cuts = None if x._spec.cuts is None else x._spec.cuts[: weight.ndim]
    return x, [laid(op, weight, weight._spec.with_placements(x._spec.placements, cuts))]


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
    edges = whole(op, as_dtensor(bins, mesh)).clone()
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
    x = settled(op, as_dtensor(x, mesh_of(op, [x, weight])))
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
    edges = [whole(op, as_dtensor(each, mesh)) for each in bins]
    counts = _summed(x, lambda part, own=None: op(part, edges, weight=own), *weights)
    return _density(counts, edges) if density else counts


# --- unique ------------------------------------------------------------------------------------


def unique(
    op: Any, x: Any, dim: int | None, neighbours: bool, wants: Sequence[bool], run: Any
) -> Any:
    """Each rank finds what is unique in its shard; what is found goes to all ranks, where the same
    operator joins it.

    `run` is the operator with inverse and counts; `wants` says which of them the user asked for.
    `neighbours` tells that the order of elements matters.
    """
    x = settled(op, x)
    spec, mesh = x._spec, x._spec.topology
    cut = 0 if dim is None else dim % max(x.ndim, 1)
    axes = spec.slot_axes
    if spec.is_replicated():
        return None
    if (neighbours or dim is not None) and spec.dim_axes[cut] != axes:
        # Slices, and what lies between neighbours, are whole where the dim itself is cut.
        places = [Shard(cut) if place.is_shard() else place for place in spec.placements]
        x = laid(op, x, spec.with_placements(places))
        spec = x._spec
    found = [run(part) for part in x._locals]
    places = [Shard(0) if axis in axes else Replicate() for axis in range(mesh.ndim)]
    rest = [] if dim is None else [size for d, size in enumerate(x.shape) if d != cut]
    if neighbours and not cut and is_requested():
        return _where_found(op, spec, dim, rest, found, wants)
    rows = joined(op, mesh, places, [f[0].movedim(cut, 0).contiguous() for f in found], rest)
    sizes = rows._spec.dim_cuts[0]
    values, where, _ = run(whole(op, rows).movedim(0, cut))
    none = where.new_empty(0)
    total = as_dtensor(none, mesh)
    if wants[1]:
        counts = whole(op, joined(op, mesh, places, [f[2] for f in found], cuts=sizes))
        sums = where.new_zeros(values.shape[cut]).index_add_(0, where, counts)
        total = divided(op, as_dtensor(sums, mesh), axes)
    inverse = None
    if wants[0]:
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        parts = [
            where[own[1] + starts[flat_index(coord, mesh.shape, axes)]]
            for coord, own in zip(spec.slots, found, strict=True)
        ]
        inverse = _inverse(spec, dim, parts)
    return (
        divided(op, as_dtensor(values, mesh), axes, cut),
        as_dtensor(none, mesh) if inverse is None else inverse,
        total,
    )


def _where_found(
    op: Any,
    spec: DTensorSpec,
    dim: int | None,
    rest: Sequence[int],
    found: Sequence[Sequence[torch.Tensor]],
    wants: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """Runs of equal elements, each in the shard where it begins; values at borders move."""
    mesh = spec.topology
    places = [Shard(0) if place.is_shard() else Replicate() for place in spec.placements]
    facts = told(
        op, spec, [torch.stack([f[1].new_tensor(len(f[0])), f[2][:1].sum()]) for f in found]
    )
    filled = [min(size, 1) for size, _ in facts]
    ends = [values[[0, -1]] if len(values) else values for values, *_ in found]
    borders = whole(op, joined(op, mesh, places, ends, rest, cuts=tuple(2 * n for n in filled)))
    pairs = borders.unflatten(0, (-1, 2))
    alike = iter([0, *(pairs[1:, 0] == pairs[:-1, 1]).reshape(-1, prod(rest)).all(1).tolist()])
    goes_on = [int(next(alike)) if n else 0 for n in filled]  # a run of the shard before
    cuts = tuple(size - on for (size, _), on in zip(facts, goes_on, strict=True))
    more, carried = [0] * len(cuts), 0
    for at in reversed(range(len(cuts))):
        if cuts[at]:
            more[at], carried = carried, 0
        carried += goes_on[at] * facts[at][1]
    values, inverse, counts = [], [], []
    for coord, (own, where, often) in zip(spec.slots, found, strict=True):
        at = flat_index(coord, mesh.shape, spec.dim_axes[0])
        values.append(own[goes_on[at] :])
        inverse.append(where + (sum(cuts[:at]) - goes_on[at]))
        counts.append(often[goes_on[at] :].clone())
        counts[-1][-1:] += more[at]
    none = as_dtensor(found[0][1].new_empty(0), mesh)
    return (
        joined(op, mesh, places, values, rest, cuts=cuts),
        _inverse(spec, dim, inverse) if wants[0] else none,
        joined(op, mesh, places, counts, cuts=cuts) if wants[1] else none,
    )


def _inverse(spec: DTensorSpec, dim: int | None, parts: Sequence[torch.Tensor]) -> Any:
    """Where each element or slice went: laid out as the tensor."""
    if dim is None:
        shape = spec.meta.shape
        meta = TensorMeta(shape, contiguous_stride(shape), torch.int64)
        cuts = spec.cuts
        places = spec.placements
    else:
        cut = dim % spec.ndim
        meta = TensorMeta((spec.meta.shape[cut],), (1,), torch.int64)
        cuts = (spec.dim_cuts[cut],)
        places = tuple(Shard(0) if place.is_shard() else place for place in spec.placements)
    made = DTensorSpec(spec.topology, places, meta, cuts=cuts)
    return wrap(made, tuple(part.contiguous() for part in parts))


@register_form("_unique2")
def unique2(
    x: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    """The values of a tensor, in order."""
    op = aten._unique2.default
    wants = (return_inverse, return_counts)
    made = unique(op, x, None, False, wants, lambda part: op(part, sorted, True, True))
    return made or fallback_form(op)(x, sorted, *wants)


@register_form("_unique")
def unique1(x: Any, sorted: bool = True, return_inverse: bool = False) -> Any:
    """As `_unique2`, without counts."""
    return unique2(x, sorted, return_inverse)[:2]


@register_form("unique_consecutive")
def unique_consecutive(
    x: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The values of a tensor, each as often as it does not follow itself."""
    op = aten.unique_consecutive.default
    wants = (return_inverse, return_counts)
    asked = wants if dim is None else (True, True)  # along a dim PyTorch always gives both
    made = unique(op, x, dim, True, asked, lambda part: op(part, True, True, dim))
    return made or fallback_form(op)(x, *wants, dim)


@register_form("unique_dim_consecutive")
def unique_dim_consecutive(
    x: Any, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    """As `unique_consecutive`, for slices along a dim."""
    op = aten.unique_dim_consecutive.default
    made = unique(op, x, dim, True, (True, True), lambda part: op(part, dim, True, True))
    return made or fallback_form(op)(x, dim, return_inverse, return_counts)


@register_form("unique_dim")
def unique_dim(
    x: Any,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    """The slices of a tensor along a dim, in order."""
    op = aten.unique_dim.default
    made = unique(op, x, dim, False, (True, True), lambda part: op(part, dim, sorted, True, True))
    return made or fallback_form(op)(x, dim, sorted, return_inverse, return_counts)


# --- repeat_interleave ---------------------------------------------------------------------------


@register_form("repeat_interleave.Tensor")
def repeat_interleave(repeats: Any, *, output_size: int | None = None) -> Any:
    """Each rank repeats the places of its shard."""
    op = aten.repeat_interleave.Tensor
    repeats = settled(op, repeats)
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
