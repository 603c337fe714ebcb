"""Margins between the classes of a row, which are in shards, and those that the row has as its
targets: ranks share the scores of the targets, and sums."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from ..entry import register_form
from ..placement import Placement, Replicate, Shard
from ..ragged import as_dtensor, settled, whole
from ..replicated import mesh_of
from ..rules import Call
from ..spec import DTensorSpec
from .places import moving
from .shards import relaid

__all__ = [
    "multi_margin_loss",
    "multi_margin_loss_backward",
    "multilabel_margin_loss",
    "multilabel_margin_loss_backward",
]

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


# --- one target ----------------------------------------------------------------------------------


def _cuts_classes(call: Call) -> bool:
    spec = call.specs[call.get("self")].reduced
    weight = call.get("weight")
    parts = [spec] if weight is None else [spec, call.specs[weight].reduced]
    return spec.ndim > 0 and 0 not in spec.shape and any(part.dim_axes[-1] for part in parts)


def _margins(x: Any, target: Any, margin: float) -> tuple[Any, Any]:
    """How far each other class comes nearer than the margin, or nothing; and the targets as a
    column."""
    column = target.reshape(-1, 1)
    rows = x.unsqueeze(0) if x.ndim == 1 else x
    near = margin - rows.gather(1, column) + rows
    near = torch.where(near > 0, near, 0)  # a NaN is no nearer
    return near.scatter(1, column, 0.0), column


@register_form("multi_margin_loss", when=_cuts_classes)
def multi_margin_loss(
    x: Any,
    target: Any,
    p: int = 1,
    margin: float = 1,
    weight: Any = None,
    reduction: int = _MEAN,
) -> Any:
    """Ranks share the score of the target, and what their classes add up to."""
    near, column = _margins(x, target, margin)
    each = (near if p == 1 else near * near).sum(1, keepdim=True)
    if weight is not None:
        each = each * weight[column]
    each = each.squeeze(1) / x.shape[-1]
    if reduction == _NONE:
        return each if target.ndim else each.squeeze(0)
    return each.sum() if reduction == _SUM else each.mean()


@register_form("multi_margin_loss_backward", when=_cuts_classes)
def multi_margin_loss_backward(
    grad: Any,
    x: Any,
    target: Any,
    p: int,
    margin: float,
    weight: Any = None,
    reduction: int = _MEAN,
) -> Any:
    """What a class gets nearer, the class of the target must go farther."""
    near, column = _margins(x, target, margin)
    rows = column.shape[0] if reduction == _MEAN else 1
    scale = grad.reshape(-1, 1) / (x.shape[-1] * rows)
    if weight is not None:
        scale = scale * weight[column]
    each = torch.where(near > 0, scale if p == 1 else 2 * scale * near, 0)
    made = each.scatter(1, column, -each.sum(1, keepdim=True))
    return made if x.ndim > 1 else made.squeeze(0)


# --- several targets -----------------------------------------------------------------------------


def _cut(x: DTensorSpec, target: DTensorSpec) -> list[int]:
    """The axes over which the classes of a row, or what is known of its targets, are in shards."""
    return sorted({axis for spec in (x, target) for axis in spec.dim_axes[-1]})


def _in_rows(spec: DTensorSpec, x: DTensorSpec, target: DTensorSpec) -> DTensorSpec:
    """The layout of either with every row on one rank: what the operator's rule asks for."""
    own = Shard(0) if spec.ndim > 1 else Replicate()
    axes = _cut(x, target)
    places = [own if axis in axes else place for axis, place in enumerate(x.placements)]
    return spec.with_placements(places)


def _is_less(x: DTensorSpec, target: DTensorSpec, count: int) -> bool:
    """Whether the scores of `count` targets of each row, and sums, are less than rows."""
    axes = _cut(x, target)
    rows = 1 if x.ndim == 1 else x.largest_shape[0]
    # Twice what each rank then has: sums are scattered and gathered.
    sizes = [2 * rows * count * x.dtype.itemsize, 2 * rows * 8]
    if not target.is_replicated():  # where each row's targets end, and which they are
        sizes += [2 * rows * 3 * 8, rows * count * 8]
    links = [x.topology.links[axis] for axis in axes]
    shared = sum(max(link.price(nbytes) for link in links) for nbytes in sizes)
    return shared < sum(moving(each, _in_rows(each, x, target)) for each in (x, target))


def _cuts_labels(call: Call) -> bool:
    x, target = (call.specs[call.get(name)].reduced for name in ("self", "target"))
    if not x.ndim or 0 in x.shape or x.shape != target.shape or not _cut(x, target):
        return False
    # Where targets end is looked at before it is known how many they are: let it be little.
    facts = 0 if target.is_replicated() else 2 * 3 * 8 * (1 if x.ndim == 1 else x.shape[0])
    sizes = [prod(each.shape) * each.dtype.itemsize for each in (x, target) if each.is_sharded()]
    count = prod(x.topology.shape[axis] for axis in _cut(x, target))
    return 8 * facts * count < sum(sizes) and _is_less(x, target, 1)


