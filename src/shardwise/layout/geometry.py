"""Boxes, cuts and intersections: pure arithmetic on integers.

A *box* is the region of the global tensor that a rank holds: one `(start, stop)` per dim. *Cuts*
are the sizes of the pieces of one dim, outer axis first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod

Interval = tuple[int, int]
Box = tuple[Interval, ...]
Cuts = tuple[int, ...]


def chunk_cuts(size: int, counts: tuple[int, ...]) -> Cuts:
    """The sizes of the pieces when `size` is cut as `torch.chunk` would, axis after axis.

    >>> chunk_cuts(7, (2,))
    (4, 3)
    >>> chunk_cuts(7, (2, 2))
    (2, 2, 2, 1)
    >>> chunk_cuts(1, (4,))
    (1, 0, 0, 0)
    """
    pieces = [size]
    for count in counts:
        pieces = [part for piece in pieces for part in _chunk(piece, count)]
    return tuple(pieces)


def _chunk(size: int, count: int) -> list[int]:
    step, rest = divmod(size, count)
    if not rest:
        return [step] * count
    step += 1
    return [max(0, min(step, size - step * i)) for i in range(count)]


def intervals(cuts: Iterable[int]) -> tuple[Interval, ...]:
    """Where each piece starts and stops.

    >>> intervals((2, 0, 3))
    ((0, 2), (2, 2), (2, 5))
    """
    ends = [0, *accumulate(cuts)]
    return tuple(pairwise(ends))


def intersect(a: Box, b: Box) -> Box:
    """The part two boxes share; an empty interval where they share nothing."""
    shared = []
    for (a0, a1), (b0, b1) in zip(a, b, strict=True):
        start = max(a0, b0)
        shared.append((start, max(start, min(a1, b1))))
    return tuple(shared)


def contains(outer: Box, inner: Box) -> bool:
    """True if every element of `inner` is in `outer`; an empty box is in every box."""
    if box_numel(inner) == 0:
        return True
    return all(o0 <= i0 and i1 <= o1 for (o0, o1), (i0, i1) in zip(outer, inner, strict=True))


def relative(inner: Box, outer: Box) -> Box:
    """`inner` in the coordinates of a tensor that holds `outer`; empty stays empty and in range."""
    moved = []
    for (i0, i1), (o0, o1) in zip(inner, outer, strict=True):
        start = min(max(i0 - o0, 0), o1 - o0)
        moved.append((start, start + (i1 - i0)))
    return tuple(moved)


def box_shape(box: Box) -> tuple[int, ...]:
    """The sizes of a box."""
    return tuple(stop - start for start, stop in box)


def box_numel(box: Box) -> int:
    """The number of elements in a box."""
    return prod(stop - start for start, stop in box)


@lru_cache(maxsize=4096)
def all_coords(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every coordinate of a grid, last axis fastest."""
    return tuple(product(*map(range, shape)))


def flat_index(coord: Sequence[int], shape: Sequence[int], axes: Iterable[int]) -> int:
    """The row-major index of `coord` among the coordinates of `axes` alone."""
    index = 0
    for axis in axes:
        index = index * shape[axis] + coord[axis]
    return index


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """The dims in their order in memory, outermost first.

    Dims that repeat themselves, with a stride of 0, stay where they are among the others, as they
    do in the results of PyTorch's kernels.

    >>> memory_order((0, 1, 6))
    (0, 2, 1)
    """
    order = list(range(len(stride)))[::-1]  # innermost first; a dim sinks below larger strides
    for dim in range(1, len(order)):
        here = dim
        for there in reversed(range(dim)):
            inner, outer = stride[order[there]], stride[order[here]]
            if inner and outer and inner < outer:
                break
            if inner and outer and inner > outer:
                order[here], order[there] = order[there], order[here]
                here = there
    return tuple(reversed(order))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as PyTorch computes them (a size of 0 counts as 1)."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size or 1
    return tuple(stride[::-1])


def stride_like(shape: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dims lie in memory in `order`, outermost first."""
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(list(order)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if the elements fill their memory without gaps or overlap, in some order of dims."""
    dims = sorted((st, size) for size, st in zip(shape, stride, strict=True) if size != 1)
    step = 1
    for st, size in dims:
        if st != step:
            return prod(shape) == 0
        step *= size
    return True
