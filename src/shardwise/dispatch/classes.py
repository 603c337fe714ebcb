"""Layout classes: a call with new sizes takes the decision of one that differs in nothing else.

The layouts in which an operator of `_NAMES` runs depend on which sizes are equal, or 1, or named by
an argument, and on no size itself. A Partial beside operands of its own size is passed on, or
reduced into their layout, whatever that size is. So calls that agree in these run in the same
layouts, and the results have the sizes of the same operands. Views that split or merge dims are
compared by how they do so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import torch

from ..layout.geometry import contiguous_stride, memory_order, stride_like
from ..layout.spec import DTensorSpec, TensorMeta
from ..rules.pointwise import pointwise
from .cache import kept, plan_bytes
from .plans import CallPlan, Plan

_GENERAL = (
    "mm bmm addmm baddbmm linear mv dot sum mean amax amin any all argmax argmin cumsum "
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data logsumexp "
    "linalg_vector_norm native_layer_norm native_layer_norm_backward _fused_rms_norm "
    "_fused_rms_norm_backward t transpose permute unsqueeze zeros_like ones_like empty_like "
    "full_like"
)
_NAMES = frozenset(f"aten::{name}" for name in _GENERAL.split(" "))
_Class = tuple[tuple[Any, ...], dict[int, int]]


def has_classes(name: str, family: object, form: Any) -> bool:
    """True if decisions of an operator are kept by class."""
    if form is not None and (form.first or form.always):
        return False
    return name in _NAMES or regroups_dims(name) or family is pointwise


def regroups_dims(name: str) -> bool:
    """True for views that split and merge dims."""
    return name in ("aten::view", "aten::_unsafe_view", "aten::reshape")


def remember(entry: Any, key: tuple[Any, ...], plan: Plan, operands: Sequence[Any]) -> None:
    """Keep a plan for calls of the same class, if its rule is general."""
    if not isinstance(plan, CallPlan) or not plan.is_general:
        return
    found = _class_of(entry, key)
    if found is None or any(spec.cuts or spec.groups for spec in plan.outs):
        return
    sizes = found[1]
    fixed = {1, *_numbers(key)} - {0}
    outs: list[tuple[Any, list[int] | None]] = []
    for spec in plan.outs:
        order, shape = _order(spec.meta), spec.meta.shape
        if order is None:
            return
        if entry.regroups_dims:
            outs.append((order, None))
        elif all(size in sizes or size in fixed for size in shape):
            outs.append((order, [sizes.get(size, -size) for size in shape]))
        else:
            return
    kept.put(entry.classes, found[0], (plan, outs), plan_bytes(operands))


def from_class(entry: Any, key: tuple[Any, ...], specs: Sequence[DTensorSpec]) -> Plan | None:
    """The plan of a call whose class has a decision; None if there is none."""
    found = _class_of(entry, key)
    template = None if found is None else entry.classes.get(found[0])
    if found is None or template is None:
        return None
    plan, outs = template
    if plan.default is not None and plan.default is not torch.get_default_dtype():
        return None
    values = list(found[1])
    made = []
    for spec, (order, places) in zip(plan.outs, outs, strict=True):
        if places is None:
            shape = _resolved(specs[0].meta.shape, key[1])
        else:
            shape = tuple([-at if at < 0 else values[at - 1] for at in places])
        made.append(spec.resized(TensorMeta(shape, _dense(shape, order), spec.meta.dtype)))
    return plan.with_sizes(specs, made)  # type: ignore[no-any-return]


def _class_of(entry: Any, key: tuple[Any, ...]) -> _Class | None:
    """The class of a call, and where each size first stands; None if it has none."""
    view = entry.regroups_dims
    if not _passes(entry, [part for part in key if type(part) is DTensorSpec]):
        return None
    sizes: dict[int, int] = {}
    fixed = _numbers(key)
    parts: list[Any] = []
    for part in key:
        if type(part) is not DTensorSpec:
            parts.append(part)
            continue
        shape, _, dtype = part.meta
        order = _order(part.meta)
        if order is None or part.cuts is not None or part.groups is not None or 0 in shape:
            return None
        places = () if view else [_place(size, fixed, sizes) for size in shape]
        parts.append((part.topology, part.placements, dtype, order, *places))
    if view:
        how = _regrouped(key[0], key[1]) if len(key) == 2 else None
        if how is None:
            return None
        parts[-1] = how
    return tuple(parts), sizes


def _passes(entry: Any, specs: Sequence[DTensorSpec]) -> bool:
    """False if a Partial is among operands of other sizes: these decide whether it is reduced."""
    if not any(spec.sums for spec in specs):
        return True
    return entry.family is pointwise and len({spec.meta.shape for spec in specs}) == 1


def _place(size: int, fixed: Collection[int], sizes: dict[int, int]) -> int:
    """A size in a layout class: the index of a size of the call, or a fixed number."""
    return -size if size == 1 or size in fixed else sizes.setdefault(size, len(sizes) + 1)


def _numbers(key: tuple[Any, ...]) -> set[int]:
    """The integers among the arguments: a size that equals one may do so on purpose."""
    found: set[int] = set()
    for part in key:
        if type(part) is tuple:
            found.update([value for value in part if type(value) is int])
        elif type(part) is int:
            found.add(part)
    return found


def _order(meta: TensorMeta) -> tuple[int, ...] | None:
    """The order of dims in memory of a tensor without gaps; () if contiguous, None if it has
    some."""
    shape, stride, _ = meta
    if stride == contiguous_stride(shape):
        return ()
    order = memory_order(stride)
    return order if stride_like(shape, order) == stride else None


def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dims lie in this order, outer first."""
    return stride_like(shape, order) if order else contiguous_stride(shape)


def _resolved(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes that a view is asked for, without -1."""
    if -1 not in sizes:
        return tuple(sizes)
    known = -prod(sizes)
    return tuple([prod(shape) // known if size == -1 else size for size in sizes])


def _regrouped(spec: DTensorSpec, sizes: tuple[int, ...]) -> tuple[Any, ...] | None:
    """How a view regroups dims, if it splits or merges each by itself and shards stay whole."""
    shape = spec.meta.shape
    if type(sizes) is not tuple or 0 in (*shape, *sizes) or sizes.count(-1) > 1:
        return None
    wanted = _resolved(shape, sizes)
    if 1 in (*shape, *wanted) or prod(wanted) != prod(shape):
        return None
    groups = []
    i = j = 0
    while i < len(shape) and j < len(wanted):
        first = i, j
        have, want = shape[i], wanted[j]
        i, j = i + 1, j + 1
        while have != want:
            if have < want:
                have, i = have * shape[i], i + 1
            else:
                want, j = want * wanted[j], j + 1
        counts = i - first[0], j - first[1]
        shards = prod([spec.topology.shape[axis] for axis in spec.dim_axes[first[0]]])
        uneven = min(shape[first[0]], wanted[first[1]]) % shards
        if min(counts) > 1 or any(spec.dim_axes[first[0] + 1 : i]) or (uneven and max(counts) > 1):
            return None
        groups.append(counts)
    return tuple(groups) if i == len(shape) and j == len(wanted) else None
