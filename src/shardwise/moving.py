"""Operands laid out anew: what a reduced value is kept for, and what makes it stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from .mesh import Coord
from .redistribute import (
    Layout,
    Ready,
    Run,
    relaid,
    run_all,
    run_between,
    steps_between,
)
from .spec import DTensorSpec, TensorMeta
from .wrapper import Locals, Origin, Wrapper, share_cell, wrap

__all__ = [
    "Move",
    "describe_moves",
    "keep",
    "keep_lane",
    "known",
    "lane",
    "moved",
    "moved_all",
    "once",
    "origin_of",
    "own_copy",
    "same_elements",
    "same_source",
    "source",
    "stamp",
    "stamps",
    "started",
    "wrote",
    "wrote_moved",
]

Move = tuple[int, DTensorSpec]
"""An operand, and the layout it goes to."""


def stamp(tensor: Any) -> tuple[object, ...]:
    """What changes when the tensor is written, through the dispatcher or through its local
    tensors; a deferred view changes with what it is a view of.

    No two stamps are equal of inference tensors that a user gave: writes into these are not
    counted.
    """
    while tensor._of is not None:
        tensor = tensor._of
    cell, parts = tensor._cell, tensor._locals
    if cell is None:
        return 0, _versions(parts, False), ()
    writes, handed = cell.writes, cell.handed
    if handed is not None:
        writes += sum([part._version for part in handed])
    unsure = cell.exposed and handed is None
    also = () if cell.parts is parts else _versions(cell.parts, unsure)
    return writes, _versions(parts, unsure), also


def _versions(parts: Locals, unsure: bool) -> tuple[object, ...]:
    """Inference tensors have no versions: if a user holds them they may have changed."""
    if len(parts) == 1 and not parts[0].is_inference():  # the common case, in half the time
        return (parts[0]._version,)
    return tuple(
        [t._version if not t.is_inference() else object() if unsure else None for t in parts]
    )


def wrote(tensor: Any) -> None:
    """Tell everyone who shares the tensor's memory that it was written."""
    cell = tensor._cell
    if cell is not None:
        cell.writes += 1
    if tensor._memo:
        tensor._memo.clear()  # views of a pending sum have it too
    tensor._picked = None


def wrote_moved(tensor: Any, spec: DTensorSpec, value: Locals) -> None:
    """As `wrote`, where the tensor now has a value that was written in another layout."""
    wrote(tensor)
    if tensor._spec.sums:
        keep(tensor, spec, value)
        origin = origin_of(tensor)
        while origin is not None and origin.before is origin.after:  # an alias
            keep(origin.base, spec, value)
            origin = origin_of(origin.base)


