"""Layouts of blocks that are boxes of a finer shape, though no placement on it says so.

Of a dim of 2 blocks on 8 ranks, cut in consecutive pieces, a rank holds a quarter of one block: of
the dim taken apart it is a box, whose place in both parts goes by the same axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from ..layout.geometry import Interval, intervals
from ..layout.spec import DTensorSpec, Groups
from ..layout.split_dims import common, trivial
from .layout import DimMap, Layout
from .step import Step

__all__ = ["jointly"]


@lru_cache(maxsize=16384)
def jointly(src: DTensorSpec, dst: DTensorSpec) -> tuple[Step, Groups] | None:
    """The one step from box to box, with nothing pending, and how dims are taken apart for it."""
    if src.sums or dst.sums:
        return None
    groups = common(*[spec.groups or trivial(spec.meta.shape) for spec in (src, dst)])
    if groups is None:
        return None
    have, want = _boxes(src, groups), _boxes(dst, groups)
    if have is None or want is None:
        return None
    axes = have.axes if src.topology is dst.topology else ()
    return Step("transfer", have, want, axes), groups


def _boxes(spec: DTensorSpec, groups: Groups) -> Layout | None:
    """Who holds what of the tensor with its dims taken apart; None if that are no boxes."""
    base, dims = spec.fine or spec, []
    cuts, axes = iter(base.dim_cuts), iter(base.dim_axes)
    for own, finer in zip(spec.groups or trivial(spec.meta.shape), groups, strict=True):
        left = list(finer)
        for size in own:
            parts = [left.pop(0)]
            while prod(parts) != size:
                parts.append(left.pop(0))
            found = _maps(next(axes), intervals(next(cuts)), parts)
            if found is None:
                return None
            dims += found
    return Layout(spec.topology, tuple(dims), ())


def _maps(
    axes: tuple[int, ...], table: Sequence[Interval], parts: Sequence[int]
) -> list[DimMap] | None:
    """A dim that is the product of `parts`, of which shards hold these intervals."""
    boxes = []
    for start, stop in table:
        box = _box(start, stop, parts)
        if box is None:
            return None
        boxes.append(box)
    found = []
    for size, held in zip(parts, zip(*boxes, strict=True), strict=True):
        alike = set(held) == {(0, size)}
        found.append(DimMap((), ((0, size),)) if alike else DimMap(axes, tuple(held)))
    return found


def _box(start: int, stop: int, parts: Sequence[int]) -> list[Interval] | None:
    """An interval of a dim as a box of its parts; None if it is more than one.

    >>> _box(8, 12, (2, 8)), _box(8, 16, (4, 4)), _box(2, 6, (4, 4))
    ([(1, 2), (0, 4)], [(2, 4), (0, 4)], None)
    """
    box: list[Interval] = []
    inner = prod(parts)
    for size in parts:
        if start >= stop:
            box.append((0, 0))
            continue
        inner //= size
        if start % inner == 0 and stop % inner == 0:
            box.append((start // inner, stop // inner))
            return [*box, *[(0, rest) for rest in parts[len(box) :]]]
        place = start // inner
        if (stop - 1) // inner != place:
            return None
        box.append((place, place + 1))
        start, stop = start - place * inner, stop - place * inner
    return box
