"""Redistribution beside PyTorch's own DTensor: what each plan moves, and how long it takes.

    python benchmarks/redistribute.py            # bytes, steps and memory of every pair; no process
    python benchmarks/redistribute.py --time     # wall time on 4 gloo processes, side by side

Bytes are those that the rank that receives most receives. The bound is what a rank must receive
because it does not hold it, and for pending sums what any reduction must send: for each element one
message per contribution but the first, one per rank that wants the result but the first.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.geometry import all_coords, box_numel, intersect
from shardwise.mesh import VirtualMesh

MESHES = [(8,), (2, 4), (2, 2, 2)]
SIZE = (1024, 1024)
KINDS = "R", "S0", "S1", "P"


@dataclass(frozen=True)
class Plan:
    """What a plan for one pair costs, in elements."""

    received: int
    steps: int
    held: int


def ours(mesh: Any, src: Sequence[str], dst: Sequence[str]) -> Plan:
    told = sw.explain_redistribute(spec(mesh, src), spec(mesh, dst))
    item = torch.float32.itemsize
    moving = [step for step in told.steps if step.kind not in ("slice", "make_partial")]
    return Plan(told.received // item, len(moving), told.held // item)


def spec(mesh: Any, layout: Sequence[str]) -> sw.DTensorSpec:
    kinds = {"R": sw.Replicate(), "S0": sw.Shard(0), "S1": sw.Shard(1), "P": sw.Partial()}
    meta = sw.TensorMeta(SIZE, (SIZE[1], 1), torch.float32)
    return sw.DTensorSpec(mesh, [kinds[kind] for kind in layout], meta)


def bound(mesh: Any, src: Sequence[str], dst: Sequence[str]) -> float | None:
    """The least that the busiest rank can receive; None where no simple bound is known."""
    a, b = spec(mesh, src), spec(mesh, dst)
    if "P" not in src and "P" not in dst:
        return max(
            box_numel(b.box(c)) - box_numel(intersect(a.box(c), b.box(c)))
            for c in all_coords(tuple(mesh.shape))
        )
    if any(want == "P" and have != "P" for have, want in zip(src, dst, strict=True)):
        return None
    axes = list(zip(mesh.shape, src, dst, strict=True))
    kept = prod(size for size, have, want in axes if have == want == "P")
    given = prod(size for size, have, want in axes if have == "P" and want != "P")
    if given == 1:
        return None
    wanted = prod(size for size, _, want in axes if want == "R")
    return kept * prod(SIZE) * (given + wanted - 2) / prod(mesh.shape)


def theirs(mesh: Any, src: Sequence[str], dst: Sequence[str]) -> Plan | None:
    """PyTorch's plan; None if it refuses the pair."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._redistribute import (
        _gen_transform_infos,
        _optimize_transform_infos,
    )

    kinds = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}
    meta = TensorMeta(torch.Size(SIZE), (SIZE[1], 1), torch.float32)
    sides = [DTensorSpec(mesh, tuple(kinds[k] for k in side), meta) for side in (src, dst)]
    infos = _optimize_transform_infos(
        _gen_transform_infos(*sides), mesh, sides[0].placements, sides[1].placements
    )
    local = prod(SIZE) // prod(n for n, k in zip(mesh.shape, src, strict=True) if k[0] == "S")
    source, received, steps, held = local, 0, 0, local
    for info in infos:
        have, want = info.src_dst_placements
        count = mesh.size(info.mesh_dim)
        after = local
        if have.is_shard() and want.is_partial():
            return None
        if have.is_shard() and want.is_replicate():
            after = local * count
            got = after - local
        elif have.is_shard() and want.is_shard():
            got = local * (count - 1) // count if have != want else 0
        elif have.is_partial() and want.is_replicate():
            got = 2 * local * (count - 1) // count
        elif have.is_partial() and want.is_shard():
            after = local // count
            got = after * (count - 1)
        else:
            after = local // count if want.is_shard() else local
            got = 0
        received, steps = received + got, steps + (got > 0)
        held = max(held, source + (local if steps > 1 else 0) + after)
        local = after
    return Plan(received, steps, held)


def fake_mesh(shape: tuple[int, ...]) -> Any:
    """A mesh of PyTorch's for planning alone: its process group talks to nobody."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    return init_device_mesh("cpu", shape)


def compare(mesh_shape: tuple[int, ...], show: bool) -> None:
    every = list(itertools.product(KINDS, repeat=len(mesh_shape)))
    mine, other = VirtualMesh("cpu", torch.arange(8).view(mesh_shape)), fake_mesh(mesh_shape)
    counts = dict.fromkeys(
        ["pairs", "plain", "plain at bound", "reducing", "reducing at bound", "refused by PyTorch",
         "fewer bytes", "equal bytes", "more bytes", "more steps", "more held"], 0
    )  # fmt: skip
    sums = [0, 0]
    for src, dst in itertools.product(every, repeat=2):
        if src == dst:
            continue
        plan, least, peer = ours(mine, src, dst), bound(mine, src, dst), theirs(other, src, dst)
        counts["pairs"] += 1
        if least is not None:
            kind = "reducing" if "P" in src else "plain"
            counts[kind] += 1
            counts[f"{kind} at bound"] += plan.received <= least
        if peer is None:
            counts["refused by PyTorch"] += 1
        else:
            sums[0] += plan.received
            sums[1] += peer.received
            counts["fewer bytes"] += plan.received < peer.received
            counts["equal bytes"] += plan.received == peer.received
            counts["more bytes"] += plan.received > peer.received
            counts["more steps"] += plan.steps > peer.steps
            counts["more held"] += plan.held > peer.held
        if show:
            beside = "refused" if peer is None else f"{peer.received:8} {peer.steps} {peer.held:8}"
            text = f"{','.join(src):>10} -> {','.join(dst):10}"
            low = "-" if least is None else f"{least:g}"
            print(f"{text} {plan.received:8} {plan.steps} {plan.held:8} | {beside} | {low}")
    print(f"{mesh_shape}: " + ", ".join(f"{k} {v}" for k, v in counts.items()))
    print(f"  bytes over the pairs that both do: ours / PyTorch's = {sums[0] / sums[1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", action="store_true", help="print every pair")
    args = parser.parse_args()
    for shape in MESHES:
        compare(shape, args.pairs)


if __name__ == "__main__":
    main()
