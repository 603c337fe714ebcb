"""The different elements or slices of a tensor: each rank finds its own, then they are joined.

Where they are many and may stay in shards, they are sorted: each value is then in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..entry import register_form
from ..geometry import contiguous_stride, flat_index
from ..placement import Replicate, Shard
from ..ragged import as_dtensor, divided, is_requested, joined, laid, settled, whole
from ..replicated import fallback_form
from ..spec import DTensorSpec, TensorMeta
from ..wrapper import wrap
from .posting import short, written
from .shards import in_line, told
from .sorting import price, sort

__all__ = ["unique"]

aten = torch.ops.aten


def unique(
    op: Any, x: Any, dim: int | None, neighbours: bool, wants: Sequence[bool], run: Any
) -> Any:
    """Each rank finds what is unique in its shard; what is found goes to all ranks, where the same
    operator joins it, or is sorted if it may stay in shards.

    `run` is the operator with inverse and counts; `wants` says which of them the user asked for.
    `neighbours` tells that the order of elements matters.
    """
    x = settled(op, x)
    if neighbours and dim is None and _is_line(x._spec):
        made, where, total = unique(op, in_line(op, x), dim, neighbours, wants, run)
        if wants[0]:
            pairs = zip(where._locals, x._locals, strict=True)
            where = _inverse(x._spec, dim, [at.view(part.shape) for at, part in pairs])
        return made, where, total
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
    if dim is None and is_requested() and _is_long(rows._spec):
        return _in_order(op, spec, rows, found, wants)
    values, where, _ = run(whole(op, rows).movedim(0, cut))
    none = where.new_empty(0)
    total = as_dtensor(none, mesh)
    if wants[1]:
        own = [f[2].to(short(x.numel())) for f in found]
        counts = whole(op, joined(op, mesh, places, own, cuts=sizes)).to(torch.int64)
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


def _is_line(spec: DTensorSpec) -> bool:
    """Whether the only dim in shards is one before which there are none but of size 1."""
    cut = [dim for dim, axes in enumerate(spec.dim_axes) if axes]
    return len(cut) == 1 and cut[0] > 0 and prod(spec.shape[: cut[0]]) == 1


def _is_long(spec: DTensorSpec) -> bool:
    """Whether to sort a vector is less than to gather it."""
    links = [spec.topology.links[axis] for axis in spec.slot_axes]
    nbytes = (sum(spec.dim_cuts[0]) - min(spec.dim_cuts[0])) * spec.dtype.itemsize
    found = price(spec, 0)
    return found is not None and all(found < link.price(nbytes) for link in links)


def _in_order(
    op: Any,
    spec: DTensorSpec,
    rows: Any,
    found: Sequence[Sequence[torch.Tensor]],
    wants: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """What shards found, in order and each value in one shard; `rows` are the values of all."""
    held = rows._spec
    values, places = sort(rows, 0)
    runs = [aten.unique_consecutive.default(part, True, True) for part in values._locals]
    made, at, none = _where_found(op, values._spec, None, [], runs, (any(wants), False))
    if not any(wants):
        return made, none, none
    narrow = short(held.shape[0])
    meta = TensorMeta(tuple(held.shape), (1,), narrow)
    zeros = [part.new_zeros(part.shape, dtype=narrow) for part in rows._locals]
    blank = wrap(held.with_meta(meta), tuple(zeros))
    new = written(aten.scatter.src, False, blank, 0, places, at.to(narrow)).to(torch.int64)
    inverse = total = none
    if wants[0]:
        parts = [where[own[1]] for where, own in zip(new._locals, found, strict=True)]
        inverse = _inverse(spec, None, parts)
    if wants[1]:
        often = wrap(held.with_meta(meta), tuple(own[2].to(narrow) for own in found))
        empty = [part.new_zeros(part.shape, dtype=narrow) for part in made._locals]
        start = wrap(
            made._spec.with_meta(TensorMeta(tuple(made.shape), (1,), narrow)), tuple(empty)
        )
        total = written(aten.index_add.default, False, start, 0, new, often).to(torch.int64)
    return made, inverse, total


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
