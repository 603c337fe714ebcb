"""The different elements or slices of a tensor: each rank finds its own, then they are joined.

Where they are many and may stay in shards, they are sorted: each value is then in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import sort

from ..dispatch.fallback import fallback_form
from ..dispatch.operator import register_form
from ..layout.geometry import Cuts, contiguous_stride, flat_index
from ..layout.placement import Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..storage.ragged import (
    as_dtensor,
    divided,
    gather_plain,
    is_requested,
    joined,
    move_to,
    reduce_partial,
)
from ..storage.wrapper import wrap
from .posting import short, written
from .shards import in_line, told

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
    x = reduce_partial(op, x)
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
    rows_apart = neighbours and dim is None and not is_requested() and _rows_before_the_cut(spec)
    if not rows_apart and (neighbours or dim is not None) and spec.dim_axes[cut] != axes:
        # Slices, and what lies between neighbours, are whole where the dim itself is cut.
        places = [Shard(cut) if place.is_shard() else place for place in spec.placements]
        x = move_to(op, x, spec.with_placements(places))
        spec = x._spec
    places = [Shard(0) if axis in axes else Replicate() for axis in range(mesh.ndim)]
    if rows_apart:
        return _by_rows(op, x, rows_apart, places, wants)
    found = [run(part) for part in x._locals]
    rest = [] if dim is None else [size for d, size in enumerate(x.shape) if d != cut]
    if neighbours and not cut and is_requested():
        return _where_found(op, spec, dim, rest, found, wants)
    rows = joined(op, mesh, places, [f[0].movedim(cut, 0).contiguous() for f in found], rest)
    sizes = rows._spec.dim_cuts[0]
    if dim is None and is_requested() and _is_long(rows._spec):
        return _in_order(op, spec, rows, found, wants)
    values, where, _ = run(gather_plain(op, rows).movedim(0, cut))
    return _of_all(op, x, dim, values, where, found, sizes, wants)


def _of_all(
    op: Any,
    x: Any,
    dim: int | None,
    values: torch.Tensor,
    where: torch.Tensor,
    found: Sequence[Sequence[torch.Tensor]],
    sizes: Cuts,
    wants: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """The results, if all ranks know the values, and which of them is each that a shard found."""
    spec, mesh = x._spec, x._spec.topology
    axes, cut = spec.slot_axes, 0 if dim is None else dim % max(x.ndim, 1)
    none = as_dtensor(where.new_empty(0), mesh)
    total = inverse = none
    if wants[1]:
        places = [Shard(0) if axis in axes else Replicate() for axis in range(mesh.ndim)]
        own = [f[2].to(short(x.numel())) for f in found]
        counts = gather_plain(op, joined(op, mesh, places, own, cuts=sizes)).to(torch.int64)
        sums = where.new_zeros(values.shape[cut]).index_add_(0, where, counts)
        total = divided(op, as_dtensor(sums, mesh), axes)
    if wants[0]:
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        parts = [
            where[each[1] + starts[flat_index(coord, mesh.shape, axes)]]
            for coord, each in zip(spec.slots, found, strict=True)
        ]
        inverse = _inverse(spec, dim, parts)
    return divided(op, as_dtensor(values, mesh), axes, cut), inverse, total


# --- neighbours in rows that are cut -----------------------------------------------------------


def _rows_before_the_cut(spec: DTensorSpec) -> int:
    """How many rows a tensor has before its only dim in shards; 0 if there are others, or to know
    what each rank finds in each row is more than to move the tensor."""
    cut = [dim for dim, axes in enumerate(spec.dim_axes) if axes]
    rows = prod(spec.shape[: cut[0]]) if len(cut) == 1 and cut[0] else 0
    nbytes = prod(spec.shape) * spec.dtype.itemsize // spec.num_shards
    return rows if rows * spec.num_shards * 8 < nbytes else 0


def _by_rows(op: Any, x: Any, rows: int, places: Sequence[Any], wants: Sequence[bool]) -> Any:
    """Each rank finds the runs of its piece of each row; runs that go on are joined by all."""
    spec = x._spec
    found = [_runs(part, rows) for part in x._locals]
    table = torch.tensor(told(op, spec, [each[3] for each in found]))
    sizes = tuple(table.sum(1).tolist())
    made = gather_plain(op, joined(op, spec.topology, places, [f[0] for f in found], cuts=sizes))
    # The ranks follow each other, and with each its rows; now the rows, and in each the ranks.
    first = (table.flatten().cumsum(0) - table.flatten()).view(table.shape)
    order, often = first.T.flatten(), table.T.flatten()
    steps = torch.arange(sum(sizes)) - (often.cumsum(0) - often).repeat_interleave(often)
    order = (order.repeat_interleave(often) + steps).to(made.device)
    values, at, _ = op(made[order], True, True)
    where = torch.empty_like(at)
    where[order] = at
    return _of_all(op, x, None, values, where, found, sizes, wants)


def _runs(part: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """Values, inverse and counts of the runs of each row, and how many each has."""
    flat = part.reshape(rows, -1) if part.numel() else part.new_empty(rows, 0)
    begins = torch.ones_like(flat, dtype=torch.bool)
    begins[:, 1:] = flat[:, 1:] != flat[:, :-1]
    line = begins.flatten()
    at = line.nonzero().flatten()
    counts = torch.cat([at, at.new_tensor([line.numel()])]).diff()
    return flat.flatten()[at], (line.cumsum(0) - 1).view(part.shape), counts, begins.sum(1)


def _is_line(spec: DTensorSpec) -> bool:
    """Whether the only dim in shards is one before which there are none but of size 1."""
    cut = [dim for dim, axes in enumerate(spec.dim_axes) if axes]
    return len(cut) == 1 and cut[0] > 0 and prod(spec.shape[: cut[0]]) == 1


def _is_long(spec: DTensorSpec) -> bool:
    """Whether to sort a vector is less than to gather it."""
    return False


def _in_order(
    op: Any,
    spec: DTensorSpec,
    rows: Any,
    found: Sequence[Sequence[torch.Tensor]],
    wants: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """What shards found, in order and each value in one shard; `rows` are the values of all."""
    held = rows._spec
    ordered: Any = sort(rows, 0)
    values, places = ordered
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
    borders = gather_plain(
        op, joined(op, mesh, places, ends, rest, cuts=tuple(2 * n for n in filled))
    )
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
    if dim == 0 and x.ndim == 1:
        dim = None
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
