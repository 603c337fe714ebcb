"""Layouts of a tensor whose dims are split, and merged again.

A rank that holds its piece of every block of a dim holds a box of the tensor with that dim split:
`view(64)` of a (4, 16) tensor sharded on dim 1 is sharded inside each of 4 blocks. All that works
for boxes works for blocks on the split shape. This module finds that shape and translates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from .geometry import Cuts, Interval, intervals
from .layout import DimMap, Layout
from .mesh import Coord
from .placement import Placement, Shard
from .spec import DTensorSpec, Groups, TensorMeta, fine_meta


def common(*groups: Groups) -> Groups | None:
    """The coarsest common refinement of several ways to split dims; None if there is none, as for
    blocks of 4 and blocks of 6.

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
        ends = sorted({end for group in each for end in accumulate(group, mul, initial=1)})
        if any(b % a for a, b in pairwise(ends)):
            return None
        found.append(tuple(b // a for a, b in pairwise(ends)))
    return tuple(found)


def finer_parts(groups: Groups, finer: Groups) -> list[list[int]]:
    """For each size of `groups` the sizes of `finer` that it is the product of.

    >>> finer_parts(((4, 16),), ((4, 4, 4),))
    [[4], [4, 4]]
    """
    found = []
    for sizes, parts in zip(groups, finer, strict=True):
        left = list(parts)
        for size in sizes:
            own = [left.pop(0)]
            while prod(own) != size:
                own.append(left.pop(0))
            found.append(own)
    return found


def split_layout(spec: DTensorSpec, groups: Groups) -> Layout | None:
    """The layout of a tensor with its dims split into `groups`; None if some shard is not a box of
    the split dims."""
    dims: list[DimMap] = []
    for have, own in zip(spec.layout.dims, finer_parts(spec.blocks, groups), strict=True):
        found = _split_dim(have, own)
        if found is None:
            return None
        dims += found
    return spec.layout.with_dims(dims)


def _split_dim(have: DimMap, parts: Sequence[int]) -> list[DimMap] | None:
    """The maps of a dim that is split into `parts`; None if some interval is not a box of them."""
    boxes = []
    for start, stop in have.table:
        box = _box(start, stop, parts)
        if box is None:
            return None
        boxes.append(box)
    first, *rest = zip(*boxes, strict=True)
    found = [DimMap(have.axes, first)]
    for size, held in zip(parts[1:], rest, strict=True):
        whole = set(held) == {(0, size)}
        found.append(DimMap((), ((0, size),)) if whole else DimMap(have.axes, held))
    return found


def _box(start: int, stop: int, parts: Sequence[int]) -> list[Interval] | None:
    """An interval of a dim as a box of its parts; None if it is more than one box.

    >>> _box(8, 12, (2, 8)), _box(8, 16, (4, 4)), _box(2, 6, (4, 4))
    ([(1, 2), (0, 4)], [(2, 4), (0, 4)], None)
    """
    if len(parts) == 1:
        return [(start, stop)]
    inner = prod(parts[1:])
    (first, before), (last, after) = divmod(start, inner), divmod(stop, inner)
    if start >= stop or before == after == 0:
        return [(first, max(first, last)), *[(0, size) for size in parts[1:]]]
    if (stop - 1) // inner != first:
        return None
    rest = _box(before, before + stop - start, parts[1:])
    return None if rest is None else [(first, first + 1), *rest]


def split_dims(spec: DTensorSpec, groups: Groups) -> DTensorSpec | None:
    """The layout of the tensor with its dims split into `groups`; None if no placements say it."""
    if common(spec.blocks, groups) != groups:
        return None
    base, parts = spec.fine, finer_parts(spec.blocks, groups)
    first = [0, *accumulate(map(len, parts))]
    cuts: list[Cuts | None] = [None] * first[-1]
    for dim, axes in enumerate(base.dim_axes):
        block = prod(parts[dim][1:])
        if axes and any(size % block for size in base.dim_cuts[dim]):
            return None
        if axes:
            cuts[first[dim]] = tuple(size // block for size in base.dim_cuts[dim])
    places = [Shard(first[p.dim]) if isinstance(p, Shard) else p for p in base.placements]
    return DTensorSpec(spec.topology, places, fine_meta(spec.meta, groups), cuts=cuts)


def merge_dims(fine: DTensorSpec, groups: Groups, meta: TensorMeta) -> DTensorSpec:
    """The layout of a tensor; `fine` is its layout with dims split into `groups`."""
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
    """The layout whose shards are consecutive pieces of the outermost part of each split dim. A
    tensor that `split_dims` refuses is moved there."""
    first = [0, *accumulate(map(len, groups))]
    places = [Shard(first[p.dim]) if isinstance(p, Shard) else p for p in spec.placements]
    return DTensorSpec(spec.topology, places, fine_meta(spec.meta, groups))


def rounded(spec: DTensorSpec, groups: Groups) -> DTensorSpec:
    """A layout near to `spec`, which has no blocks: it is cut only where the blocks of `groups`
    end."""
    cuts: list[Cuts | None] = []
    for dim, (size, group) in enumerate(zip(spec.meta.shape, groups, strict=True)):
        block = size // group[0] if size else 1
        ends = [(stop + block // 2) // block * block for _, stop in intervals(spec.dim_cuts[dim])]
        sizes = tuple(b - a for a, b in pairwise([0, *ends]))
        cuts.append(sizes if spec.dim_axes[dim] else None)
    return spec.with_placements(spec.placements, cuts)


def held_of(spec: DTensorSpec, coord: Coord) -> list[tuple[Interval, ...]]:
    """The intervals of each dim that a rank holds: one, or one in every block."""
    boxes = iter(spec.layout.box(coord))
    found = []
    for group in spec.blocks:
        held: tuple[Interval, ...] = ((0, 1),)
        for size in group:
            start, stop = next(boxes)
            blocks = [index for a, b in held for index in range(a, b)]
            held = tuple((index * size + start, index * size + stop) for index in blocks)
        found.append(held)
    return found
