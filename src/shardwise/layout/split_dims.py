"""Layouts of a tensor whose dims are taken apart, and put together again.

A rank that holds its piece of every block of a dim holds a box of the tensor with that dim taken
apart: `view(64)` of a (4, 16) tensor sharded on dim 1 is sharded inside each of 4 blocks. So what
goes for boxes goes for blocks, on a finer shape: this module finds the shape and translates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from .geometry import Cuts, Interval, intervals
from .mesh import Coord
from .placement import Placement, Shard
from .spec import DTensorSpec, Groups, TensorMeta, fine_meta


def trivial(shape: Sequence[int]) -> Groups:
    """Every dim by itself."""
    return tuple((size,) for size in shape)


def common(*groups: Groups) -> Groups | None:
    """The coarsest way to take dims apart that all of these ways are part of; None if there is
    none, as for blocks of 4 and blocks of 6.

    >>> common(((4, 16),), ((16, 4),))
    ((4, 4, 4),)
    >>> common(((4, 6),), ((6, 4),)) is None
    True
    """
    found = []
    for each in zip(*groups, strict=True):
        if len(set(each)) == 1:
            found.append(each[0])
            continue
        ends = sorted({end for group in each for end in _ends(group)})
        if any(b % a for a, b in pairwise(ends)):
            return None
        found.append(tuple(b // a for a, b in pairwise(ends)))
    return tuple(found)


def _ends(group: Sequence[int]) -> list[int]:
    """How many blocks there are after each size, from one block: the dim as a whole."""
    ends = [1]
    for size in group:
        ends.append(ends[-1] * size)
    return ends


def split_dims(spec: DTensorSpec, groups: Groups) -> DTensorSpec | None:
    """The layout of the tensor with its dims taken apart; None if that is none of boxes."""
    own = spec.groups or trivial(spec.meta.shape)
    if common(own, groups) != groups:
        return None
    base = spec.fine or spec
    first: list[int] = []  # the finer dim that each dim of `base` begins with, and its block
    blocks: list[int] = []
    at = 0
    for coarse_group, group in zip(own, groups, strict=True):
        left = list(group)
        for size in coarse_group:
            first.append(at)
            blocks.append(size // left[0] if left[0] else 1)
            taken = left.pop(0)
            at += 1
            while taken != size:
                taken *= left.pop(0)
                at += 1
    cuts: list[Cuts | None] = [None] * at
    for dim, axes in enumerate(base.dim_axes):
        if axes:
            if any(size % blocks[dim] for size in base.dim_cuts[dim]):
                return None
            cuts[first[dim]] = tuple(size // blocks[dim] for size in base.dim_cuts[dim])
    places = [Shard(first[p.dim]) if isinstance(p, Shard) else p for p in base.placements]
    return DTensorSpec(spec.topology, places, fine_meta(spec.meta, groups), cuts=cuts)


def merge_dims(fine: DTensorSpec, groups: Groups, meta: TensorMeta) -> DTensorSpec:
    """The layout of a tensor of which `fine` is the layout with dims taken apart as in `groups`."""
    splits: dict[int, Shard] = {}
    cuts: list[Cuts | None] = []
    at = 0
    for dim, group in enumerate(groups):
        before = 1
        starts = [i for i in range(len(group)) if i == 0 or fine.dim_axes[at + i]]
        for start, stop in pairwise([*starts, len(group)]):
            inner = prod(group[start + 1 : stop])
            axes = fine.dim_axes[at + start]
            splits[at + start] = Shard(dim, before)
            cuts.append(tuple(n * inner for n in fine.dim_cuts[at + start]) if axes else None)
            before *= group[start] * inner
        at += len(group)
    places: list[Placement] = [
        splits[p.dim] if isinstance(p, Shard) else p for p in fine.placements
    ]
    return DTensorSpec(fine.topology, places, meta, cuts=cuts)


def assumed(spec: DTensorSpec, groups: Groups) -> DTensorSpec:
    """Consecutive pieces of the outermost part of each dim taken apart: what a layout that is no
    layout of boxes there can be turned into."""
    first, at = [], 0
    for group in groups:
        first.append(at)
        at += len(group)
    places = [Shard(first[p.dim]) if isinstance(p, Shard) else p for p in spec.placements]
    return DTensorSpec(spec.topology, places, fine_meta(spec.meta, groups))


def rounded(spec: DTensorSpec, groups: Groups) -> DTensorSpec:
    """Nearly the layout `spec`, of consecutive pieces, cut only where blocks end."""
    cuts: list[Cuts | None] = []
    for dim, (size, group) in enumerate(zip(spec.meta.shape, groups, strict=True)):
        block = size // group[0] if size else 1
        ends = [(stop + block // 2) // block * block for _, stop in intervals(spec.dim_cuts[dim])]
        sizes = tuple(b - a for a, b in pairwise([0, *ends]))
        cuts.append(sizes if spec.dim_axes[dim] else None)
    return spec.with_placements(spec.placements, cuts)


def held_of(spec: DTensorSpec, coord: Coord) -> list[tuple[Interval, ...]]:
    """What a rank holds of each dim: one interval, or one in every block."""
    boxes = iter((spec.fine or spec).box(coord))
    found = []
    for group in spec.groups or trivial(spec.meta.shape):
        held: tuple[Interval, ...] = ((0, 1),)
        for size in group:
            start, stop = next(boxes)
            blocks = [index for a, b in held for index in range(a, b)]
            held = tuple((index * size + start, index * size + stop) for index in blocks)
        found.append(held)
    return found
