"""Redistribution beside PyTorch's own DTensor: what each plan moves, and how long it takes.

    python benchmarks/redistribute.py            # bytes, steps and memory of every pair; no process
    python benchmarks/redistribute.py --plan     # how long planning takes with all caches empty
    python benchmarks/redistribute.py --time     # wall time on 4 gloo processes, side by side

Bytes are those that the rank that receives most receives. The bound is what a rank must receive
because it does not hold it, and for pending sums what any reduction must send: for each element one
message per contribution but the first, one per rank that wants the result but the first.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import shardwise as sw
from shardwise.layout.geometry import all_coords, box_numel, intersect
from shardwise.layout.mesh import VirtualMesh
from shardwise.redistribute import steps_between

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


# --- planning -------------------------------------------------------------------------------------

UNEQUAL = ["ethernet", "infiniband", "pcie", "nvlink"]


def time_planning(axes: int, unequal: bool, most: int, times: int) -> None:
    """Every pair, or `most` of them, with empty caches and new specs: the least of some times."""
    ranks = torch.arange(2**axes).view((2,) * axes)
    mesh = VirtualMesh("cpu", ranks, links=UNEQUAL[-axes:] if unequal else None)
    every = list(itertools.product(KINDS, repeat=axes))
    pairs = [pair for pair in itertools.product(every, repeat=2) if pair[0] != pair[1]]
    if len(pairs) > most:
        pairs = random.Random(0).sample(pairs, most)
    caches = [
        value
        for name, module in list(sys.modules.items())
        if name.startswith("shardwise")
        for value in vars(module).values()
        if hasattr(value, "cache_clear")
    ]
    found = []
    for src, dst in pairs:
        least = 1.0
        for _ in range(times):
            for cache in caches:
                cache.cache_clear()
            a, b = spec(mesh, src), spec(mesh, dst)
            start = time.perf_counter()
            steps_between(a, b)
            least = min(least, time.perf_counter() - start)
            del a, b
        found.append(least * 1e3)
    found.sort()
    at = [found[int(len(found) * part)] for part in (0.5, 0.99)]
    print(
        f"{(2,) * axes}, {'unequal' if unequal else 'equal'} links, {len(pairs)} pairs: mean "
        f"{statistics.mean(found):.2f} ms, median {at[0]:.2f}, 99 % {at[1]:.2f}, "
        f"most {found[-1]:.2f}, above 1 ms: {sum(t > 1 for t in found)}"
    )


# --- wall time on processes -----------------------------------------------------------------------

WORLD = 4
PAIRS = [
    ((2, 2), ("S0", "S1"), ("S1", "S0"), (4096, 4096)),
    ((2, 2), ("S0", "S0"), ("R", "S0"), (4096, 4096)),
    ((4,), ("S0",), ("S1",), (4096, 4096)),
    ((4,), ("P",), ("S0",), (4096, 4096)),
    ((4,), ("S0",), ("S1",), (4099, 4097)),
]


def placements(module: Any, layout: Sequence[str]) -> list[Any]:
    made = {"R": module.Replicate, "P": module.Partial}
    return [made[k]() if k in made else module.Shard(int(k[1])) for k in layout]


def seconds(run: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def side_by_side(runs: Sequence[Callable[[], Any]], times: int) -> list[float]:
    """The median time of each, taken in turns after one round that is not counted."""
    taken: list[list[float]] = [[] for _ in runs]
    for turn in range(times + 1):
        for run, found in zip(runs, taken, strict=True):
            one = seconds(run)
            if turn:
                found.append(one)
    return [statistics.median(found) for found in taken]


def time_pairs(times: int) -> None:
    import torch.distributed.tensor as peer
    from torch.distributed.device_mesh import init_device_mesh

    ratios = []
    for shape, src, dst, size in PAIRS:
        mesh, other = sw.init_device_mesh("cpu", shape), init_device_mesh("cpu", shape)
        # Made in this layout, not moved into it: neither library has anything cached.
        whole = torch.arange(prod(size), dtype=torch.float32).view(size)
        mine = sw.distribute_tensor(whole, mesh, placements(sw, src), src_data_rank=None)
        local = mine.to_local()
        stride = (size[1], 1)
        theirs = peer.DTensor.from_local(
            local, other, placements(peer, src), run_check=False, shape=torch.Size(size),
            stride=stride,
        )  # fmt: skip
        goals = placements(sw, dst), placements(peer, dst)
        got = mine.redistribute(placements=goals[0]).to_local()
        want = theirs.redistribute(placements=goals[1]).to_local()
        assert torch.equal(got, want), (src, dst)
        a, b = side_by_side(
            [
                lambda x=mine, p=goals[0]: x.redistribute(placements=p),
                lambda x=theirs, p=goals[1]: x.redistribute(placements=p),
            ],
            times,
        )
        ratios.append(a / b)
        if dist.get_rank() == 0:
            text = f"({','.join(src)}) -> ({','.join(dst)}) {size}"
            print(f"{text:38} {a * 1e3:7.1f} ms  PyTorch {b * 1e3:7.1f} ms  ratio {a / b:.2f}")
    if dist.get_rank() == 0:
        print(f"geometric mean of the ratios: {statistics.geometric_mean(ratios):.2f}")


def time_batch(times: int) -> None:
    mesh = sw.init_device_mesh("cpu", (WORLD,))
    rng = random.Random(0)
    sizes = [(rng.choice([1, 16, 64, 256]), rng.choice([8, 64, 128])) for _ in range(200)]
    grads = [sw.DTensor.from_local(torch.ones(n), mesh, [sw.Partial()]) for n in sizes]
    goal = [sw.Shard(0)]
    singly, together = side_by_side(
        [
            lambda: [grad.redistribute(placements=goal) for grad in grads],
            lambda: sw.redistribute_all(grads, goal),
        ],
        times,
    )
    if dist.get_rank() == 0:
        print(
            f"200 gradients P -> S0: one by one {singly * 1e3:.1f} ms, together "
            f"{together * 1e3:.1f} ms, ratio {together / singly:.2f}"
        )


def on_rank(rank: int, port: int, times: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    time_pairs(times)
    time_batch(times)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", action="store_true", help="print every pair")
    parser.add_argument("--plan", action="store_true", help="measure planning")
    parser.add_argument("--time", action="store_true", help="measure on processes")
    parser.add_argument("--times", type=int, default=5, help="how often each is measured")
    args = parser.parse_args()
    if args.plan:
        for axes, unequal in itertools.product((3, 4), (False, True)):
            time_planning(axes, unequal, 4096, args.times)
        return
    if args.time:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torch.multiprocessing.spawn(on_rank, args=(store.port, args.times), nprocs=WORLD)
        return
    for shape in MESHES:
        compare(shape, args.pairs)


if __name__ == "__main__":
    main()
