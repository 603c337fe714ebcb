"""Redistribution on real processes gives what plain PyTorch gives: moved by gloo, checked here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from shardwise.comm import all_equal
from shardwise.errors import MeshError
from shardwise.layout.make_mesh import DeviceMesh, init_device_mesh
from shardwise.layout.mesh import AnyMesh, VirtualMesh, topology
from shardwise.layout.placement import Partial, Placement, Replicate, Shard
from shardwise.layout.spec import DTensorSpec
from shardwise.redistribute.execute import redistribute_locals
from shardwise.tensor.dtensor import distribute_tensor

from ..layouts import assert_holds, layouts_of, scatter, spec_of, stored, whole_numbers
from .harness import ProcessPool, RankError

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SIZES = [(8, 8), (7, 5), (3, 2), (1, 1), (0, 4)]

Pools = Callable[[int], ProcessPool]
Side = tuple[tuple[Placement, ...], Any]  # placements and cuts
Case = tuple[tuple[int, ...], torch.dtype, Side, Side]  # size, dtype, from, to
Ranks = Any  # a nested list of ranks: the mesh


def make_mesh(ranks: Ranks, names: Sequence[str] | None = None) -> AnyMesh:
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def sides(mesh: AnyMesh, case: Case) -> tuple[DTensorSpec, DTensorSpec]:
    size, dtype, src, dst = case
    src_spec = spec_of(mesh, src[0], size, dtype, cuts=src[1])
    return src_spec, spec_of(mesh, dst[0], size, dtype, cuts=dst[1])


def move(ranks: Ranks, cases: Sequence[Case]) -> list[list[torch.Tensor]]:
    """On one rank: the local tensors after each case; none if the rank is not in the mesh."""
    mesh = make_mesh(ranks)
    return [move_one(mesh, case) for case in cases]


def move_one(mesh: AnyMesh, case: Case) -> list[torch.Tensor]:
    src, dst = sides(mesh, case)
    full = whole_numbers(case[0], dtype=case[1])
    return list(redistribute_locals(src, dst, tuple(stored(src, scatter(src, full)))))


def check(ranks: Ranks, cases: Sequence[Case], got: Sequence[Sequence[Any]]) -> None:
    """All ranks together hold what the layouts say; `got` is by rank, then by case."""
    mesh = VirtualMesh("cpu", ranks)
    where = topology(mesh)
    for index, case in enumerate(cases):
        src, dst = sides(mesh, case)
        held = {}
        for coord in where.group_coords((0,) * where.ndim, range(where.ndim)):
            (held[coord],) = got[where.rank_of(coord)][index]
        assert_holds(dst, held, whole_numbers(case[0], dtype=case[1]), f"from {src}")


def plain(*placements: Placement) -> Side:
    return placements, None


def sampled(ndim: int, seed: int) -> list[Case]:
    """A tenth of the pairs of every size."""
    every = layouts_of(ndim, [R, S0, S1, P])
    cases: list[Case] = [
        (size, torch.float32, (src, None), (dst, None))
        for size in SIZES
        for src in every
        for dst in every
    ]
    return random.Random(seed).sample(cases, -(-len(cases) // 10))


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [[0, 1], [2, 3]]], ids=["(4,)", "(2, 2)"])
def test_a_tenth_of_all_pairs(processes: Pools, ranks: Ranks) -> None:
    cases = sampled(torch.tensor(ranks).ndim, seed=20)
    check(ranks, cases, processes(4).run(move, ranks, cases))


THREE_AXES = [[[[0, 1], [2, 3]]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]


@pytest.mark.parametrize("ranks", THREE_AXES, ids=["(1, 2, 2)", "(2, 2, 2)"])
def test_a_tenth_of_all_pairs_on_three_axes(processes: Pools, ranks: Ranks) -> None:
    cases = sampled(3, seed=21)
    world = torch.tensor(ranks).numel()
    check(ranks, cases, processes(world).run(move, ranks, cases, timeout=240))


@pytest.mark.parametrize("ranks", [[3, 1, 0, 2], [[2, 0], [3, 1]]], ids=str)
def test_ranks_in_any_order(processes: Pools, ranks: Ranks) -> None:
    every = layouts_of(torch.tensor(ranks).ndim, [R, S0, S1, P])
    cases: list[Case] = [
        ((7, 5), torch.float32, (src, None), (dst, None)) for src in every for dst in every
    ]
    check(ranks, cases, processes(4).run(move, ranks, cases))


@pytest.mark.parametrize("ranks", [[1, 3], [[0, 3]], [2]], ids=str)
def test_a_mesh_that_leaves_out_ranks(processes: Pools, ranks: Ranks) -> None:
    every = layouts_of(torch.tensor(ranks).ndim, [R, S0, S1, P])
    cases: list[Case] = [
        ((3, 2), torch.float32, (src, None), (dst, None)) for src in every for dst in every
    ]
    got = processes(4).run(move, ranks, cases)
    check(ranks, cases, got)
    inside = torch.tensor(ranks).flatten().tolist()
    for rank, results in enumerate(got):
        assert rank in inside or results == [[]] * len(cases)


def test_a_mesh_of_three_of_four_ranks_flattens_two_axes(processes: Pools) -> None:
    ranks = [[0], [3], [1]]
    every = layouts_of(2, [R, S0, P])
    cases: list[Case] = [
        ((5, 2), torch.float32, (src, None), (dst, None)) for src in every for dst in every
    ]
    check(ranks, cases, processes(4).run(move, ranks, cases))


def test_two_axes_that_no_process_group_spans(processes: Pools) -> None:
    ranks = [[4, 1], [0, 3]]  # of 5 ranks: neither the world nor an axis is all of the mesh
    every = layouts_of(2, [R, S0, S1, P])
    cases: list[Case] = [
        ((7, 5), torch.float32, (src, None), (dst, None)) for src in every for dst in every
    ]
    check(ranks, cases, processes(5).run(move, ranks, cases))


def test_ragged_cuts_and_empty_shards(processes: Pools) -> None:
    ranks = [[0, 1], [2, 3]]
    layouts: list[Side] = [
        ((S0, R), [(1, 6), None]),
        ((S0, S0), [(0, 3, 4, 0), None]),
        ((S0, S1), [(5, 2), (0, 5)]),
        ((S1, S0), [(0, 7), (4, 1)]),
        ((P, S1), [None, (1, 4)]),
        ((S1, Partial("max")), [None, (5, 0)]),
        plain(R, R),
        plain(P, P),
        plain(S0, S1),
    ]
    cases: list[Case] = [((7, 5), torch.float32, a, b) for a in layouts for b in layouts]
    check(ranks, cases, processes(4).run(move, ranks, cases))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float64,
        torch.complex64,
    ],
    ids=str,
)
def test_every_dtype_moves(processes: Pools, dtype: torch.dtype) -> None:
    ranks = [0, 1, 2, 3]
    ops = ["sum", "product"] if dtype.is_complex else ["sum", "max", "min", "product"]
    moved = [plain(R), plain(S0), plain(S1)]
    pending = [plain(Partial(op)) for op in ops]
    cases: list[Case] = [((5, 3), dtype, a, b) for a in moved for b in moved + pending]
    check(ranks, cases, processes(4).run(move, ranks, cases))


def reduce_equal(dtype: torch.dtype, op: str, value: float, to: Placement) -> list[float]:
    mesh = make_mesh([0, 1, 2, 3])
    src = spec_of(mesh, [Partial(op)], (4,), dtype)
    local = torch.full((4,), value).to(dtype)
    (got,) = redistribute_locals(src, src.with_placements([to]), (local,))
    assert got.dtype is dtype and got.data_ptr() != local.data_ptr()
    return [complex(v).real for v in got.to(torch.complex64).tolist()]


@pytest.mark.parametrize(
    ("dtype", "op", "value", "want"),
    [
        (torch.float8_e4m3fn, "sum", 3, 12),
        (torch.float8_e4m3fn, "max", -3, -3),
        (torch.bfloat16, "sum", 3, 12),
        (torch.bfloat16, "min", -3, -3),
        (torch.int16, "sum", 3, 12),
        (torch.int16, "product", 3, 81),
        (torch.uint16, "sum", 3, 12),
        (torch.int8, "avg", 100, 100),
        (torch.bool, "sum", 1, 1),
        (torch.bool, "product", 1, 1),
        (torch.complex64, "sum", 3, 12),
        (torch.complex64, "product", 3, 81),
        (torch.float32, "avg", 3, 3),
    ],
    ids=str,
)
def test_every_dtype_reduces(
    processes: Pools, dtype: torch.dtype, op: str, value: float, want: float
) -> None:
    assert processes(4).run(reduce_equal, dtype, op, value, R) == [[want] * 4] * 4
    assert processes(4).run(reduce_equal, dtype, op, value, S0) == [[want]] * 4


def reduce_special(op: str, dtype: torch.dtype) -> list[torch.Tensor]:
    mesh = make_mesh([0, 1])
    inf, nan = float("inf"), float("nan")
    rows = [[nan, 1.0, -inf, inf, -2.0], [1.0, nan, -inf, 0.0, -3.0]]
    src = spec_of(mesh, [Partial(op)], (5,), dtype)
    here = torch.tensor(rows[dist.get_rank()], dtype=dtype)
    return [redistribute_locals(src, src.with_placements([p]), (here,))[0] for p in (R, S0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_nan_survives_max_and_min(processes: Pools, dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    wanted = {"max": [nan, nan, -inf, inf, -2.0], "min": [nan, nan, -inf, 0.0, -3.0]}
    for op, values in wanted.items():
        want = torch.tensor(values, dtype=dtype)
        got = processes(2).run(reduce_special, op, dtype)
        for whole, _ in got:
            torch.testing.assert_close(whole, want, equal_nan=True, rtol=0, atol=0)
        shards = torch.cat([shard for _, shard in got])
        torch.testing.assert_close(shards, want, equal_nan=True, rtol=0, atol=0)


def gather_conjugate() -> bool:
    mesh = make_mesh([0, 1])
    full = torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj()
    spec = spec_of(mesh, [S0], (4,), torch.complex64)
    here = full.chunk(2)[dist.get_rank()]
    (got,) = redistribute_locals(spec, spec.with_placements([R]), (here,))
    return torch.equal(got, full.resolve_conj())


def test_lazy_conjugates_move_as_what_they_are(processes: Pools) -> None:
    assert processes(2).run(gather_conjugate) == [True, True]


# --- meshes that users make ---------------------------------------------------------------------

CASES: list[Case] = [
    ((7, 5), torch.float32, plain(a), plain(b)) for a in (R, S0, S1, P) for b in (R, S0, S1, P)
]


def move_on_torch_mesh() -> list[list[torch.Tensor]]:
    mesh = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert topology(mesh) is topology(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    cases: list[Case] = [
        ((7, 5), torch.float32, plain(a, S0), plain(S1, b)) for a in (R, P) for b in (R, P)
    ]
    return [move_one(mesh, case) for case in cases]


def test_a_mesh_made_with_torch(processes: Pools) -> None:
    cases: list[Case] = [
        ((7, 5), torch.float32, plain(a, S0), plain(S1, b)) for a in (R, P) for b in (R, P)
    ]
    check([[0, 1], [2, 3]], cases, processes(4).run(move_on_torch_mesh))


def move_on_submesh(name: str) -> tuple[list[int], list[list[torch.Tensor]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part = mesh[name]
    assert topology(part) is topology(mesh[name])
    return part.mesh.tolist(), [move_one(part, case) for case in CASES]


@pytest.mark.parametrize(("name", "groups"), [("tp", [[0, 1], [2, 3]]), ("dp", [[0, 2], [1, 3]])])
def test_submeshes_by_name(processes: Pools, name: str, groups: list[list[int]]) -> None:
    got = processes(4).run(move_on_submesh, name)
    for ranks in groups:
        assert all(got[rank][0] == ranks for rank in ranks)
        check(ranks, CASES, [results for _, results in got])


def refused_between_parts() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes = [mesh, mesh["dp"], mesh["tp"]]
    found = []
    for source, target in permutations(meshes, 2):
        x = distribute_tensor(torch.arange(8.0), source, {})
        try:
            x.redistribute(target, {})
        except MeshError as error:
            found.append(str(error))
    return found


def test_parts_of_a_mesh_do_not_mix(processes: Pools) -> None:
    for found in processes(4).run(refused_between_parts):
        assert len(found) == 6
        assert all("other such parts" in text for text in found)


def digests_agree(same: bool) -> bool:
    where = topology(init_device_mesh("cpu", (2, 2)))
    return all_equal(where, 7 if same else 7 + dist.get_rank())


def test_check_equal_finds_a_rank_that_differs(processes: Pools) -> None:
    assert processes(4).run(digests_agree, True) == [True] * 4
    assert processes(4).run(digests_agree, False) == [False] * 4


# --- the harness itself -------------------------------------------------------------------------


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("as it should")


def test_an_error_on_one_rank_is_reported_with_its_rank(processes: Pools) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1:.*ValueError: as it should"):
        processes(2).run(fail_on, 1)
    assert processes(2).run(fail_on, 7) == [None, None]


def wait_for_ever() -> None:
    if dist.get_rank() == 0:
        torch.futures.Future[None]().wait()


def test_a_run_that_hangs_is_ended() -> None:
    pool = ProcessPool(2)
    assert pool.run(fail_on, 7) == [None, None]  # the first run imports this file, which takes time
    with pytest.raises(RankError, match=r"ranks \[0\] did not answer within 5 s"):
        pool.run(wait_for_ever, timeout=5)
    assert pool.run(fail_on, 7) == [None, None]
    pool.stop()


def transposed() -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).view(7, 5).t()
    x = distribute_tensor(whole, mesh, [Shard(0)])
    y = distribute_tensor(whole.t(), mesh, [Shard(0)]).t()
    mixed = distribute_tensor(whole.to(torch.int16), mesh, [Shard(1)])
    return [
        x.full_tensor().equal(whole),
        y.full_tensor().equal(whole),
        y.redistribute(placements=[Shard(0)]).full_tensor().equal(whole),
        x.redistribute(placements=[Shard(1)]).full_tensor().equal(whole),
        mixed.redistribute(placements=[Shard(0)]).full_tensor().equal(whole.to(torch.int16)),
    ]


def test_dims_in_another_order_in_memory(processes: Pools) -> None:
    """A rank that packs and one that receives in place agree on the order of the elements."""
    for found in processes(2).run(transposed):
        assert all(found), found
