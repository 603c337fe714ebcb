"""Any two layouts: random meshes, sizes, cuts, pending kinds, dtypes, orders of dims and links.

By default some hundred cases. `make redistribute` tries 20,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.layout.cost import Link
from shardwise.layout.geometry import stride_like
from shardwise.layout.mesh import VirtualMesh
from shardwise.layout.placement import Partial, Placement, Replicate, Shard
from shardwise.layout.spec import DTensorSpec
from shardwise.redistribute.execute import Run, redistribute_locals, run_all
from shardwise.redistribute.prepare import prepared

from ..layouts import assert_holds, by_coord, equal, scatter, spec_of, stored, whole_numbers

KINDS = [Replicate(), *map(Partial, ("sum", "avg", "max", "min", "product"))]
LINKS = [Link(1e-5, 2e9), Link(1e-6, 1e12), Link(1e-4, 1e6), Link(0.0, 1e9)]


@dataclass(frozen=True)
class Whole:
    """A tensor that two layouts are of."""

    size: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]


@st.composite
def wholes(draw: Any) -> Whole:
    lengths = st.one_of(st.integers(0, 7), st.sampled_from([8, 10, 12]))
    size = tuple(draw(st.lists(lengths, min_size=0, max_size=3)))
    order = draw(st.permutations(range(len(size))))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.int32]))
    return Whole(size, dtype, stride_like(size, order))


@st.composite
def meshes(draw: Any, most: int = 4) -> VirtualMesh:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=most)))
    shape = shape if prod(shape) <= 24 else shape[:2]
    first = draw(st.integers(0, 3))
    ranks = torch.arange(first, first + prod(shape)).view(shape)
    links = [draw(st.sampled_from(LINKS)) for _ in shape] if draw(st.booleans()) else None
    return VirtualMesh("cpu", ranks, links=links)


@st.composite
def pieces(draw: Any, size: int, count: int) -> tuple[int, ...]:
    marks = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
    return tuple(b - a for a, b in zip([0, *marks], [*marks, size], strict=True))


@st.composite
def layouts(draw: Any, mesh: VirtualMesh, whole: Whole) -> DTensorSpec:
    kinds: list[Placement] = [*KINDS, *[Shard(dim) for dim in range(len(whole.size))] * 3]
    for dim, length in enumerate(whole.size):
        chain = draw(st.sampled_from([(2, 4), (3, 6), (2, 6), (5, 10)]))
        kinds += [Shard(dim, n) for n in chain if length > n and not length % n]
    if whole.dtype is torch.int32:
        kinds = [kind for kind in kinds if not kind.is_partial("avg")]
    placements = [draw(st.sampled_from(kinds)) for _ in mesh.shape]
    cuts: list[tuple[int, ...] | None] = []
    shards = [p if isinstance(p, Shard) else None for p in placements]
    for dim, length in enumerate(whole.size):
        splits = sorted({1} | {p.split for p in shards if p is not None and p.dim == dim})
        for a, b in pairwise([*splits, length]):
            kind = Shard(dim, a)
            counts = [n for n, p in zip(mesh.shape, shards, strict=True) if p is kind]
            ragged = counts and draw(st.booleans())
            cuts.append(draw(pieces(b // a, prod(counts))) if ragged else None)
    return spec_of(mesh, placements, whole.size, whole.dtype, cuts, whole.stride)


@st.composite
def moves(draw: Any, two_meshes: bool) -> tuple[DTensorSpec, DTensorSpec, int]:
    whole = draw(wholes())
    here = draw(meshes())
    there = draw(meshes(2)) if two_meshes else here
    return draw(layouts(here, whole)), draw(layouts(there, whole)), draw(st.integers(0, 3))


def value_of(spec: DTensorSpec, seed: int) -> torch.Tensor:
    full = whole_numbers(spec.shape, seed, spec.dtype)
    return torch.empty_strided(full.shape, spec.stride, dtype=spec.dtype).copy_(full)


def held(spec: DTensorSpec, full: torch.Tensor, seed: int) -> list[torch.Tensor]:
    order = sorted(range(full.ndim), key=lambda dim: -spec.stride[dim])
    back = sorted(range(full.ndim), key=order.__getitem__)
    return [
        part.permute(order).contiguous().permute(back)
        for part in stored(spec, scatter(spec, full, seed))
    ]


def check(src: DTensorSpec, dst: DTensorSpec, seed: int) -> None:
    full = value_of(src, seed)
    before = held(src, full, seed)
    kept = [part.clone() for part in before]
    after = redistribute_locals(src, dst, tuple(before), fresh=True)
    assert_holds(dst, by_coord(dst, after), full, f"from {src}")
    assert all(map(equal, before, kept)), f"from {src} to {dst}: the source was changed"
    for part in after:
        places = [(part.stride(d), -src.stride[d]) for d in range(part.ndim) if part.shape[d] > 1]
        assert 0 in part.shape or sorted(places, reverse=True) == sorted(
            places, key=lambda place: place[1]
        ), f"from {src} to {dst}: dims lie in another order: {part.stride()}"


quiet = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@quiet
@given(moves(two_meshes=False))
def test_any_two_layouts(move: tuple[DTensorSpec, DTensorSpec, int]) -> None:
    check(*move)


@quiet
@given(moves(two_meshes=True))
def test_any_two_layouts_on_two_meshes(move: tuple[DTensorSpec, DTensorSpec, int]) -> None:
    check(*move)


@quiet
@given(st.lists(moves(two_meshes=False), min_size=1, max_size=6))
def test_any_batch(batch: list[tuple[DTensorSpec, DTensorSpec, int]]) -> None:
    full = [value_of(src, seed) for src, _, seed in batch]
    runs = [
        Run(prepared(src, dst), tuple(held(src, whole, seed)))
        for (src, dst, seed), whole in zip(batch, full, strict=True)
    ]
    for (src, dst, _), whole, ready in zip(batch, full, run_all(runs), strict=True):
        assert_holds(dst, by_coord(dst, ready()), whole, f"from {src}")
