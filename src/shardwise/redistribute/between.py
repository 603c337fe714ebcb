"""From one mesh to another: pieces go straight from a rank that holds them to one that needs them.

The meshes may overlap, be apart, or one a part of the other. Pending reductions are done on the
source's mesh, scattered so that nothing is sent twice; those of the target are made on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec
from .layout import Layout
from .step import Step

__all__ = ["between_meshes"]

Plan = Callable[[DTensorSpec, DTensorSpec], tuple[Step, ...]]


def between_meshes(src: DTensorSpec, dst: DTensorSpec, plan: Plan) -> Iterator[Step]:
    """The steps on the source's mesh, the transfer, and the steps on the target's mesh."""
    settled = _settled(src)
    whole = [Replicate() if place.is_partial() else place for place in dst.placements]
    arrival = DTensorSpec(dst.topology, whole, dst.meta, cuts=dst.cuts)
    if settled is not src:
        yield from plan(src, settled)
    have, want = Layout.of(settled), Layout.of(arrival)
    yield Step("transfer", have, want)
    if arrival is not dst:
        yield from plan(arrival, dst)


def _settled(src: DTensorSpec) -> DTensorSpec:
    """The layout with nothing pending that a reduce-scatter gives: each axis cuts the longest dim
    that is left."""
    if not src.sums:
        return src
    if not src.ndim:
        places: list[Placement] = [Replicate() if p.is_partial() else p for p in src.placements]
        return src.with_placements(places)
    places, sizes = list(src.placements), list(src.meta.shape)
    for axis, place in enumerate(src.placements):
        if isinstance(place, Shard):
            sizes[place.dim] //= src.topology.shape[axis]
    for axis in src.sums:
        widest = max(range(src.ndim), key=sizes.__getitem__)
        places[axis] = Shard(widest)
        sizes[widest] //= src.topology.shape[axis]
    kept = None
    if src.cuts is not None:
        changed = {p.dim for p, old in zip(places, src.placements, strict=True) if p is not old}  # type: ignore[attr-defined]
        kept = [None if dim in changed else own for dim, own in enumerate(src.cuts)]
    return src.with_placements(places, kept)
