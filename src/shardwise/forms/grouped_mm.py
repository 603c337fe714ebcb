"""Products of groups of rows, where experts or rows are sharded: rows go to the owners of their
experts.

Offsets say where the rows of each expert end. They are the same on every rank, so all ranks know
the ragged cuts of rows that belong to the owners. Rows that lie elsewhere are moved there, and the
matrices of experts stay on the axes that shard experts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from ..dispatch.fallback import mesh_of
from ..dispatch.operator import register_form
from ..layout.geometry import Cuts, chunk_cuts, contiguous_stride, flat_index, intervals
from ..layout.mesh import Topology
from ..layout.placement import Partial, Placement, Replicate, Shard, block_groups
from ..layout.spec import DTensorSpec, TensorMeta
from ..rules import Call
from ..rules.linalg import nonempty_product
from ..storage.ragged import as_dtensor, gather_plain, move_to
from ..storage.wrapper import wrap

OP = torch.ops.aten._grouped_mm.default
Way = tuple[Placement, Placement, Placement]
"""The placements of both operands and of the result on one axis."""

_R, _P = Replicate(), Partial()


def _cost(call: Call) -> tuple[()] | None:
    """The form serves sharded experts, and sharded rows that are summed over."""
    a, b = call.specs[:2]
    if call.get("offs") is None or call.get("bias") is not None:
        return None
    if a.ndim == b.ndim == 2:
        return () if a.dim_axes[1] or b.dim_axes[0] else None
    return () if b.ndim == 3 and b.dim_axes[0] else None


@register_form("_grouped_mm", first=True, blocks=True, cost=_cost)
def grouped_mm(a: Any, b: Any, offs: Any, bias: None = None, out_dtype: Any = None) -> Any:
    """A product for each group of rows, on the rank that owns the group's matrix."""
    mesh = mesh_of(OP, [a, b, offs])
    a, b = as_dtensor(a, mesh), as_dtensor(b, mesh)
    ends = gather_plain(OP, offs).tolist()
    dtype = out_dtype or a.dtype
    return (_by_experts if b.ndim == 3 else _into_experts)(a, b, ends, dtype)


def _by_experts(rows: Any, experts: Any, ends: list[int], dtype: torch.dtype) -> Any:
    """`s k, g k n -> s n` with `g` sharded. Rows behind the last group stay with the last rank."""
    spec = experts._spec
    if spec.groups is not None and (spec.cuts or len(spec.groups[0]) > 1):
        experts = move_to(OP, experts, spec.consecutive)
        spec = experts._spec
    own = spec.dim_axes[0]
    shares = _even(spec.topology, own, len(ends)) if spec.groups else spec.dim_cuts[0]
    stops = [[0, *ends][stop] for stop in (0, *accumulate(shares))]
    cuts = tuple([b - a for a, b in pairwise([*stops[:-1], rows.shape[0]])])
    ways = [
        (Shard(0), Shard(0), Shard(0)) if axis in own else _forward_way(x, w)
        for axis, (x, w) in enumerate(zip(rows._spec.placements, spec.placements, strict=True))
    ]
    of_rows, of_experts, of_out = zip(*ways, strict=True)
    x = move_to(OP, rows, laid(rows._spec, of_rows, 0, cuts))
    w = move_to(OP, experts, laid(spec, of_experts, 0, shares))
    out = laid(spec, of_out, 0, cuts, (rows.shape[0], experts.shape[2]), dtype)
    return _called(x, w, ends, out, own, shares, cuts)


def _into_experts(a: Any, b: Any, ends: list[int], dtype: torch.dtype) -> Any:
    """`m s, s n -> g m n` with `s` sharded: the gradient of the matrices of experts.

    If rows are cut where those of experts end, each rank has the gradients of its own experts.
    Otherwise each rank sums over its rows, and the result is a Partial sum.
    """
    mesh = a._spec.topology
    rows = [(x._spec.consecutive, dim) for x, dim in ((b, 0), (a, 1))]
    held = [(spec.dim_axes[dim], spec.dim_cuts[dim]) for spec, dim in rows if spec.dim_axes[dim]]
    found = [(*each, _shares(each[1], ends, _even(mesh, each[0], len(ends)))) for each in held]
    own, cuts, shares = max(found, key=lambda each: (each[2] is not None, len(each[0])))
    first = (Shard(1), Shard(0), Shard(0) if shares else _P)
    ways = [
        first if axis in own else _gradient_way(x, y)
        for axis, (x, y) in enumerate(zip(a._spec.placements, b._spec.placements, strict=True))
    ]
    of_a, of_b, of_out = zip(*ways, strict=True)
    x = move_to(OP, a, laid(a._spec, of_a, 1, cuts))
    y = move_to(OP, b, laid(b._spec, of_b, 0, cuts))
    out = laid(a._spec, of_out, 0, shares, (len(ends), a.shape[0], b.shape[1]), dtype)
    return _called(x, y, ends, out, own, shares, cuts)


