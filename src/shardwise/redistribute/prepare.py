"""`Move`: a redistribution between two specs, prepared once.

- Only one index of a dim of stride 0, as `expand` makes it, is moved, if the dim is not sharded.
- Dims that are sharded block by block are split, so that every shard is a box, and merged at the
  end. If source and target have no common refinement, the tensor goes through a third layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from ..comm import start
from ..comm.all_to_all import buffer_size
from ..comm.dtypes import check_reducible
from ..comm.events import record_moves
from ..comm.protocol import Job, narrow
from ..comm.step import Step
from ..layout.geometry import box_shape, memory_order
from ..layout.layout import Layout
from ..layout.placement import Partial
from ..layout.spec import DTensorSpec, Groups, TensorMeta
from ..layout.split_dims import common, rounded, split_layout
from .between import between
from .plan import Steps, candidates

Locals = tuple[torch.Tensor, ...]
Change = Callable[[Locals], Locals]


@dataclass(frozen=True)
class Move:
    """The steps from one spec to another.

    `enter` makes the tensors that the steps take from the local tensors, `leave` the local tensors
    from what the steps give. `run` is the whole move, if that is one step.
    """

    cheapest: Steps
    leanest: Steps
    between: int
    order: tuple[int, ...]
    dtype: torch.dtype
    enter: Change | None = None
    leave: Change | None = None
    run: Callable[[Locals, bool], Locals] | None = None

    @property
    def steps(self) -> Steps:
        """The cheapest steps; if they hold more than the buffer between two collectives, those that
        hold least."""
        return self.cheapest if self.between <= buffer_size() else self.leanest

    @cached_property
    def only(self) -> Step | None:
        """The step, if the move is one collective on one mesh."""
        return None if self.run is None or self.cheapest[0].is_local else self.cheapest[0]

    @cached_property
    def first(self) -> Step | None:
        """The first collective."""
        return next((step for step in self.cheapest if not step.is_local), None)

    @cached_property
    def alike(self) -> object:
        """The key of moves whose first collectives may be merged into one."""
        return None if self.first is None else self.first.alike(self.dtype)

    @cached_property
    def nbytes(self) -> int:
        """The bytes that a rank gives to the first collective, at most."""
        return 0 if self.first is None else self.first.src.most * self.dtype.itemsize

    @property
    def is_view(self) -> bool:
        """True if the results are views of the source."""
        return all(step.kind in ("slice", "view") for step in self.steps)


@lru_cache(maxsize=16384)
def prepared(src: DTensorSpec, dst: DTensorSpec) -> Move:
    """The move from one layout of a tensor to another."""
    for place in (*src.placements, *dst.placements):
        if isinstance(place, Partial):
            check_reducible(place.reduce_op, src.dtype)
    if src.meta.repeated or dst.meta.repeated:
        return _repeated(src, dst)
    return _prepared(src, dst)


def _prepared(src: DTensorSpec, dst: DTensorSpec) -> Move:
    """As `prepared`, whatever the strides."""
    if src.groups is not None or dst.groups is not None:
        return _in_blocks(src, dst)
    move = _between_boxes(src.layout, dst.layout, dst, memory_order(dst.stride))
    return replace(move, run=_quick(move))


def once(part: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The first index of each dim of stride 0: PyTorch refuses most writes into all of them."""
    for dim in meta.repeated:
        part = part.narrow(dim, 0, min(1, part.shape[dim]))
    return part


def steps_between(src: DTensorSpec, dst: DTensorSpec) -> Steps:
    """The steps that a redistribution takes."""
    return prepared(src, dst).steps


def _between_boxes(now: Layout, goal: Layout, dst: DTensorSpec, order: tuple[int, ...]) -> Move:
    if now.topology is not goal.topology or now.shares_axes or goal.shares_axes:
        leanest = tuple(between(now, goal))
        found = [leanest]
    else:
        found, leanest = candidates(now, goal)
    itemsize, cheapest = dst.dtype.itemsize, found[0]
    if len(found) > 1:
        cheapest = min(found, key=lambda steps: sum([step.price(itemsize) for step in steps]))
    cheapest, leanest = (
        tuple([replace(step, order=order) for step in steps]) for steps in (cheapest, leanest)
    )
    return Move(cheapest, leanest, _held_between(cheapest) * itemsize, order, dst.dtype)


def _held_between(steps: Steps) -> int:
    """The most elements that a rank holds between two collectives."""
    made = [step.dst.most for step in steps if not step.is_local]
    return max(made[:-1], default=0)


# --- dims in blocks ------------------------------------------------------------------------------


def _in_blocks(src: DTensorSpec, dst: DTensorSpec) -> Move:
    """The move between layouts of which at least one shards the blocks of a dim."""
    groups = common(src.blocks, dst.blocks)
    now, goal = (None if groups is None else split_layout(spec, groups) for spec in (src, dst))
    if groups is None or now is None or goal is None:
        return _through(src, _third(src, dst), dst)
    shapes = [box_shape(now.box(coord)) for coord in now.slots]
    ends = [dst.local_shape(coord) for coord in dst.slots]
    move = _between_boxes(now, goal, dst, _split_order(dst, groups))
    return replace(move, enter=_reshaped(shapes), leave=_reshaped(ends))


