"""Redistribution: what the host does for it, and what each library's plan receives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed.tensor as theirs
from benchmarks.bench.sides import Side, fake_world, virtual_side
from benchmarks.bench.timing import Job, Row, Settings, timed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    _optimize_transform_infos,
)

import shardwise as sw
from shardwise.layout.geometry import all_coords, box_numel, intersect

KINDS = "R", "S0", "S1", "P"
PAIRS = [
    (("S0",), ("S1",)),
    (("S0",), ("R",)),
    (("R",), ("S0",)),
    (("P",), ("R",)),
    (("P",), ("S0",)),
    (("S0", "S1"), ("S1", "S0")),
    (("S0", "P"), ("S0", "R")),
]
SIZE = (1024, 1024)


def placements(lib: Any, layout: Sequence[str]) -> list[Any]:
    """The placements of a library by their short names."""
    made = {"R": lib.Replicate, "P": lib.Partial}
    return [made[kind]() if kind in made else lib.Shard(int(kind[1])) for kind in layout]


def named(layout: Sequence[str]) -> str:
    return ",".join(layout) if len(layout) == 1 else f"({','.join(layout)})"


def moved(side: Side, src: Sequence[str], dst: Sequence[str]) -> Callable[[], Any]:
    """Redistribute a tensor; a Partial is the sum over a sharded dim, as in programs."""
    if side.lib is None:
        return lambda: torch.ones(64, 64) * 64
    dims = [None if kind == "R" else 0 if kind == "P" else int(kind[1]) + 1 for kind in src]
    x = side.put(torch.ones(64, 64, 64), *dims).sum(0)
    goal = placements(side.lib, dst)
    assert x.placements == tuple(placements(side.lib, src)), (x.placements, src)
    return lambda: x.redistribute(placements=goal)


def received_by_ours(mesh: Any, src: Sequence[str], dst: Sequence[str]) -> int:
    meta = sw.TensorMeta(SIZE, (SIZE[1], 1), torch.float32)
    specs = [sw.DTensorSpec(mesh, placements(sw, layout), meta) for layout in (src, dst)]
    return sw.explain_redistribute(*specs).received


def least(mesh: Any, src: Sequence[str], dst: Sequence[str]) -> int:
    """Bytes that some rank must receive, because it does not hold them; no Partial is involved."""
    meta = sw.TensorMeta(SIZE, (SIZE[1], 1), torch.float32)
    have, want = (sw.DTensorSpec(mesh, placements(sw, layout), meta) for layout in (src, dst))
    boxes = [(have.box(coord), want.box(coord)) for coord in all_coords(tuple(mesh.shape))]
    missing = (box_numel(b) - box_numel(intersect(a, b)) for a, b in boxes)
    return max(missing) * torch.float32.itemsize


def received_by_theirs(mesh: Any, src: Sequence[str], dst: Sequence[str]) -> int | None:
    """Bytes that a rank receives in PyTorch's plan; None if it refuses the pair."""
    meta = TensorMeta(torch.Size(SIZE), (SIZE[1], 1), torch.float32)
    sides = [DTensorSpec(mesh, tuple(placements(theirs, side)), meta) for side in (src, dst)]
    steps = _optimize_transform_infos(
        _gen_transform_infos(*sides), mesh, sides[0].placements, sides[1].placements
    )
    local = prod(SIZE) // prod(n for n, k in zip(mesh.shape, src, strict=True) if k[0] == "S")
    received = 0
    for step in steps:
        (have, want), count = step.src_dst_placements, mesh.size(step.mesh_dim)
        if have.is_shard() and want.is_partial():
            return None
        if have.is_shard() and want.is_replicate():
            received += local * (count - 1)
            local *= count
        elif have.is_shard() and want.is_shard():
            received += local * (count - 1) // count if have != want else 0
        elif have.is_partial() and want.is_replicate():
            received += 2 * local * (count - 1) // count
        elif want.is_shard():
            local //= count
            received += local * (count - 1) if have.is_partial() else 0
    return received * torch.float32.itemsize


def all_pairs(settings: Settings, shape: tuple[int, ...]) -> list[Row]:
    """The bytes of all pairs of layouts that both libraries do, and how many of ours are more."""
    every = list(itertools.product(KINDS, repeat=len(shape)))
    virtual = virtual_side(shape).mesh
    with fake_world(8):
        mesh = init_device_mesh("cpu", shape)
        layouts = [pair for pair in itertools.product(every, repeat=2) if pair[0] != pair[1]]
        pairs = [
            (received_by_ours(virtual, *each), received_by_theirs(mesh, *each)) for each in layouts
        ]
    whole = [
        (mine, least(virtual, *each))
        for (mine, _), each in zip(pairs, layouts, strict=True)
        if "P" not in each[0] + each[1]
    ]
    both = [(mine, other) for mine, other in pairs if other is not None]
    more = sum(mine > other for mine, other in both)
    name = f"received, {len(both)} pairs of layouts on {shape}"
    sums = (sum(side) / 2**20 for side in zip(*both, strict=True))
    return [
        Row("redistribute", name, "MiB", *sums),
        Row("redistribute", f"{name}: more than PyTorch's", "pairs", more),
        Row("redistribute", f"{len(whole)} pairs without a Partial on {shape}: more than the least",
            "pairs", sum(mine > bound for mine, bound in whole)),
        Row("redistribute", f"pairs on {shape} that PyTorch refuses", "pairs", 0,
            len(pairs) - len(both), rated=False),
    ]  # fmt: skip


def jobs(settings: Settings) -> dict[str, Job]:
    found: dict[str, Job] = {}
    for src, dst in PAIRS:
        name = f"{named(src)} to {named(dst)}"
        shape = (16,) if len(src) == 1 else (4, 4)
        make = partial(moved, src=src, dst=dst)
        found[name] = timed("redistribute", f"{name}, host", make, shape, number=5, plain=False)
    for shape in ((8,), (2, 4), (2, 2, 2))[: settings.pick(2, 3)]:
        found[f"all pairs on {shape}"] = partial(all_pairs, shape=shape)
    return found
