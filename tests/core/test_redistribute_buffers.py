"""Moves of any layouts with buffers of any size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.errors import LayoutError
from shardwise.layout.geometry import stride_like
from shardwise.layout.mesh import VirtualMesh
from shardwise.layout.placement import Placement
from shardwise.layout.spec import DTensorSpec
from shardwise.redistribute.execute import redistribute_locals
from shardwise.redistribute.prepare import steps_between

from ..layouts import assert_holds, by_coord, scatter, spec_of, stored, whole_numbers

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def assert_moves(src: DTensorSpec, dst: DTensorSpec, room: int) -> None:
    full = whole_numbers(src.shape, dtype=src.dtype)
    local = tuple(stored(src, scatter(src, full)))
    with sw.exchange_buffer(room):
        sw.explain_redistribute(src, dst)
        assert_holds(
            dst,
            by_coord(dst, redistribute_locals(src, dst, local)),
            full,
            f"from {src} in {room} B",
        )


def random_layout(rng: random.Random, mesh: VirtualMesh, size: Sequence[int]) -> DTensorSpec:
    """With blocks of all sizes, blocks in blocks, and pending sums among them."""
    while True:
        places: list[Placement] = []
        for _ in range(mesh.ndim):
            dim = rng.randrange(len(size))
            splits = [1, *[n for n in range(2, size[dim]) if size[dim] % n == 0]]
            places.append(rng.choice([R, P, S0, Shard(dim), *[Shard(dim, rng.choice(splits))] * 4]))
        order = rng.sample(range(len(size)), len(size)) if rng.random() < 0.3 else range(len(size))
        try:
            return spec_of(mesh, places, size, stride=stride_like(size, order))
        except LayoutError:
            continue  # blocks that are no blocks of each other


MESHES: list[Any] = [[0, 1, 2], [[0, 1], [2, 3]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]


@pytest.mark.parametrize("ranks", MESHES, ids=lambda ranks: f"{torch.tensor(ranks).ndim}d")
@pytest.mark.parametrize("two", [False, True], ids=["one mesh", "two meshes"])
def test_any_move_with_any_buffer(ranks: Any, two: bool) -> None:
    rng = random.Random(str((ranks, two)))
    here = VirtualMesh("cpu", ranks)
    there = VirtualMesh("cpu", [3, 1, 0]) if two else here
    for _ in range(12):
        size = rng.choice([(48,), (36,), (60,), (12, 8), (24, 5), (4, 6, 5), (7, 12)])
        src, dst = random_layout(rng, here, size), random_layout(rng, there, size)
        dst = dst.with_meta(src.meta)
        assert_moves(src, dst, rng.choice([1, 40, 100, 400]))


TWO_SIZES = {
    "to pieces": ((96,), [Shard(0, 2), Shard(0, 8)], [S0, S0]),
    "to other blocks": ((96,), [Shard(0, 2), Shard(0, 8)], [Shard(0, 6), Shard(0, 3)]),
    "the inner by the outer axis": ((96,), [Shard(0, 8), Shard(0, 2)], [R, Shard(0, 3)]),
    "from pieces": ((90, 2), [S0, S0], [Shard(0, 5), Shard(0, 15)]),
    "to sums": ((60,), [Shard(0, 3), Shard(0, 12)], [P, Shard(0, 4)]),
    "from sums": ((60,), [P, Shard(0, 12)], [Shard(0, 5), Shard(0, 10)]),
    "uneven": ((70,), [Shard(0, 2), Shard(0, 14)], [Shard(0, 5), S0]),
}


@pytest.mark.parametrize("name", TWO_SIZES)
@pytest.mark.parametrize("room", [1, 300])
def test_blocks_of_two_sizes(name: str, room: int) -> None:
    size, src, dst = TWO_SIZES[name]
    mesh = VirtualMesh("cpu", [[0, 1, 2], [3, 4, 5]])
    assert_moves(spec_of(mesh, src, size), spec_of(mesh, dst, size), room)


def test_the_single_exchange_serves_where_the_chain_holds_too_much() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    src, dst = spec_of(mesh, [P, S0], (40, 50)), spec_of(mesh, [R, S1], (40, 50))
    assert [step.kind for step in steps_between(src, dst)] == ["all_reduce", "exchange"]
    with sw.exchange_buffer(64):
        assert [step.kind for step in steps_between(src, dst)] == ["reduce_exchange"]
    for room in (1, 64, 1000):
        assert_moves(src, dst, room)


def test_an_expanded_tensor_in_blocks_stays_expanded() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    full = torch.arange(60.0)
    x = sw.distribute_tensor(full, mesh, [Shard(0, 3), Shard(0, 12)])
    wide = x.unsqueeze(1).expand(60, 50)
    for room in (100, 1 << 20):
        with sw.exchange_buffer(room):
            moved = wide.redistribute(placements=[Shard(0, 4), R])
        assert torch.equal(moved.full_tensor(), full.unsqueeze(1).expand(60, 50))
        assert moved.to_local().at((0, 0)).stride()[1] == 0
