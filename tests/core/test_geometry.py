"""Boxes, cuts and strides."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import geometry
from shardwise.layout.geometry import Box

SIZES = st.integers(0, 40)


def box_of(draw_sizes: list[tuple[int, int]]) -> Box:
    return tuple((a, a + n) for a, n in draw_sizes)


def boxes(ndim: int) -> st.SearchStrategy[Box]:
    side = st.tuples(st.integers(0, 6), st.integers(0, 5))
    return st.lists(side, min_size=ndim, max_size=ndim).map(box_of)


PAIRS = st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n)))


def cells(box: Box) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = {()}
    for start, stop in box:
        found = {(*cell, i) for cell in found for i in range(start, stop)}
    return found


@given(SIZES, st.integers(1, 9))
def test_cuts_of_one_axis_are_those_of_torch_chunk(size: int, count: int) -> None:
    want = [len(part) for part in torch.arange(size).chunk(count)]
    want += [0] * (count - len(want))  # torch.chunk may give fewer pieces: the rest are empty
    assert list(geometry.chunk_cuts(size, (count,))) == want


@given(SIZES, st.lists(st.integers(1, 4), min_size=0, max_size=3))
def test_cuts_of_several_axes_cut_the_pieces_again(size: int, counts: list[int]) -> None:
    pieces = [torch.arange(size)]
    for count in counts:
        cut_again = []
        for piece in pieces:
            parts = list(piece.chunk(count))
            cut_again += parts + [piece[:0]] * (count - len(parts))
        pieces = cut_again
    assert list(geometry.chunk_cuts(size, tuple(counts))) == list(map(len, pieces))


@given(st.lists(st.integers(0, 5)))
def test_intervals_are_consecutive_and_as_long_as_the_cuts(cuts: list[int]) -> None:
    found = geometry.intervals(cuts)
    assert [stop - start for start, stop in found] == cuts
    assert [stop for _, stop in found[:-1]] == [start for start, _ in found[1:]]


@given(PAIRS)
def test_intersection_and_containment_are_those_of_the_cells(pair: tuple[Box, Box]) -> None:
    a, b = pair
    shared = geometry.intersect(a, b)
    assert cells(shared) == cells(a) & cells(b)
    assert geometry.box_numel(shared) == len(cells(a) & cells(b))
    assert geometry.contains(a, b) == (cells(b) <= cells(a))


@given(PAIRS)
def test_relative_boxes_index_the_local_tensor(pair: tuple[Box, Box]) -> None:
    outer, other = pair
    inner = geometry.intersect(outer, other)
    whole = torch.arange(12 ** outer.__len__()).view((12,) * len(outer))
    local = whole[tuple(slice(*side) for side in outer)]
    moved = geometry.relative(inner, outer)
    got = local[tuple(slice(*side) for side in moved)]
    assert got.shape == geometry.box_shape(inner)
    if geometry.box_numel(inner):
        assert torch.equal(got, whole[tuple(slice(*side) for side in inner)])
    assert all(0 <= a <= b <= size for (a, b), size in zip(moved, local.shape, strict=True))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_flat_index_counts_coordinates_in_order(shape: list[int]) -> None:
    coords = geometry.all_coords(tuple(shape))
    axes = range(len(shape))
    assert len(coords) == prod(shape)
    assert [geometry.flat_index(c, shape, axes) for c in coords] == list(range(len(coords)))


@given(st.lists(st.integers(0, 4), min_size=0, max_size=4), st.randoms())
def test_strides_are_those_of_pytorch(shape: list[int], random: object) -> None:
    assert geometry.contiguous_stride(shape) == torch.empty(shape).stride()
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    inverse = sorted(order, key=order.__getitem__)
    laid = torch.empty([shape[dim] for dim in order]).permute(inverse)
    assert geometry.stride_like(shape, order) == laid.stride()
    assert geometry.is_dense(shape, laid.stride())


def test_gaps_and_overlaps_are_not_dense() -> None:
    base = torch.empty(4, 6)
    assert not geometry.is_dense(base[:, ::2].shape, base[:, ::2].stride())
    assert not geometry.is_dense(base[:, :3].shape, base[:, :3].stride())
    grown = torch.empty(4, 1).expand(4, 3)
    assert not geometry.is_dense(grown.shape, grown.stride())
    assert geometry.is_dense(base.t().shape, base.t().stride())
