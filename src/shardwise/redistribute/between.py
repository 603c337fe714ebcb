"""The steps from one mesh to another: each piece goes from a rank that holds it to one that needs
it.

The meshes may overlap, be apart, or one a part of the other. The same steps serve boxes on one mesh
of which one axis shards several dims.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..comm.step import Step
from ..layout.geometry import all_coords, contains
from ..layout.layout import Layout
from .plan import reduce


def between(now: Layout, goal: Layout) -> Iterator[Step]:
    """Reduce on the source's mesh, transfer, and make axes Partial on the target's mesh."""
    for step in reduce(now, _scattered(now), {axis for axis, _ in now.partial}):
        yield step
        now = step.dst
    arrival, where = Layout(goal.topology, goal.dims, ()), now.topology
    if where is not goal.topology:
        yield Step("transfer", now, arrival)
    elif all(contains(now.box(coord), goal.box(coord)) for coord in all_coords(where.shape)):
        yield Step("slice", now, arrival)
    else:
        yield Step("transfer", now, arrival, now.axes)
    if arrival != goal:
        yield Step("make_partial", arrival, goal)


def _scattered(now: Layout) -> Layout:
    """The layout that a reduce-scatter gives: each pending axis shards the longest dim that is
    left. A tensor of no dims stays whole."""
    dims, shape = list(now.dims), now.topology.shape
    for axis, _ in now.partial:
        if dims:
            sizes = [max([b - a for a, b in dim.table]) for dim in dims]
            longest = sizes.index(max(sizes))
            dims[longest] = dims[longest].split([axis], shape)
    return Layout(now.topology, tuple(dims), ())
