"""ctc_loss: of a sequence only the classes that its target names, and the blank, are looked at.

Where times or classes are in shards each rank picks these columns of what it has, and they go to
the rank that has the sequence; so do the gradients of these columns, back. All other gradients are
found where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from ..entry import register_form
from ..errors import OutOfRangeError
from ..geometry import Cuts, chunk_cuts, contiguous_stride
from ..mesh import Coord
from ..placement import Placement, Replicate, Shard
from ..plain import full_local
from ..ragged import as_dtensor, whole
from ..redistribute import Layout
from ..rules import Call
from ..spec import DTensorSpec, TensorMeta
from ..windows import fetch_all
from ..wrapper import Locals, wrap
from .posting import piece_of
from .shards import relaid, shard_of

__all__ = ["ctc_loss", "ctc_loss_backward", "ctc_loss_by_columns", "ctc_loss_by_columns_backward"]

aten = torch.ops.aten


def _lengths(value: Any) -> list[int]:
    """Lengths as numbers: the shapes of what follows depend on them."""
    return [int(length) for length in full_local(value).flatten()]


@register_form("_ctc_loss.Tensor", always=True)
def ctc_loss(
    log_probs: Any, targets: Any, inputs: Any, lengths: Any, *rest: Any, **kwargs: Any
) -> Any:
    """With lengths in tensors, which may be sharded as the batch is."""
    op = aten._ctc_loss.default
    return op(log_probs, targets, _lengths(inputs), _lengths(lengths), *rest, **kwargs)


@register_form("_ctc_loss_backward.Tensor", always=True)
def ctc_loss_backward(
    grad: Any, log_probs: Any, targets: Any, inputs: Any, lengths: Any, *rest: Any, **kwargs: Any
) -> Any:
    """As `ctc_loss`."""
    op = aten._ctc_loss_backward.default
    return op(grad, log_probs, targets, _lengths(inputs), _lengths(lengths), *rest, **kwargs)


# --- when columns are less -----------------------------------------------------------------------


def _cut(x: DTensorSpec) -> list[int]:
    """The axes over which times or classes are in shards."""
    return sorted((*x.dim_axes[0], *x.dim_axes[2]))


def _is_less(call: Call) -> bool:
    """Whether the classes that targets may name are fewer than all; axes that shard the batch come
    first, so that its shards can be cut again."""
    x, targets = (call.specs[call.get(name)] for name in ("log_probs", "targets"))
    if x.ndim != 3 or x.sums or 0 in x.shape or not _cut(x):
        return False
    if x.dim_axes[1] and max(x.dim_axes[1]) > _cut(x)[0]:
        return False
    count = prod(x.topology.shape[axis] for axis in _cut(x))
    each = x.shape[0] * -(-max(x.dim_cuts[1]) // count) * x.dtype.itemsize
    known = 0 if targets.is_replicated() else prod(targets.shape) * targets.dtype.itemsize
    named = 1 + max(call.get("target_lengths"))
    return bool(named * each + known < x.shape[2] * each)


# --- columns -------------------------------------------------------------------------------------


class _Named(NamedTuple):
    """The different classes of every sequence: whose they are, which, and their columns."""

    sequence: torch.Tensor
    classes: torch.Tensor
    column: torch.Tensor

    def of(self, which: torch.Tensor) -> _Named:
        return _Named(*(each[which] for each in self))


def _named(
    targets: torch.Tensor, lengths: Sequence[int], blank: int, size: int
) -> tuple[_Named, Any]:
    """The classes that targets name and the blank, whose column is the first, and targets that name
    columns."""
    found, new = [], torch.zeros_like(targets)
    for at, (start, length) in enumerate(zip([0, *accumulate(lengths)], lengths, strict=False)):
        rows, own = (targets, new) if targets.ndim == 1 else (targets[at], new[at])
        here = slice(start, start + length) if targets.ndim == 1 else slice(length)
        given = rows[here].to(torch.int64)
        others = given[given != blank].unique()
        column = torch.searchsorted(others, given) + 1
        own[here] = torch.where(given == blank, 0, column).to(targets.dtype)
        classes = torch.cat([others.new_tensor([blank]), others])
        places = torch.arange(len(classes), device=classes.device)
        found.append(_Named(torch.full_like(places, at), classes, places))
        if len(others) and (others[0] < 0 or others[-1] >= size):
            bad = int(others[0] if others[0] < 0 else others[-1])
            raise OutOfRangeError(f"ctc_loss: target {bad} is none of {size} classes")
    return _Named(*(torch.cat(each) for each in zip(*found, strict=True))), new


class _Post(NamedTuple):
    """The columns of the sequences that one rank of each shard of the batch has: where they are,
    and where they go."""

    named: _Named
    held: DTensorSpec
    wanted: DTensorSpec

    def fetched(self, back: bool, parts: Locals) -> tuple[DTensorSpec, Locals, dict[int, Any]]:
        """What `fetch_all` has to bring."""
        source, goal = (self.wanted, self.held) if back else (self.held, self.wanted)
        return source, parts, dict(enumerate(Layout.of(goal).dims))

    def at(self, spec: DTensorSpec, coord: Coord) -> _Named:
        """Those columns of which a rank has some times."""
        start, stop = spec.box(coord)[1]
        return self.named.of(torch.arange(start, stop, device=self.named.column.device))


class _Columns(NamedTuple):
    """All columns: in the shards of `log_probs`, and of a tensor whose batch is in shards."""

    x: DTensorSpec
    picked: DTensorSpec
    posts: list[_Post | None]
    targets: Any


def _again(spec: DTensorSpec, count: int) -> Cuts:
    """The shards of a batch cut again, each into so many."""
    return tuple(n for size in spec.dim_cuts[1] for n in chunk_cuts(size, (count,)))


def _columns(op: Any, x: Any, targets: Any, lengths: Sequence[int], blank: int) -> _Columns:
    spec: DTensorSpec = x._spec
    axes, mesh = _cut(spec), spec.topology
    count = prod(mesh.shape[axis] for axis in axes)
    named, new = _named(whole(op, targets), lengths, blank, spec.shape[2])
    cuts = _again(spec, count)
    owner = piece_of(named.sequence, list(accumulate(cuts)))
    kind = piece_of(named.classes, list(accumulate(spec.dim_cuts[2])))
    posts = []
    for at in range(count):
        mine = (owner % count == at).nonzero().flatten()
        key = (owner // count * len(spec.dim_cuts[2]) + kind)[mine]
        order = key.sort(stable=True).indices
        number = len(spec.dim_cuts[1]) * len(spec.dim_cuts[2])
        sizes = torch.bincount(key, minlength=number).view(len(spec.dim_cuts[1]), -1)
        posts.append(_post(spec, axes, at, named.of(mine[order]), sizes) if len(mine) else None)
    places = [
        Shard(1) if axis in axes or place.is_shard(1) else Replicate()
        for axis, place in enumerate(spec.placements)
    ]
    shape = (spec.shape[0], spec.shape[1], int(named.column.max()) + 1)
    meta = TensorMeta(shape, contiguous_stride(shape), spec.dtype)
    picked = DTensorSpec(mesh, places, meta, cuts=[None, cuts, None])
    return _Columns(spec, picked, posts, as_dtensor(new, mesh))


def _post(
    x: DTensorSpec, axes: Sequence[int], at: int, named: _Named, sizes: torch.Tensor
) -> _Post:
    """The two layouts of columns: `sizes` are those of each shard of the batch and of classes."""
    times, count = x.shape[0], prod(x.topology.shape[axis] for axis in axes)
    shape = (times, len(named.column))
    meta = TensorMeta(shape, contiguous_stride(shape), x.dtype)
    now: list[Placement] = [
        Shard(min(place.dim, 1)) if isinstance(place, Shard) else place for place in x.placements
    ]
    goal = [Shard(0) if axis in axes else place for axis, place in enumerate(now)]

    def spec(places: Sequence[Placement], long: Cuts, wide: Sequence[int]) -> DTensorSpec:
        own = [long, tuple(wide)]
        cuts = [
            cut if any(place.is_shard(dim) for place in places) else None
            for dim, cut in enumerate(own)
        ]
        return DTensorSpec(x.topology, places, meta, cuts=cuts)

    alone = tuple(times if place == at else 0 for place in range(count))
    return _Post(
        named,
        spec(now, x.dim_cuts[0], sizes.flatten().tolist()),
        spec(goal, alone, sizes.sum(1).tolist()),
    )


def _pick(op: Any, x: Any, columns: _Columns) -> Any:
    """The columns of `log_probs`, those of a sequence on the rank that has it."""
    wanted = []
    for post in filter(None, columns.posts):
        parts = []
        for coord, part in zip(post.held.slots, x._locals, strict=True):
            _, (first, _), (start, _) = columns.x.box(coord)
            own = post.at(post.held, coord)
            parts.append(part[:, own.sequence - first, own.classes - start])
        wanted.append(post.fetched(False, tuple(parts)))
    found = iter(fetch_all(op, wanted))
    arrived = [None if post is None else next(found) for post in columns.posts]
    made = []
    for slot, coord in enumerate(columns.picked.slots):
        local = x._locals[0].new_full(columns.picked.local_shape(coord), -torch.inf)
        at = _place(columns, coord)
        mine, came = columns.posts[at], arrived[at]
        if mine is not None and came is not None:
            own = mine.at(mine.wanted, coord)
            first = columns.picked.box(coord)[1][0]
            local[:, own.sequence - first, own.column] = came[slot]
        made.append(local)
    return wrap(columns.picked, tuple(made))


def _place(columns: _Columns, coord: Coord) -> int:
    """Which of the ranks that have a shard of the batch together a rank is."""
    axes = _cut(columns.x)
    return shard_of(columns.picked, 1, coord) % prod(columns.x.topology.shape[a] for a in axes)


def _returned(op: Any, made: Any, columns: _Columns, parts: Sequence[torch.Tensor]) -> None:
    """Write the gradients of columns, each where `log_probs` has its class."""
    wanted = []
    for at, post in enumerate(columns.posts):
        if post is None:
            continue
        sent = []
        for coord, part in zip(post.wanted.slots, made._locals, strict=True):
            own, first = post.at(post.wanted, coord), columns.picked.box(coord)[1][0]
            if _place(columns, coord) == at:
                sent.append(part[:, own.sequence - first, own.column])
            else:
                sent.append(part.new_empty(0, len(own.column)))
        wanted.append(post.fetched(True, tuple(sent)))
    posts = list(filter(None, columns.posts))
    for post, found in zip(posts, fetch_all(op, wanted), strict=True):
        for coord, part, new in zip(post.held.slots, parts, found, strict=True):
            _, (first, _), (start, _) = columns.x.box(coord)
            own = post.at(post.held, coord)
            part[:, own.sequence - first, own.classes - start] = new


# --- the loss ------------------------------------------------------------------------------------


@register_form("_ctc_loss.default", when=_is_less)
def ctc_loss_by_columns(
    log_probs: Any,
    targets: Any,
    inputs: Sequence[int],
    lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    """The loss of each sequence from its columns."""
    op = aten._ctc_loss.default
    columns = _columns(op, log_probs, targets, lengths, blank)
    picked = _pick(op, log_probs, columns)
    return op(picked, columns.targets, inputs, lengths, 0, zero_infinity)


@register_form("_ctc_loss_backward.default", when=_is_less)
def ctc_loss_by_columns_backward(
    grad: Any,
    log_probs: Any,
    targets: Any,
    inputs: Sequence[int],
    lengths: Sequence[int],
    loss: Any,
    log_alpha: Any,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    """The gradient of a class that no target names follows from its probability."""
    op = aten._ctc_loss_backward.default
    columns = _columns(op, log_probs, targets, lengths, blank)
    picked = _pick(op, log_probs, columns)
    rest = (inputs, lengths, loss, log_alpha, 0, zero_infinity)
    made = op(grad, picked, columns.targets, *rest)
    made = relaid(op, made, made._spec.with_placements(picked.placements, picked._spec.cuts))
    scale, cost = (whole(op, each) for each in (grad, loss))
    ends = cost.new_tensor(inputs, dtype=torch.int64)
    if zero_infinity:
        ends = ends.masked_fill(cost == torch.inf, 0)
    parts = []
    for coord, part in zip(log_probs._spec.slots, log_probs._locals, strict=True):
        (start, stop), (first, last), _ = log_probs._spec.box(coord)
        # As the kernel has it: NaN next to a loss or a probability that is infinite.
        of_targets = (cost[first:last] - torch.inf).unsqueeze(1) - part
        each = (part.exp() - of_targets.exp()) * scale[first:last].unsqueeze(1)
        counts = torch.arange(start, stop, device=part.device).unsqueeze(1) < ends[first:last]
        parts.append(torch.where(counts.unsqueeze(2), each, 0))
    _returned(op, made, columns, parts)
    return wrap(log_probs._spec, tuple(parts))
