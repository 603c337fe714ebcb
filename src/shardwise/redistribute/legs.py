"""The plans that a move takes, one after another.

Mostly that is one. Of dims along which a tensor repeats itself, as `expand` makes them, one place
moves. Dims that are sharded block by block are taken apart, so that every rank holds a box; where
source and target are boxes of no common finer shape, the tensor goes through a third layout.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..layout.geometry import Cuts
from ..layout.placement import Replicate, Shard
from ..layout.spec import DTensorSpec
from ..layout.split_dims import common_refinement, trivial
from .jointly import jointly
from .plan import plan
from .portions import held_beside, sizes
from .step import Step

__all__ = ["Legs", "held_by_legs", "legs", "once"]

Legs = tuple[tuple[Step, ...], ...]


@lru_cache(maxsize=16384)
def legs(src: DTensorSpec, dst: DTensorSpec) -> Legs:
    """The steps from one layout to another, plan by plan."""
    if (pair := once(src, dst)) is not None:
        return legs(*pair)
    if src.fine is None and dst.fine is None:
        return (plan(src, dst),)
    way = common_refinement(src, dst)
    if isinstance(way, DTensorSpec):
        if (found := jointly(src, dst)) is not None:
            return ((found[0],),)
        return *legs(src, way), *legs(way, dst)
    return legs(*way)


def held_by_legs(plans: Legs, dtype: torch.dtype, room: int | None) -> list[dict[int, int]]:
    """What each rank holds at each step beside the source, as `held_beside` for one plan: what a
    plan starts from, if that is not the source, stays as well."""
    found: list[dict[int, int]] = []
    carried: dict[int, int] = {}
    for steps in plans:
        for each in held_beside(steps, dtype, room):
            found.append({rank: n + carried.get(rank, 0) for rank, n in each.items()})
        if steps:
            carried = sizes(steps[-1].dst, dtype)
    return found


@lru_cache(maxsize=16384)
def once(src: DTensorSpec, dst: DTensorSpec) -> tuple[DTensorSpec, DTensorSpec] | None:
    """The layouts of one place of each repeated dim; None if there is no such dim, or if some rank
    holds no place of it."""
    dims = src.meta.repeated
    if (
        not dims
        or 0 in src.meta.shape
        or any(0 in cuts for dim in dims for cuts in _cuts(src, dim))
    ):
        return None
    return _once_of(src), _once_of(dst)


def _cuts(spec: DTensorSpec, dim: int) -> tuple[Cuts, ...]:
    """How the parts of a dim are cut."""
    groups = spec.groups or trivial(spec.meta.shape)
    first = sum([len(group) for group in groups[:dim]])
    return (spec.fine or spec).dim_cuts[first : first + len(groups[dim])]


def _once_of(spec: DTensorSpec) -> DTensorSpec:
    """The layout of one place of each repeated dim: it is with everybody who holds some place."""
    dims = spec.meta.repeated
    places = [
        Replicate() if isinstance(place, Shard) and place.dim in dims else place
        for place in spec.placements
    ]
    groups = spec.groups or trivial(spec.meta.shape)
    given = iter(spec.cuts or [None] * sum(map(len, groups)))
    cuts: list[Cuts | None] = []
    for dim, group in enumerate(groups):
        own = [next(given) for _ in group]
        cuts += [None] if dim in dims else own
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(spec.meta.shape))
    return DTensorSpec(spec.topology, places, spec.meta._replace(shape=shape), cuts=cuts)
