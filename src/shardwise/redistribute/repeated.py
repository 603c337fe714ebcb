"""Tensors that are best seen otherwise while they move.

Of dims along which a tensor repeats itself, as `expand` makes them, one place moves. Dims that are
sharded block by block are taken apart: then every rank holds a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from ..engine import buffer_size
from ..finer import seen_alike
from ..geometry import Cuts, memory_order, stride_like
from ..placement import Replicate, Shard
from ..spec import DTensorSpec
from .blocks import Stretch, stretches
from .execute import Run, run_all
from .plan import plan
from .step import Step

__all__ = ["parts_between", "relaid", "run_between", "steps_between"]

Locals = tuple[torch.Tensor, ...]


def relaid(src: DTensorSpec, dst: DTensorSpec, local: Locals, *, fresh: bool = False) -> Locals:
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
    later: bool = False,
) -> Run:
    """What `relaid` runs, to be run with others."""
    if src.fine is not None or dst.fine is not None:
        return _run_apart(src, dst, local, fresh, later)
    if _once(src, dst) is None:
        return Run(plan(src, dst), local, dst.stride, fresh, dst.dtype, later=later)
    have, want = _once_of(src), _once_of(dst)
    parts = []
    for coord in have.slots:
        part = local[src.slot(coord)]
        for dim in src.meta.repeated:
            part = part.narrow(dim, 0, 1)
        parts.append(part)

    def widened(made: Locals) -> Locals:
        parts = [made[want.slot(at)] for at in dst.slots]
        parts = [part.clone() for part in parts] if fresh else parts
        pairs = zip(parts, dst.slots, strict=True)
        return tuple([part.expand(dst.local_shape(at)) for part, at in pairs])

    return Run(plan(have, want), tuple(parts), want.stride, False, dst.dtype, widened, later)


def parts_between(src: DTensorSpec, dst: DTensorSpec) -> tuple[Stretch, ...]:
    """The parts that `relaid` moves one after another; none if it moves all at once."""
    if src.fine is None and dst.fine is None:
        return ()
    return stretches(src, dst, buffer_size())


def steps_between(src: DTensorSpec, dst: DTensorSpec) -> tuple[Step, ...]:
    """The steps that `relaid` takes, if it moves all at once."""
    if src.fine is not None or dst.fine is not None:
        way = seen_alike(src, dst)
        if isinstance(way, DTensorSpec):
            return (*steps_between(src, way), *steps_between(way, dst))
        return steps_between(*way)
    return _once(src, dst) or plan(src, dst)


def _run_apart(src: DTensorSpec, dst: DTensorSpec, local: Locals, fresh: bool, later: bool) -> Run:
    """What `relaid` runs for dims that are sharded block by block."""
    way = seen_alike(src, dst)
    if isinstance(way, DTensorSpec):  # nearly there, then the elements that are over
        if found := stretches(src, dst, buffer_size()):
            return Run((), _by_stretches(src, dst, local, found), dst.stride, dtype=dst.dtype)
        return run_between(way, dst, relaid(src, way, local), fresh=fresh, later=later)
    have, want = way
    parts = [part.reshape(have.local_shape(at)) for at, part in zip(have.slots, local, strict=True)]
    run = run_between(have, want, tuple(parts), fresh=fresh, later=later)
    shares = fresh and run.then is None and all(step.kind == "slice" for step in run.steps)

    def together(made: Locals) -> Locals:
        made = made if run.then is None else run.then(made)
        pairs = zip(made, dst.slots, strict=True)
        whole = tuple([part.reshape(dst.local_shape(at)) for part, at in pairs])
        return tuple([part.clone() for part in whole]) if shares else whole

    return replace(run, then=together)


def _by_stretches(
    src: DTensorSpec, dst: DTensorSpec, local: Locals, parts: Sequence[Stretch]
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
        given = [part.of_local(src, at, own) for at, own in zip(src.slots, local, strict=True)]
        came = relaid(part.of_spec(src), part.of_spec(dst), tuple(given))
        for coord, whole, piece in zip(dst.slots, made, came, strict=True):
            part.of_local(dst, coord, whole).copy_(piece)
    return tuple(made)


@lru_cache(maxsize=16384)
def _once(src: DTensorSpec, dst: DTensorSpec) -> tuple[Step, ...] | None:
    """The steps of one place of each repeated dim; None if there is no such dim, or if some rank
    holds no place of it."""
    dims = src.meta.repeated
    if not dims or 0 in src.meta.shape or any(0 in src.dim_cuts[dim] for dim in dims):
        return None
    return plan(_once_of(src), _once_of(dst))


@lru_cache(maxsize=16384)
def _once_of(spec: DTensorSpec) -> DTensorSpec:
    """The layout of one place of each repeated dim: it is with everybody who holds some place."""
    dims = spec.meta.repeated
    places = [
        Replicate() if isinstance(place, Shard) and place.dim in dims else place
        for place in spec.placements
    ]
    cuts: list[Cuts | None] = [
        None if dim in dims else each for dim, each in enumerate(spec.cuts or (None,) * spec.ndim)
    ]
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(spec.meta.shape))
    return DTensorSpec(spec.topology, places, spec.meta._replace(shape=shape), cuts=cuts)
