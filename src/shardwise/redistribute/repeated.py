"""Tensors that are best seen otherwise while they move.

Of dims along which a tensor repeats itself, as `expand` makes them, one place moves. Dims that are
sharded block by block are taken apart: then every rank holds a box.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import torch

from ..comm import buffer_size, give_back
from ..layout.geometry import box_shape, memory_order, stride_like
from ..layout.spec import DTensorSpec, Groups, fine_meta
from ..layout.split_dims import common_refinement
from .blocks import Part, need, stretches
from .execute import Run, run_all
from .jointly import jointly
from .legs import legs, once
from .plan import plan
from .step import Step

__all__ = ["redistribute_locals", "run_between", "steps_between"]

Locals = tuple[torch.Tensor, ...]


def redistribute_locals(
    src: DTensorSpec, dst: DTensorSpec, local: Locals, *, fresh: bool = False
) -> Locals:
    """The local tensors of a tensor laid out as `src`, now as `dst`.

    With `fresh` none of them shares memory with another tensor.
    """
    return run_all([run_between(src, dst, local, fresh=fresh)])[0]()


def run_between(
    src: DTensorSpec,
    dst: DTensorSpec,
    local: Locals,
    *,
    fresh: bool = False,
    async_op: bool = False,
) -> Run:
    """What `redistribute_locals` runs, to be run with others."""
    if (pair := once(src, dst)) is not None:
        return _run_once(src, dst, pair, local, fresh, async_op)
    if src.fine is not None or dst.fine is not None:
        return _run_apart(src, dst, local, fresh, async_op)
    return Run(plan(src, dst), local, dst.stride, fresh, dst.dtype, async_op=async_op)


def steps_between(src: DTensorSpec, dst: DTensorSpec) -> tuple[Step, ...]:
    """The steps that `redistribute_locals` takes, if it moves all at once."""
    return tuple([step for steps in legs(src, dst) for step in steps])


def _run_once(
    src: DTensorSpec,
    dst: DTensorSpec,
    pair: tuple[DTensorSpec, DTensorSpec],
    local: Locals,
    fresh: bool,
    async_op: bool,
) -> Run:
    """What `redistribute_locals` runs for a tensor that repeats itself."""
    have, want = pair
    parts = []
    for coord in have.slots:
        part = local[src.slot(coord)]
        for dim in src.meta.repeated:
            part = part.narrow(dim, 0, 1)
        parts.append(part)
    run = run_between(have, want, tuple(parts), fresh=fresh, async_op=async_op)

    def widened(made: Locals) -> Locals:
        made = made if run.then is None else run.then(made)
        taken: set[int] = set()
        found = []
        for at in dst.slots:
            slot = want.slot(at)
            part = made[slot].clone() if fresh and slot in taken else made[slot]
            taken.add(slot)
            found.append(part.expand(dst.local_shape(at)))
        return tuple(found)

    return replace(run, then=widened)


def _run_apart(
    src: DTensorSpec, dst: DTensorSpec, local: Locals, fresh: bool, async_op: bool
) -> Run:
    """What `redistribute_locals` runs for dims that are sharded block by block."""
    way = common_refinement(src, dst)
    if isinstance(way, DTensorSpec) and (found := jointly(src, dst)) is not None:
        return _run_jointly(dst, *found, local, fresh, async_op)
    if isinstance(way, DTensorSpec):  # nearly there, then the elements that are over
        parts = stretches(src, dst, buffer_size())
        if (first := next(parts, None)) is not None:
            made = _by_stretches(src, dst, local, chain((first,), parts))
            return Run((), made, dst.stride, dtype=dst.dtype)

        between: list[torch.Tensor] = []

        def start() -> Run:
            first = redistribute_locals(src, way, local)
            run = run_between(way, dst, first, fresh=fresh, async_op=async_op).started()
            between.extend(run.local)
            _forget(src, first, (*local, *between))  # if it went on, or was copied to be seen so
            return run

        def done(made: Locals) -> Locals:
            _forget(src, between, (*local, *made))
            return made

        return Run((), (), dst.stride, dtype=dst.dtype, then=done, start=start, need=need(src, dst))
    have, want = way
    seen = [part.reshape(have.local_shape(at)) for at, part in zip(have.slots, local, strict=True)]
    run = run_between(have, want, tuple(seen), fresh=fresh, async_op=async_op)

    def together(made: Locals) -> Locals:
        made = made if run.then is None else run.then(made)
        pairs = zip(made, dst.slots, strict=True)
        return tuple([part.reshape(dst.local_shape(at)) for part, at in pairs])

    return replace(run, then=together)


def _run_jointly(
    dst: DTensorSpec, step: Step, groups: Groups, local: Locals, fresh: bool, async_op: bool
) -> Run:
    """What `redistribute_locals` runs from box to box of dims taken apart."""
    have, want = step.src, step.dst
    seen = [
        part.reshape(box_shape(have.box(at))) for at, part in zip(have.slots, local, strict=True)
    ]

    def together(made: Locals) -> Locals:
        found = [made[want.slot(at)] for at in dst.slots]
        pairs = zip(found, dst.slots, strict=True)
        return tuple([part.reshape(dst.local_shape(at)) for part, at in pairs])

    stride = fine_meta(dst.meta, groups).stride
    return Run((step,), tuple(seen), stride, fresh, dst.dtype, then=together, async_op=async_op)


def _by_stretches(
    src: DTensorSpec, dst: DTensorSpec, local: Locals, parts: Iterable[Part]
) -> Locals:
    """The local tensors, made one part of the tensor after another."""
    order = memory_order(dst.stride)
    device = local[0].device if local else torch.device(dst.topology.device_type)
    made = []
    for coord in dst.slots:
        shape = dst.local_shape(coord)
        stride = stride_like(shape, order)
        made.append(torch.empty_strided(shape, stride, dtype=dst.dtype, device=device))
    for part in parts:
        _move_part(src, dst, local, tuple(made), part)
    return tuple(made)


def _move_part(src: DTensorSpec, dst: DTensorSpec, local: Locals, made: Locals, part: Part) -> None:
    """Put a part of what is held as `src` where it is held as `dst`."""
    for stretch in part:
        local = tuple([stretch.of_local(src, *own) for own in zip(src.slots, local, strict=True)])
        made = tuple([stretch.of_local(dst, *own) for own in zip(dst.slots, made, strict=True)])
        src, dst = stretch.of_spec(src), stretch.of_spec(dst)
    came = redistribute_locals(src, dst, local)
    for place, each in zip(made, came, strict=True):
        place.copy_(each)
    _forget(src, came, local)


def _forget(spec: DTensorSpec, parts: Iterable[torch.Tensor], kept: Locals) -> None:
    """Give back what was made on the way, unless it is a view of what is kept."""
    if not spec.topology.virtual:
        give_back(parts, kept)
