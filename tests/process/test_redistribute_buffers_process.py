"""What is held while a layout changes on real processes: source, target and buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.layout.make_mesh import DeviceMesh
from shardwise.layout.mesh import AnyMesh, VirtualMesh
from shardwise.layout.placement import Placement
from shardwise.redistribute.execute import Run, redistribute_locals, run_all
from shardwise.redistribute.prepare import prepared

from ..layouts import all_coords, assert_holds, scatter, spec_of, stored, whole_numbers
from .harness import ProcessPool
from .peak import Peak
from .test_async_process import given

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Pools = Callable[[int], ProcessPool]
Move = tuple[tuple[int, ...], list[Placement], list[Placement], int]  # size, from, to, buffer

WHOLE: list[Move] = [
    (size, src, dst, 16384)
    for size in [(256, 128), (131, 77)]
    for src, dst in [
        ([P, S0], [R, S1]),
        ([P, P], [S1, R]),
        ([P, S0], [S1, S0]),
        ([S0, S0], [R, P]),
        ([P, S1], [P, S0]),
        ([R, S0], [S0, P]),
        ([S0, S1], [S1, S0]),
        ([R, R], [S1, R]),
    ]
]
REDUCED: list[Move] = [
    ((64, 30), [P, R], [R, S0], 4096),
    ((64, 30), [Partial("max"), P], [S1, R], 4096),
    ((64, 30), [Partial("avg"), S1], [S0, S1], 4096),
]


def peaks(moves: Sequence[Move], dtype: torch.dtype) -> list[tuple[torch.Tensor, list[int], int]]:
    """For some moves the result, what this rank held beside source and result each time, and what
    was told."""
    links = ["ethernet", "nvlink"]
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("slow", "fast"), links=links)
    found = []
    for size, *places, room in moves:
        src, dst = (spec_of(mesh, each, size, dtype) for each in places)
        local = tuple(stored(src, scatter(src, whole_numbers(size, dtype=dtype))))
        held = []
        with sw.exchange_buffer(room):
            told = sw.explain_redistribute(src, dst)
            redistribute_locals(
                src, dst, local, fresh=True
            )  # nothing is cached in what is measured
            for _ in range(3):
                made: tuple[torch.Tensor, ...] = ()
                with Peak() as peak:
                    made = redistribute_locals(src, dst, local, fresh=True)
                held.append(peak.most - made[0].nbytes)
        most = max(step.held[dist.get_rank()] for step in told.steps)
        found.append((made[0], held, most - local[0].nbytes - made[0].nbytes))
    return found


@pytest.mark.parametrize(
    ("moves", "dtype"),
    [
        (WHOLE, torch.float32),
        (REDUCED, torch.int16),
        (REDUCED, torch.bfloat16),
    ],
    ids=["whole", "reduced wider", "reduced"],
)
def test_what_is_held_is_bounded_and_told(
    processes: Pools, moves: Sequence[Move], dtype: torch.dtype
) -> None:
    got = processes(4).run(peaks, moves, dtype)
    mesh = VirtualMesh("cpu", [[0, 1], [2, 3]])
    for index, (size, src, dst, room) in enumerate(moves):
        full, spec = whole_numbers(size, dtype=dtype), spec_of(mesh, dst, size, dtype)
        parts = {coord: got[2 * coord[0] + coord[1]][index][0] for coord in all_coords(spec)}
        assert_holds(spec, parts, full, f"from {src}")
        for _, held, told in [facts[index] for facts in got]:
            assert max(held) <= max(told, 0), (size, src, dst, room, held, told)
            assert told <= 2 * room


BATCH: list[Move] = [
    ((64, 64), [S0, S0], [S1, R], 4096),
    ((64, 64), [S0, R], [R, S0], 4096),
    ((64, 64), [P, R], [S0, R], 4096),
    ((64, 64), [Partial("max"), S0], [R, S1], 4096),
    ((12, 5), [Shard(0, 3), R], [Shard(0, 4), R], 4096),
    ((10, 5), [S0, S1], [P, R], 4096),
]


def batch_peaks(moves: Sequence[Move], async_op: bool) -> tuple[list[torch.Tensor], list[int]]:
    """The results of moves that go out together, and what was held beside them each time."""
    mesh = sw.init_device_mesh("cpu", (2, 2))
    pairs = [[spec_of(mesh, each, size) for each in places] for size, *places, _ in moves]
    locals_of = [tuple(stored(src, scatter(src, whole_numbers(src.shape)))) for src, _ in pairs]
    held = []
    for _ in range(4):
        made: list[torch.Tensor] = []
        with Peak() as peak, sw.exchange_buffer(moves[0][-1]):
            runs = [
                Run(prepared(src, dst), local, True, async_op)
                for (src, dst), local in zip(pairs, locals_of, strict=True)
            ]
            made = [ready()[0] for ready in run_all(runs)]
        held.append(peak.most - sum([each.nbytes for each in made]))
    return made, held


@pytest.mark.parametrize("async_op", [False, True])
def test_a_batch_shares_one_buffer(processes: Pools, async_op: bool) -> None:
    got = processes(4).run(batch_peaks, BATCH, async_op)
    mesh, room = VirtualMesh("cpu", [[0, 1], [2, 3]]), BATCH[0][-1]
    for index, (size, src, dst, _) in enumerate(BATCH):
        spec = spec_of(mesh, dst, size)
        parts = {coord: got[2 * coord[0] + coord[1]][0][index] for coord in all_coords(spec)}
        assert_holds(spec, parts, whole_numbers(size), f"from {src}")
    for _, held in got:
        assert max(held[1:]) <= 2 * room, held


# --- asynchronously -------------------------------------------------------------------------------

HALVES = [0, 1], [1, 2, 3]
LATER: dict[str, list[Move]] = {
    "one message": [((96, 64), [S0, S1], [S1, S0], 1 << 16), ((95, 63), [S0, R], [R, R], 1 << 17)],
    "rounds": [((96, 64), [S0, S1], [S1, S0], 4096), ((95, 63), [R, S1], [S0, R], 2048)],
    "reduced": [((95, 63), [P, P], [R, R], 4096)],
    "two steps": [((96, 64), [P, P], [S0, R], 1 << 17), ((95, 63), [S0, S0], [R, P], 1 << 17)],
    "a single exchange": [((96, 64), [P, P], [S0, R], 4096)],
    "fewer blocks than ranks": [((960, 4), [Shard(0, 2), Shard(0, 2)], [S0, S0], 2048)],
}
BETWEEN: list[Move] = [
    ((96, 64), [S0], [S1], 4096),
    ((95, 63), [P], [S1], 1 << 17),
    ((95, 63), [S1], [S0], 1 << 17),
]


def flown(call: Callable[[], list[Any]], full: torch.Tensor, room: int) -> tuple[list[int], bool]:
    """What is held beside source and target each time that moves fly, and if they are right."""
    held, right = [], True
    for _ in range(2):
        with Peak() as peak, sw.exchange_buffer(room):
            made = call()
            parts = [part for each in made for part in each._locals]
        held.append(peak.most - sum([part.nbytes for part in parts]))
        mine = [each for each in made if each._spec.topology.coordinate is not None]
        right = right and all(torch.equal(each.full_tensor(), full) for each in mine)
        del made, mine, parts
    return held, right


def peaks_later() -> dict[str, tuple[list[int], bool, int]]:
    """For moves of all kinds what `flown` tells, and the buffer."""
    mesh = sw.init_device_mesh("cpu", (2, 2))
    one, other = (DeviceMesh("cpu", ranks) for ranks in HALVES)
    found = {}

    def fly(name: str, source: AnyMesh, target: AnyMesh, move: Move) -> None:
        size, src, dst, room = move
        full = whole_numbers(size)
        whole = [R if place.is_partial() else place for place in src]
        x = given(source, whole, full).redistribute(placements=src)
        got = flown(lambda: [x.redistribute(target, dst, async_op=True)], full, room)
        found[name] = (*got, room)

    for name, moves in LATER.items():
        for move in moves:
            fly(f"{name} {move}", mesh, mesh, move)
    for move in BETWEEN:
        fly(f"meshes {move}", one, other, move)
    full = whole_numbers((64, 33))
    many = [given(mesh, src, full) for src in ([S0, S0], [S0, R], [R, S1], [S0, S1]) * 4]
    targets = [[S1, R], [R, S0], [S0, S1], [R, P]] * 4
    for room in (4096, 1 << 20):
        got = flown(lambda: sw.redistribute_all(many, targets, async_op=True), full, room)
        found[f"batch {room}"] = (*got, room)
    return found


def test_what_flies_holds_source_target_and_buffer(processes: Pools) -> None:
    for rank, got in enumerate(processes(4).run(peaks_later, timeout=120)):
        for name, (held, right, room) in got.items():
            assert right, (rank, name)
            assert max(held) <= 2 * room, (rank, name, held, room)
