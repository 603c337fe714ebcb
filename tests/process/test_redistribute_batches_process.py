"""Redistribution on real processes: random cases, batches, buffers, async, two meshes, links."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Link, Partial, Replicate, Shard
from shardwise.comm import native
from shardwise.comm.failures import wait
from shardwise.errors import CommunicationError, MeshError
from shardwise.layout.cost import DEFAULT, links_of
from shardwise.layout.geometry import stride_like
from shardwise.layout.make_mesh import DeviceMesh
from shardwise.layout.mesh import AnyMesh, VirtualMesh, topology
from shardwise.layout.placement import Placement
from shardwise.layout.spec import DTensorSpec
from shardwise.redistribute.execute import Run, run_all
from shardwise.redistribute.prepare import prepared
from shardwise.storage.async_value import AsyncValue
from shardwise.tools.calibrate import calibrate

from ..layouts import assert_holds, layouts_of, scatter, spec_of, stored, whole_numbers
from .harness import ProcessPool

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Pools = Callable[[int], ProcessPool]
Side = tuple[Any, tuple[Placement, ...], Any]  # ranks of the mesh, placements, cuts
Case = tuple[tuple[int, ...], torch.dtype, Side, Side]  # size, dtype, from, to


def spec_on(mesh: AnyMesh, case: Case, side: Side) -> DTensorSpec:
    return spec_of(mesh, side[1], case[0], case[1], side[2], stride_like(case[0], order_of(case)))


def order_of(case: Case) -> list[int]:
    """The order of dims in memory: of half the cases not the usual one."""
    dims = list(range(len(case[0])))
    return dims[::-1] if sum(case[0]) % 2 else dims


def move(
    cases: Sequence[Case], buffer: int, batch: int, own: bool = False
) -> list[list[torch.Tensor]]:
    """On one rank: the local tensors after each case, `batch` cases at a time."""
    meshes: dict[str, AnyMesh] = {}
    for case in cases:
        for ranks, *_ in case[2:]:
            if str(ranks) not in meshes:  # every rank makes the same meshes in the same order
                meshes[str(ranks)] = DeviceMesh("cpu", ranks)
    prefers, native.prefers_own = native.prefers_own, lambda *of: own or prefers(*of)
    results: list[list[torch.Tensor]] = []
    try:
        with sw.exchange_buffer(buffer):
            for start in range(0, len(cases), batch):
                ready = run_all([run_of(meshes, case) for case in cases[start : start + batch]])
                results += [list(each()) for each in ready]
    finally:
        native.prefers_own = prefers
    return results


def run_of(meshes: dict[str, AnyMesh], case: Case, async_op: bool = False) -> Run:
    src, dst = (spec_on(meshes[str(side[0])], case, side) for side in case[2:])
    full = whole_numbers(case[0], dtype=case[1])
    order = order_of(case)  # its own inverse
    parts = stored(src, scatter(src, full))
    local = [part.permute(order).contiguous().permute(order) for part in parts]
    return Run(prepared(src, dst), tuple(local), async_op, async_op)


def check(cases: Sequence[Case], got: Sequence[Sequence[Any]]) -> None:
    """All ranks together hold what the layouts say; `got` is by rank, then by case."""
    for index, case in enumerate(cases):
        src, dst = (spec_on(VirtualMesh("cpu", side[0]), case, side) for side in case[2:])
        where, held = dst.topology, {}
        for coord in where.group_coords((0,) * where.ndim, range(where.ndim)):
            (held[coord],) = got[where.rank_of(coord)][index]
        assert_holds(dst, held, whole_numbers(case[0], dtype=case[1]), f"from {src}")


# --- random cases ---------------------------------------------------------------------------------

RANKS: list[Any] = [[0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 0], [1, 2]], [[[0, 1], [2, 3]]]]


def random_side(rng: random.Random, ranks: Any, size: tuple[int, ...], dtype: torch.dtype) -> Side:
    shape = tuple(torch.tensor(ranks).shape)
    ops = ["sum", "max", "min", "product"] + ["avg"] * dtype.is_floating_point
    kinds: list[Placement] = [R, Partial(rng.choice(ops)), *map(Shard, range(len(size)))]
    blocks = [Shard(dim, 2) for dim, length in enumerate(size) if length > 2 and length % 2 == 0]
    places = tuple(rng.choice([*kinds, *blocks]) for _ in shape)
    if any(place in blocks for place in places):
        return ranks, places, None
    cuts: list[tuple[int, ...] | None] = []
    for dim, length in enumerate(size):
        count = 1
        for n, place in zip(shape, places, strict=True):
            count *= n if place.is_shard(dim) else 1
        if count > 1 and rng.random() < 0.3:
            marks = sorted(rng.choices(range(length + 1), k=count - 1))
            ends = zip([0, *marks], [*marks, length], strict=True)
            cuts.append(tuple(b - a for a, b in ends))
        else:
            cuts.append(None)
    return ranks, places, cuts


def random_cases(count: int, seed: int, ranks: Sequence[Any], two: bool = False) -> list[Case]:
    rng = random.Random(seed)
    cases: list[Case] = []
    for _ in range(count):
        size = tuple(rng.choices([0, 1, 2, 3, 5, 8], [1, 2, 4, 4, 4, 4], k=rng.randint(0, 3)))
        dtype = rng.choice([torch.float64, torch.float32, torch.int32, torch.bfloat16])
        here = rng.choice(ranks)
        there = rng.choice(ranks) if two else here
        sides = [random_side(rng, each, size, dtype) for each in (here, there)]
        cases.append((size, dtype, sides[0], sides[1]))
    return cases


@pytest.mark.parametrize(("buffer", "batch"), [(1 << 20, 1), (48, 1), (1 << 20, 25), (64, 25)])
def test_500_random_cases(processes: Pools, buffer: int, batch: int) -> None:
    cases = random_cases(125, seed=buffer + batch, ranks=RANKS)
    check(cases, processes(4).run(move, cases, buffer, batch))


@pytest.mark.parametrize(("buffer", "batch"), [(48, 1), (1 << 20, 20)])
def test_ranks_of_a_wider_group_count_alike(processes: Pools, buffer: int, batch: int) -> None:
    """Axes 0 and 2 have no group of their own: ranks that hold nothing must take part all the
    same."""
    ranks = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    # One row, cut over axis 1: half of the ranks hold nothing. The columns are cut over 0 and 2.
    cuts = [None, (0, 3, 3, 3), (9, 0, 0, 0), (1, 1, 1, 6)]
    sides: list[Side] = [(ranks, (S1, S0, S1), [None, each]) for each in cuts]
    cases: list[Case] = [((1, 9), torch.float32, a, b) for a in sides for b in sides if a != b]
    check(cases, processes(8).run(move, cases, buffer, batch))


@pytest.mark.parametrize("buffer", [1 << 20, 64])
def test_the_collectives_of_other_backends(processes: Pools, buffer: int) -> None:
    cases = random_cases(60, seed=5, ranks=RANKS[:2])
    even = [((8, 4), torch.float32, (RANKS[0], a, None), (RANKS[0], b, None))
            for a, b in [((S0,), (R,)), ((S1,), (R,)), ((P,), (S0,)), ((P,), (S1,))]]  # fmt: skip
    check(cases + even, processes(4).run(move, cases + even, buffer, 1, True))


def test_large_tensors_go_in_rounds(processes: Pools) -> None:
    sides = [(RANKS[1], each, None) for each in layouts_of(2, [R, S0, S1, P])]
    cases: list[Case] = [((9, 7), torch.float32, a, b) for a in sides for b in sides[::3]]
    check(cases, processes(4).run(move, cases, 100, 1))


# --- two meshes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks",
    [
        [[0, 1], [2, 3]],  # apart, together the world
        [[0, 1, 2], [[2], [3]]],  # overlapping
        [[0, 3], [1, 2, 3]],  # overlapping, together the world
        [[0], [[1, 3]]],  # not all ranks
        [[[0, 1], [2, 3]], [3, 1]],  # a part of it
    ],
    ids=str,
)
def test_between_two_meshes(processes: Pools, ranks: list[Any]) -> None:
    cases = random_cases(40, seed=9, ranks=ranks, two=True)
    check(cases, processes(4).run(move, cases, 1 << 20, 1))
    check(cases[:20], processes(4).run(move, cases[:20], 32, 10))


def train_on_two_meshes() -> list[torch.Tensor]:
    a, b = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [[2], [3], [1]])
    torch.manual_seed(0)
    full = torch.randn(5, 4, dtype=torch.float64)
    x = sw.distribute_tensor(full, a, [S0], src_data_rank=None).requires_grad_()
    y = x.redistribute(b, [S1, R])
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    local = [] if topology(a).coordinate is None else [first.to_local(), second.to_local()]
    return [each.detach() for each in local]


def test_gradients_between_two_meshes(processes: Pools) -> None:
    got = processes(4).run(train_on_two_meshes)
    torch.manual_seed(0)
    full = torch.randn(5, 4, dtype=torch.float64)
    for index, want in enumerate((3 * full**2, 36 * full**3)):
        torch.testing.assert_close(torch.cat([got[rank][index] for rank in (0, 1)]), want)
    assert got[2] == got[3] == []


def fail_between_meshes() -> str:
    first, other = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2])
    x = sw.distribute_tensor(torch.ones(4, 4), first, [S0])
    x.redistribute(other, [R])  # no process group has just these ranks: they talk in pairs
    if dist.get_rank() == 3:
        return "not asked"
    started = time.monotonic()
    with pytest.raises((IndexError, CommunicationError)) as caught:
        if dist.get_rank() == 0:
            index = sw.DTensor.from_local(torch.tensor([9]), first, [R], run_check=False)
            torch.index_select(x.redistribute(placements=[R]), 0, index)
        else:
            x.redistribute(placements=[R])
        if dist.get_rank() == 1:
            raise IndexError("rank 1 has nothing to wait for")
        x.redistribute(other, [R])
    assert time.monotonic() - started < 30, "it heard of it only when the backend's time was over"
    return str(caught.value)


def test_a_failure_is_heard_of_on_another_mesh() -> None:
    pool = ProcessPool(4)  # of its own: ranks cannot talk after one has failed
    try:
        texts = pool.run(fail_between_meshes, timeout=60)
    finally:
        pool.stop()
    assert texts[2].startswith("a collective cannot finish: rank 0 failed: IndexError")


def fail_in_a_list() -> str:
    mesh = sw.init_device_mesh("cpu", (2,))
    local = torch.ones(2, 3) if dist.get_rank() == 0 else torch.ones(3).expand(2, 3)
    x = sw.DTensor.from_local(local, mesh, [S0], shape=(4, 3), stride=(3, 1))
    started = time.monotonic()
    with pytest.raises(Exception, match="single memory location") as caught:
        torch._foreach_add_([x, x.sum()], 1.0)  # which the second rank cannot write into
        x.full_tensor()
    assert time.monotonic() - started < 30, "it heard of it only when the backend's time was over"
    return type(caught.value).__name__


def test_a_failure_in_a_list_is_heard_of() -> None:
    pool = ProcessPool(2)  # of its own: ranks cannot talk after one has failed
    try:
        assert pool.run(fail_in_a_list, timeout=60) == ["CommunicationError", "RuntimeError"]
    finally:
        pool.stop()


# --- async ----------------------------------------------------------------------------------------


def overlap() -> list[bool]:
    mesh = sw.init_device_mesh("cpu", (4,))
    full = torch.arange(40.0).view(8, 5)
    x = sw.distribute_tensor(full, mesh, [S0]).requires_grad_()
    y = x.redistribute(placements=[S1], async_op=True)
    waits = isinstance(y, AsyncValue) and "still moving" in repr(y)
    waits &= isinstance(y, AsyncValue)  # printing is no use of it
    facts = [waits, y.placements == (S1,), y.requires_grad]
    z = y * 2
    facts += [type(y) is sw.DTensor, torch.equal(z.full_tensor(), full * 2)]
    z.sum().backward()
    facts.append(torch.equal(x.grad.full_tensor(), torch.full_like(full, 2)))
    many = sw.redistribute_all([x.detach(), z.detach()], [[R], [S0]], async_op=True)
    facts += [isinstance(each, AsyncValue) for each in many]
    facts.append(torch.equal(many[1].full_tensor(), full * 2))
    facts.append(torch.equal(many[0].to_local(), full))
    written = x.detach().clone()
    late = [written.redistribute(placements=[p], async_op=True) for p in (S1, R)]
    late.append(late[1].redistribute(placements=[S0], async_op=True))
    late[1].zero_()
    written.zero_()
    facts += [torch.equal(late[i].full_tensor(), full) for i in (0, 2)]
    whole = x.detach().redistribute(placements=[R], async_op=True)
    facts.append(torch.equal(whole.to_local(), full))
    return facts


def test_async_waits_at_first_use(processes: Pools) -> None:
    assert all(all(facts) for facts in processes(4).run(overlap))


def drop() -> list[bool]:
    """Tensors that nobody uses: what comes for them is not mistaken for what comes later."""
    mesh = sw.init_device_mesh("cpu", (4,))
    full = torch.arange(4096.0).view(64, 64)
    x = sw.distribute_tensor(full, mesh, [S0])
    alive = []
    for _ in range(50):
        for y in [
            x.redistribute(placements=[S1], async_op=True),
            *sw.redistribute_all([x, x], [R], async_op=True),
        ]:
            alive.append(weakref.ref(y))
        del y
    gc.collect()
    gone = all(each() is None for each in alive)
    if dist.get_rank() == 1:  # ranks may differ in what they use
        x.redistribute(placements=[S1], async_op=True).to_local()
    else:
        x.redistribute(placements=[S1], async_op=True)
    return [gone, torch.equal(x.redistribute(placements=[R]).to_local(), full)]


def test_what_is_dropped_leaks_nothing(processes: Pools) -> None:
    assert processes(4).run(drop) == [[True, True]] * 4


# --- links and groups -----------------------------------------------------------------------------


def links_by_rank() -> list[Any]:
    mine = "ethernet" if dist.get_rank() == 0 else "nvlink"
    mesh = sw.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"), links=mine)
    part = topology(mesh["c"]).links
    error = ""
    try:
        sw.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"), links=Link(1.0, 1.0))
    except MeshError as refused:
        error = str(refused)
    return [topology(mesh).links, part, error, list(topology(mesh).groups)]


def test_ranks_agree_on_the_links_of_the_first(processes: Pools) -> None:
    for links, part, error, groups in processes(4).run(links_by_rank):
        assert {link.bandwidth for link in links} == {1e9} and part == links[2:]
        assert "stay as they are" in error
        assert groups == [(0,), (1,), (2,), (1, 2)]


def links_from_file(file: Path) -> list[float] | str:
    own = file if dist.get_rank() == 2 else Path("/nowhere")
    try:
        mesh = DeviceMesh("cpu", [[2, 3]], links=own)
    except MeshError as error:
        return str(error)
    return [link.bandwidth for link in topology(mesh).links]


def test_a_mesh_reads_the_file_of_its_first_rank(processes: Pools, tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text("[[1e-5, 1e9], [1e-5, 7e8]]")
    assert processes(4).run(links_from_file, file) == [[1e9, 7e8]] * 4
    missing = processes(4).run(links_from_file, tmp_path / "no")
    assert all("No such file" in text for text in missing)


def calibrated(file: Path) -> list[tuple[Link, ...]]:
    return [calibrate("cpu", (2, 1, 2), file, large=1 << 14), links_of(file, 3)]


def test_calibration_measures_and_keeps(processes: Pools, tmp_path: Path) -> None:
    got = processes(4).run(calibrated, tmp_path / "links.json")
    assert all(each[0] == got[0][0] for each in got), "the ranks disagree"
    (first, kept) = got[0]
    assert kept == first and first[1] == DEFAULT
    assert all(link.latency > 0 and link.bandwidth > 1e3 for link in first)


class Slow:
    """A collective that ends just when its wait is given up."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, *timeout: Any) -> None:
        self.waits += 1
        if timeout:
            raise RuntimeError("Operation timed out!")

    def get_future(self) -> Slow:
        return self

    def done(self) -> bool:
        return True


def wait_for_slow() -> int:
    work = Slow()
    wait(work, (0, 1), True)
    return work.waits


def test_a_collective_that_ends_as_its_wait_does_is_no_failure(processes: Pools) -> None:
    assert processes(4).run(wait_for_slow) == [2] * 4