class _Labels(NamedTuple):
    """The targets of each row on every rank that has classes of it.

    `near` is the margin without the score, in order; a place beyond the row's last target has
    -inf, which is near to no class. `order` says where in `column`, the targets, each was.
    """

    column: Any
    near: Any
    order: Any
    counts: Any


def _labels(op: Any, x: Any, target: Any) -> _Labels | None:
    """What is known of targets, up to the longest; None if that is more than the rows are."""
    size = target.shape[1]
    places = torch.arange(size, device=target.device)
    ends = torch.where(target < 0, places, size)
    facts = whole(op, torch.stack([each.amin(1) for each in (ends, target, -target)], 1))
    if int(facts[:, 1].min()) < -1 or -int(facts[:, 2].min()) >= size:
        raise RuntimeError("argument #2 'target' is out of range")
    count = max(int(facts[:, 0].max()), 1)
    if not _is_less(x._spec, target._spec, count):
        return None
    like = x._spec
    rows: list[Placement] = [p if p.is_shard(0) else Replicate() for p in like.placements]
    cuts = None if like.cuts is None else [like.cuts[0], None]
    ends = as_dtensor(facts[:, :1].contiguous(), like.topology)
    ids, ends = (
        relaid(op, each, each._spec.with_placements(rows, cuts))
        for each in (target[:, :count], ends)
    )
    counts, column = places[:count] < ends, ids.clamp(min=0)
    near = 1 - settled(op, x.gather(1, column))
    near = torch.where(counts & ~near.isnan(), near, -torch.inf)
    near, order = near.sort(1)
    return _Labels(column, near, order, counts)


def _both(op: Any, x: Any, target: Any) -> tuple[Any, Any]:
    """Scores and targets as rows, with nothing pending."""
    mesh = mesh_of(op, [x, target])
    x, target = (settled(op, as_dtensor(each, mesh)) for each in (x, target))
    return (x, target) if x.ndim > 1 else (x.unsqueeze(0), target.unsqueeze(0))


def _rowwise(op: Any, x: Any, target: Any) -> tuple[Any, Any]:
    """Both operands with every row on one rank."""
    goals = [_in_rows(each._spec, x._spec, target._spec) for each in (x, target)]
    x, target = (relaid(op, each, goal) for each, goal in zip((x, target), goals, strict=True))
    return x, target


@register_form("multilabel_margin_loss_forward", when=_cuts_labels)
def multilabel_margin_loss(x: Any, target: Any, reduction: int) -> Any:
    """Of targets in order those that are near to a class are the last, and what they add up to is a
    difference of sums."""
    op = aten.multilabel_margin_loss_forward.default
    rows, wanted = _both(op, x, target)
    found = _labels(op, rows, wanted)
    if found is None:
        loss, mine = op(*_rowwise(op, rows, wanted), reduction)
        return loss if x.ndim > 1 else loss.view(()), mine.view(x.shape)
    zeros = torch.zeros_like(rows)
    mine = zeros.scatter_add(1, found.column, found.counts.to(x.dtype)).clamp(max=1)
    first = torch.searchsorted(found.near, -rows, right=True)
    near = found.near.to(torch.float64)
    after = torch.nn.functional.pad(near.flip(1).cumsum(1).flip(1), (0, 1))
    number = near.shape[1] - first
    each = after.gather(1, first) + number * rows
    each = torch.where((mine == 0) & (number > 0), each, 0).sum(1) / rows.shape[1]
    if reduction != _NONE:
        loss = each.sum() if reduction == _SUM else each.mean()
    else:
        loss = each if x.ndim > 1 else each.squeeze(0)
    return loss, mine.view(x.shape)


@register_form("multilabel_margin_loss_backward", when=_cuts_labels)
def multilabel_margin_loss_backward(
    grad: Any, x: Any, target: Any, reduction: int, is_target: Any
) -> Any:
    """A class goes away from each target that is near, and that target from the class."""
    op = aten.multilabel_margin_loss_backward.default
    rows, wanted = _both(op, x, target)
    mine = is_target if x.ndim > 1 else is_target.unsqueeze(0)
    found = _labels(op, rows, wanted)
    if found is None:
        scale = grad if x.ndim > 1 or not grad.ndim else grad.unsqueeze(0)
        return op(scale, *_rowwise(op, rows, wanted), reduction, mine).view(x.shape)
    count = found.near.shape[1]
    first = torch.searchsorted(found.near, -rows, right=True)
    others = (mine == 0).to(torch.int32)
    # A class is near to the targets from its first on.
    bins = torch.zeros_like(found.order, dtype=torch.int32)
    bins = torch.nn.functional.pad(bins, (0, 1)).scatter_add(1, first, others)
    each = settled(op, bins)[:, :count].cumsum(1)
    each = torch.zeros_like(each).scatter(1, found.order, each)
    each = torch.where(found.counts, each, 0)
    away = ((count - first) * others).scatter_add(1, found.column, -each)
    scale = grad.reshape(-1, 1) / (x.shape[-1] * (rows.shape[0] if reduction == _MEAN else 1))
    made = away.to(x.dtype) * scale
    return made if x.ndim > 1 else made.squeeze(0)