# --- cuts ----------------------------------------------------------------------------------------


def _even(mesh: Topology, axes: Sequence[int], size: int) -> Cuts:
    return chunk_cuts(size, tuple([mesh.shape[axis] for axis in axes]))


def _shares(cuts: Cuts, ends: Sequence[int], even: Cuts) -> Cuts | None:
    """How many experts belong to each piece of the rows, near to `even`; None if some expert has
    rows in several pieces.

    >>> _shares((2, 5, 0), [2, 2, 7], (1, 1, 1)), _shares((4, 3), [2, 2, 7], (2, 1))
    ((1, 2, 0), None)
    """
    stops, places = [0, *ends], [0]
    for stop, place in zip(accumulate(cuts), accumulate(even), strict=True):
        stop = min(stop, ends[-1])
        low, high = bisect_left(stops, stop), bisect_right(stops, stop) - 1
        if high < low:
            return None
        places.append(min(max(place, low), high))
    return tuple([b - a for a, b in pairwise(places)])


def laid(
    like: DTensorSpec,
    places: Sequence[Placement],
    dim: int,
    cuts: Cuts | None,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> DTensorSpec:
    """A layout in which one dim has these cuts, and the others are cut evenly."""
    meta = like.meta
    if shape is not None and dtype is not None:
        meta = TensorMeta(shape, contiguous_stride(shape), dtype)
    groups = block_groups(tuple(places), meta.shape)[1] or tuple((n,) for n in meta.shape)
    own: list[Cuts | None] = [None] * sum(map(len, groups))
    own[sum(map(len, groups[:dim]))] = cuts
    return DTensorSpec(like.topology, places, meta, cuts=own)


# --- other axes ----------------------------------------------------------------------------------


def _forward_way(rows: Placement, experts: Placement) -> Way:
    """The rule on an axis that does not shard experts: `s k, _ k n -> s n`."""
    if isinstance(experts, Shard) and experts.dim == 2:
        return _R, experts, Shard(1, experts.split)
    for inner in (experts, rows):
        if isinstance(inner, Shard) and inner.dim == 1:
            return inner, inner, _P
    return (_P, _R, _P) if rows is _P else (_R, _R, _R)


def _gradient_way(a: Placement, b: Placement) -> Way:
    """The rule on an axis that does not shard rows: `m s, s n -> _ m n`."""
    if isinstance(a, Shard) and a.dim == 0:
        return a, _R, Shard(1, a.split)
    if isinstance(b, Shard) and b.dim == 1:
        return _R, b, Shard(2, b.split)
    if a is _P or b is _P:
        return (_P, _R, _P) if a is _P else (_R, _P, _P)
    return _R, _R, _R


# --- local calls ---------------------------------------------------------------------------------


def _called(
    a: Any,
    b: Any,
    ends: Sequence[int],
    out: DTensorSpec,
    axes: Sequence[int],
    shares: Cuts | None,
    cuts: Cuts,
) -> Any:
    """The product on each rank: of `shares` experts, or of all, and the rows in its piece."""
    mesh, parts = out.topology, []
    rows = intervals(cuts)
    experts = intervals(shares) if shares else [(0, len(ends))] * len(rows)
    for coord in out.slots:
        at = flat_index(coord, mesh.shape, axes)
        (start, stop), own = rows[at], slice(*experts[at])
        here = [min(max(end, start), stop) - start for end in ends[own]]
        x, y = (each._locals[each._spec.slot(coord)] for each in (a, b))
        given = {"self": x, "mat2": y, "out_dtype": out.dtype}
        given["offs"] = torch.tensor(here, dtype=torch.int32, device=x.device)
        parts.append(nonempty_product(OP, given, out.local_shape(coord), out.dtype))
    return wrap(out, tuple(parts))