def once(part: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """One place of each dim along which a tensor repeats itself: PyTorch refuses most writes into
    all of them."""
    for dim in meta.repeated:
        part = part.narrow(dim, 0, min(1, part.shape[dim]))
    return part


def own_copy(whole: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A copy to write into. Elements that are one memory in the tensor are one in the copy."""
    if not meta.overlaps:
        return whole.clone()
    if meta.repeated or whole.shape != meta.shape:
        return once(whole, meta).clone().expand(whole.shape)
    made = torch.empty_strided(meta.shape, meta.stride, dtype=whole.dtype, device=whole.device)
    return made.copy_(whole)


def moved(tensor: Any, spec: DTensorSpec, *, fresh: bool = False) -> Locals:
    """The local tensors of `tensor` laid out as `spec`; those of a partial are kept for the next
    user."""
    src = tensor._spec
    if src is spec:
        return tuple(own_copy(t, spec.meta) for t in tensor._locals) if fresh else tensor._locals
    if not src.sums:
        return relaid(src, spec, tensor._locals, fresh=fresh)
    if fresh:  # it is about to be written: nothing is kept of it
        base, local = _source(tensor, spec, alone=True)
        return relaid(base, spec, local, fresh=True)
    memo, now = tensor._memo, stamp(tensor)
    if memo is None:
        memo = tensor._memo = {}
    found = memo.get(spec)
    if found is None or found[0] != now:
        base, local = _source(tensor, spec, alone=True)
        done = _by_lane(tensor, spec) if base is src else None
        found = memo[spec] = (now, relaid(base, spec, local) if done is None else done)
    made: Locals = found[1]
    return made


def _by_lane(tensor: Any, target: DTensorSpec) -> Locals | None:
    """The layout `target` of what was reduced along the pending axes alone, where reducing it again
    would keep these ranks busy with each other alone: nobody else waits for them."""
    src = tensor._spec
    whole, axes, found = src.reduced, src.sums, lane(tensor, tuple(src.sums))
    if found is None or target.sums:
        return None
    moves = [step for step in steps_between(src, target) if not step.is_local]
    if sorted([axis for step in moves for axis in step.axes]) != axes:
        return None
    if any(step.kind != "slice" for step in steps_between(whole, target)):
        return None
    kinds = {step.kind for step in moves}
    if all(place.is_shard() or axis in axes for axis, place in enumerate(src.placements)):
        # Over several axes other collectives may be part of a larger one.
        alone = kinds == {"all_reduce"} or (kinds == {"reduce_scatter"} and len(axes) == 1)
    else:  # there are copies elsewhere, which must be added up in the same way to the last bit
        alone = kinds == {"all_reduce"} and target is whole and not src.meta.repeated
    return relaid(whole, target, tuple([found(at) for at in whole.slots])) if alone else None


Lane = Callable[[Coord], torch.Tensor]
"""What the rank at a coordinate has of a pending sum that was reduced along some axes alone."""


def lane(tensor: Any, axes: tuple[int, ...]) -> Lane | None:
    """What this rank, but maybe no rank elsewhere, has reduced along `axes`: that of a view is a
    view."""
    lanes = tensor._lanes
    found = lanes.get(axes) if lanes else None
    if found is not None and found[0] == stamp(tensor):
        made: Lane = found[1]
        return made
    origin = origin_of(tensor)
    base = None if origin is None or tensor._of is not None else lane(origin.base, axes)
    if origin is None or base is None:
        return None
    whole = origin.before.reduced
    view = origin.call(wrap(whole, tuple([base(at) for at in whole.slots])))
    spec = tensor._spec.reduced
    if type(view) is not Wrapper.public or view._spec is not spec:
        return None
    local = view._locals
    keep_lane(tensor, axes, lambda coord: local[spec.slot(coord)])
    return lane(tensor, axes)


def keep_lane(tensor: Any, axes: tuple[int, ...], value_at: Lane) -> None:
    """Let a pending sum have what was reduced along `axes` alone, for the next user here."""
    share_cell(tensor)  # so that writes into it are counted
    if tensor._lanes is None:
        tensor._lanes = {}
    tensor._lanes[axes] = stamp(tensor), value_at


def same_elements(tensor: Any) -> Any:
    """What a tensor is a view of, if that has no other elements."""
    origin = origin_of(tensor)
    if origin is None or tensor._of is not None:
        return tensor
    alike = prod(origin.before.meta.shape) == prod(tensor._spec.meta.shape)
    return same_elements(origin.base) if alike else tensor


def _source(tensor: Any, target: DTensorSpec, *, alone: bool = False) -> tuple[DTensorSpec, Locals]:
    """What a tensor is laid out anew from: if it has been reduced, nothing is summed again.

    Unless it moves `alone`, in no batch, nothing is reduced for it here.
    """
    kept = _kept(tensor)
    for spec, value in kept.items():
        if not spec.sums:
            return spec, value
    picked = tensor._picked
    if picked is not None and not target.sums and picked.seen == stamps(tensor, picked.index):
        spec, value = picked.brought(tensor._spec, tensor._locals, target)
        keep(tensor, spec, value)
        tensor._picked = None  # no more memory than it must
        return spec, value
    made = _by_origin(tensor, target, alone) if tensor._spec.sums else None
    if made is not None:
        keep(tensor, made._spec, made._locals)
        return made._spec, made._locals
    own = {tensor._spec: tensor._locals, **kept}
    best = min(own, key=lambda spec: _price(spec, target)) if kept else tensor._spec
    return best, own[best]


def _price(src: DTensorSpec, dst: DTensorSpec) -> int:
    return sum(step.price(src.dtype.itemsize) for step in steps_between(src, dst))


def _by_origin(tensor: Any, target: DTensorSpec, alone: bool) -> Any:
    """A view of a pending sum, as a view of what is reduced; None if that would not be less.

    It is if the other is reduced already, or grew from less than the view is, or if both are as
    large and the whole is asked for.
    """
    origin = origin_of(tensor)
    if origin is None:
        return None
    spec = origin.before
    little = _grew_from(origin.base)
    less = little is not None and little <= prod(tensor._spec.meta.shape)
    if not less and not _is_reduced(origin.base):
        larger = prod(spec.meta.shape) > prod(tensor._spec.meta.shape) or _is_crowded(tensor)
        if larger or not alone or target.topology is not spec.topology:
            return None
        if not all(target.placements[axis].is_replicate() for axis in spec.sums):
            return None
    whole = spec.reduced
    return origin.call(wrap(whole, moved(origin.base, whole)))


def _grew_from(tensor: Any) -> int | None:
    """How many elements a pending sum grew from, or that of which it is a view, if it did."""
    picked = tensor._picked
    if picked is not None and picked.seen == stamps(tensor, picked.index):
        size: int | None = picked.size
        return size
    origin = origin_of(tensor)
    return None if origin is None else _grew_from(origin.base)


def _is_crowded(tensor: Any) -> bool:
    """Whether what a deferred view is made of lies on few ranks, as a row does: moved first, each
    of them reduces its share."""
    if tensor._of is None:
        return False
    base, view = [Layout.of(t._spec.fine or t._spec).most for t in (tensor._of, tensor)]
    return 2 * base > 3 * view


def known(tensor: Any) -> tuple[DTensorSpec, Locals] | None:
    """What is reduced of a pending tensor, if all ranks have it; that of a view is a view."""
    memo = tensor._memo
    whole: DTensorSpec = tensor._spec.reduced
    if memo:
        found = memo.get(whole)
        if found is not None and found[0] == stamp(tensor):
            return whole, found[1]
        kept = _kept(tensor)
        if kept:
            best = min(kept, key=lambda at: len(at.sums))
            if any(step.kind != "slice" for step in steps_between(best, whole)):
                return best, kept[best]
            # Some call needed more of it on each rank than the tensor has: others need not.
            made = relaid(best, whole, kept[best])
            keep(tensor, whole, made)
            return whole, made
    origin = origin_of(tensor)
    base = None if origin is None else known(origin.base)
    if origin is None or base is None or base[0] is not origin.before.reduced:
        return None
    view = origin.call(wrap(*base))
    at_once = type(view) is Wrapper.public or view._how[1].is_local
    if not at_once or view._spec.sums:
        return None
    keep(tensor, view._spec, view._locals)
    return view._spec, view._locals


def _kept(tensor: Any) -> dict[DTensorSpec, Locals]:
    """Layouts on the tensor's own mesh with less pending, in which its value is there."""
    memo: dict[DTensorSpec, tuple[Any, Locals]] | None = tensor._memo
    if not memo:
        return {}
    now, spec = stamp(tensor), tensor._spec
    count, mesh = len(spec.sums), spec.topology
    return {
        at: value
        for at, (seen, value) in memo.items()
        if seen == now and len(at.sums) < count and at.topology is mesh
    }


def keep(tensor: Any, spec: DTensorSpec, value: Locals) -> None:
    """Let a pending sum have its value in another layout, for the next user."""
    memo = tensor._memo
    if memo is None:
        memo = tensor._memo = {}
    memo[spec] = (stamp(tensor), value)


def same_source(one: Any, other: Any) -> bool:
    """Whether two tensors are one, or views of one."""
    if one is other:
        return True
    memos = [source(tensor)._memo for tensor in (one, other)]
    return memos[0] is not None and memos[0] is memos[1]


def source(tensor: Any) -> Any:
    """The tensor that a view, or a view of views, is made of."""
    origin = origin_of(tensor)
    return tensor if origin is None else source(origin.base)


def origin_of(tensor: Any) -> Origin | None:
    """What a tensor is a view of, if nothing but values has changed since."""
    origin: Origin | None = tensor._origin
    if origin is None or origin.after is not tensor._spec:
        return None
    return origin if origin.base._cell is tensor._cell else None


def _is_reduced(tensor: Any) -> bool:
    if any(not spec.sums for spec in _kept(tensor)):
        return True
    origin = origin_of(tensor)
    return origin is not None and _is_reduced(origin.base)


def stamps(tensor: Any, index: Any) -> object:
    """What changes when a tensor, or the index by which it was picked, if any, is written."""
    return stamp(tensor), None if index is None else stamp(index)


def _run(tensor: Any, spec: DTensorSpec, fresh: bool) -> Run:
    base, local = _source(tensor, spec)
    return run_between(base, spec, local, fresh=fresh)


def started(
    tensors: Sequence[Any], specs: Sequence[DTensorSpec], async_op: bool = False
) -> list[Ready]:
    """New local tensors for many moves, in few collectives.

    The last collective of each may still be under way. With `async_op` the tensors may be written
    before the results are asked for.
    """
    runs = []
    for tensor, spec in zip(tensors, specs, strict=True):
        base, local = _source(tensor, spec)
        runs.append(run_between(base, spec, local, fresh=True, async_op=async_op))
    return run_all(runs)


def _unreduced(view: Any, target: DTensorSpec) -> list[Any]:
    """What a view of a pending sum is made of, if that is to be reduced in its place."""
    base = same_elements(view) if view._spec.sums else view
    if base is view or _is_reduced(base) or target.topology is not base._spec.topology:
        return []
    whole = all(target.placements[axis].is_replicate() for axis in base._spec.sums)
    return [base] if whole else []


def moved_all(moves: Sequence[tuple[Any, DTensorSpec, bool]]) -> list[Locals]:
    """As `moved`, for many tensors, targets and whether to be fresh, in few collectives."""
    bases = {id(base._memo): base for tensor, spec, _ in moves for base in _unreduced(tensor, spec)}
    if bases:
        moved_all([(base, base._spec.reduced, False) for base in bases.values()])
    found: dict[int, Locals] = {}
    same: dict[tuple[int, DTensorSpec], int] = {}
    runs: list[tuple[int, Run]] = []
    for index, (tensor, spec, fresh) in enumerate(moves):
        memo = tensor._memo
        if tensor._spec is spec:
            found[index] = moved(tensor, spec, fresh=fresh)
        elif not fresh and (id(tensor), spec) in same:
            continue
        elif not fresh and memo and spec in memo and memo[spec][0] == stamp(tensor):
            found[index] = memo[spec][1]
        else:
            if not fresh:
                same[id(tensor), spec] = index
            runs.append((index, _run(tensor, spec, fresh)))
    made = run_all([run for _, run in runs])
    for (index, _), ready in zip(runs, made, strict=True):
        tensor, spec, fresh = moves[index]
        found[index] = ready()
        if not fresh and tensor._spec.sums:
            keep(tensor, spec, found[index])
    return [
        found[index if index in found else same[id(tensor), spec]]
        for index, (tensor, spec, _) in enumerate(moves)
    ]


def describe_moves(moves: Sequence[Move], specs: Sequence[DTensorSpec]) -> list[str]:
    """What each move does, for a notice."""
    texts = []
    for operand, dst in moves:
        src = specs[operand]
        steps = [step for step in steps_between(src, dst) if not step.is_local]
        if steps:
            kinds = ", ".join(
                f"{step.kind}, {step.elements_received * src.dtype.itemsize} B received per rank"
                for step in steps
            )
            texts.append(
                f"operand {operand} from {src.layout_text()} to {dst.layout_text()} ({kinds})"
            )
    return texts