def _third(src: DTensorSpec, dst: DTensorSpec) -> DTensorSpec:
    """The layout to go through: nearly that of an end whose shards are consecutive, cut only where
    the blocks of the other end end."""
    if dst.groups is None:
        return rounded(dst, src.blocks)
    blocks = dst.blocks if src.groups is None else src.blocks
    return rounded(src.consecutive, blocks).with_meta(dst.meta)


def _through(src: DTensorSpec, way: DTensorSpec, dst: DTensorSpec) -> Move:
    """The moves to a third layout and on from there, as one."""
    first, second = prepared(src, way), prepared(way, dst)
    if not first.cheapest or not second.cheapest:
        return first if first.cheapest else second
    seam = Step("view", first.cheapest[-1].dst, second.cheapest[0].src, order=second.order)
    steps = (*first.cheapest, seam, *second.cheapest)
    held = _held_between(steps) * dst.dtype.itemsize
    return replace(second, cheapest=steps, leanest=steps, between=held, enter=first.enter, run=None)


def _split_order(spec: DTensorSpec, groups: Groups) -> tuple[int, ...]:
    """The order in memory of the split dims."""
    first = [sum(map(len, groups[:dim])) for dim in range(len(groups))]
    order = memory_order(spec.stride)
    return tuple([first[dim] + part for dim in order for part in range(len(groups[dim]))])


def _reshaped(shapes: Sequence[tuple[int, ...]]) -> Change:
    return lambda local: tuple(
        [part.reshape(shape) for part, shape in zip(local, shapes, strict=True)]
    )


# --- dims of stride 0 ----------------------------------------------------------------------------


def _repeated(src: DTensorSpec, dst: DTensorSpec) -> Move:
    """The move of a tensor with dims of stride 0: of their first index where they are not sharded,
    and the results repeat as the tensor does."""
    meta, dims = dst.meta, src.meta.repeated
    first = not any(spec.dim_axes[dim] for spec in (src, dst) for dim in dims)
    if first and dims == meta.repeated:
        shape = tuple(1 if dim in dims else size for dim, size in enumerate(meta.shape))
        have, want = (
            DTensorSpec(s.topology, s.placements, s.meta._replace(shape=shape), cuts=s.cuts)
            for s in (src, dst)
        )
        inner = _prepared(have, want)
    else:
        first, inner = False, _prepared(src, dst)
    shapes = [dst.local_shape(coord) for coord in dst.slots]

    def enter(local: Locals) -> Locals:
        local = tuple([once(part, src.meta) for part in local]) if first else local
        return local if inner.enter is None else inner.enter(local)

    def leave(made: Locals) -> Locals:
        made = made if inner.leave is None else inner.leave(made)
        pairs = zip(made, shapes, strict=True)
        return tuple([once(part, meta).expand(shape) for part, shape in pairs])

    return replace(inner, enter=enter, leave=leave, run=None)


# --- moves of one step ---------------------------------------------------------------------------


def _quick(move: Move) -> Callable[[Locals, bool], Locals] | None:
    """The whole move as one function, if it has one step."""
    if len(move.cheapest) != 1:
        return None
    (step,) = move.cheapest
    if step.kind == "slice":
        return lambda local, fresh: finished(sliced(step, local), move.order, fresh)
    if step.is_local or step.src.topology is not step.dst.topology:
        return None

    steps, dtypes = (step,), (move.dtype,)

    def run(local: Locals, fresh: bool) -> Locals:
        landed = record_moves(steps, dtypes)
        if not local:
            return ()  # this rank is not on the mesh
        job = Job(step, local, local[0].dtype, local[0].device)
        made = start([job])()
        landed(made)
        return tuple(made[0])

    return run


def sliced(step: Step, local: Sequence[torch.Tensor]) -> Locals:
    """The part of each local tensor that stays, as a view."""
    parts = []
    for slot, box, shape in step.slices:
        value = local[slot]
        parts.append(value.new_empty(shape) if box is None else narrow(value, box))
    return tuple(parts)


def finished(views: Locals, order: tuple[int, ...], fresh: bool) -> Locals:
    """Views of the source, dense in the order of the global tensor. With `fresh` they share no
    memory with it."""
    made = tuple([ordered(part, order) for part in views])
    if not fresh:
        return made
    pairs = zip(made, views, strict=True)
    return tuple([new.clone() if new is old else new for new, old in pairs])


def ordered(part: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """`part` dense in memory, with its dims in the order that the global tensor has them."""
    if order == tuple(range(len(order))):
        return part.contiguous()
    seen = part.permute(*order)
    if seen.is_contiguous():
        return part
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return seen.contiguous().permute(*inverse)
