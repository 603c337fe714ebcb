"""Redistribution: every pair of layouts is exact, and moves what it must and no more."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.comm.events import Communication, listeners
from shardwise.errors import LayoutError
from shardwise.layout.make_mesh import init_device_mesh
from shardwise.layout.mesh import Link
from shardwise.layout.placement import Partial, Placement, Replicate, Shard
from shardwise.layout.spec import DTensorSpec
from shardwise.redistribute.execute import redistribute_locals
from shardwise.redistribute.prepare import steps_between

from ..layouts import (
    assert_holds,
    by_coord,
    equal,
    layouts_of,
    scatter,
    spec_of,
    stored,
    whole_numbers,
)
from ..tier import quicker, some

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
MESHES = [(4,), (2, 2), (2, 2, 2)]
SIZES = [(8, 8), (7, 5), (3, 2), (1, 1), (0, 4)]


def assert_moves(src: DTensorSpec, dst: DTensorSpec, full: torch.Tensor, seed: int = 0) -> None:
    before = stored(src, scatter(src, full, seed))
    kept = [part.clone() for part in before]
    after = redistribute_locals(src, dst, tuple(before), fresh=True)
    assert_holds(dst, by_coord(dst, after), full, f"from {src}")
    assert all(map(equal, before, kept)), f"from {src} to {dst}: the source was changed"


PAIRS = [
    pytest.param(
        mesh, size, marks=pytest.mark.thorough if len(mesh) == 3 and size != (7, 5) else ()
    )
    for mesh in MESHES
    for size in SIZES
]


@pytest.mark.parametrize(("mesh_shape", "size"), PAIRS, ids=str)
def test_every_pair_is_exact(mesh_shape: tuple[int, ...], size: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    full = whole_numbers(size)
    specs = [spec_of(mesh, each, size) for each in layouts_of(len(mesh_shape), [R, S0, S1, P])]
    for src in some(specs, 0.4, (mesh_shape, size)):
        before = stored(src, scatter(src, full))
        for dst in specs:
            after = redistribute_locals(src, dst, tuple(before))
            assert_holds(dst, by_coord(dst, after), full, src)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("size", [(7, 5), (1, 3)], ids=str)
def test_every_reduce_op(op: str, size: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = whole_numbers(size)
    specs = [spec_of(mesh, each, size) for each in layouts_of(2, [R, S0, S1, Partial(op)])]
    for src in some(specs, 0.4, (op, size)):
        for dst in specs:
            assert_moves(src, dst, full)


def test_pending_kinds_that_do_not_commute_reduce_the_last_axis_first() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    spec = spec_of(mesh, [Partial("sum"), Partial("max")], (1,))
    local = [torch.tensor([float(v)]) for v in (1, 5, 7, 2)]
    (got,) = redistribute_locals(spec, spec.with_placements([R, R]), tuple(local))
    assert got.item() == max(1, 5) + max(7, 2)
    swapped = spec_of(mesh, [Partial("max"), Partial("sum")], (1,))
    (got,) = redistribute_locals(swapped, swapped.with_placements([R, R]), tuple(local))
    assert got.item() == max(1 + 5, 7 + 2)


def test_every_pair_of_mixed_pending_kinds() -> None:
    mesh = init_device_mesh("cpu", (2, 3))
    kinds: list[Placement] = [R, S0, *map(Partial, ("sum", "avg", "max", "min", "product"))]
    full = whole_numbers((5,), dtype=torch.float64)
    specs = [spec_of(mesh, each, (5,), torch.float64) for each in layouts_of(2, kinds)]
    for src in some(specs, 0.4, "mixed"):
        for dst in specs:
            assert_moves(src, dst, full)


def test_ragged_cuts() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    size = (7, 5)
    full = whole_numbers(size)
    specs = [
        spec_of(mesh, [S0, R], size, cuts=[(1, 6), None]),
        spec_of(mesh, [S0, R], size, cuts=[(7, 0), None]),
        spec_of(mesh, [S0, S0], size, cuts=[(0, 3, 4, 0), None]),
        spec_of(mesh, [S0, S1], size, cuts=[(5, 2), (0, 5)]),
        spec_of(mesh, [S1, S0], size, cuts=[(0, 7), (4, 1)]),
        spec_of(mesh, [P, S1], size, cuts=[None, (1, 4)]),
        spec_of(mesh, [S1, Partial("max")], size, cuts=[None, (5, 0)]),
        *(spec_of(mesh, each, size) for each in layouts_of(2, [R, S0, S1, P])),
    ]
    for src in specs:
        for dst in specs:
            assert_moves(src, dst, full)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
    ],
    ids=str,
)
def test_every_dtype(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (3,))
    full = whole_numbers((5, 4), dtype=dtype)
    ops = ["sum"] if dtype.is_complex else ["sum", "max", "min"]
    specs = [spec_of(mesh, [p], (5, 4), dtype) for p in (R, S0, S1, *map(Partial, ops))]
    for src in specs:
        given = [full] * 3 if any(p.is_partial() for p in src.placements) else None
        for dst in specs:
            if given is None:
                assert_moves(src, dst, full)
        if given is not None:  # equal values on all ranks: the sum is three times, max and min one
            (got,) = redistribute_locals(src, specs[0], tuple(given))
            times = 3 if src.placements[0].is_partial("sum") else 1
            want = full if dtype is torch.bool else (full.to(torch.complex64) * times).real
            if dtype.is_complex:
                want = full * times
            assert equal(got, want.to(dtype)), src


def test_nan_and_infinities_survive() -> None:
    mesh = init_device_mesh("cpu", (2,))
    inf, nan = float("inf"), float("nan")
    local = [torch.tensor([nan, 1.0, -inf, inf]), torch.tensor([1.0, nan, -inf, 0.0])]
    for op, want in (("max", [nan, nan, -inf, inf]), ("min", [nan, nan, -inf, 0.0])):
        spec = spec_of(mesh, [Partial(op)], (4,))
        (got,) = redistribute_locals(spec, spec.with_placements([R]), tuple(local))
        torch.testing.assert_close(got, torch.tensor(want), equal_nan=True)


def test_average_of_small_integers_does_not_overflow() -> None:
    mesh = init_device_mesh("cpu", (4,))
    spec = spec_of(mesh, [Partial("avg")], (1,), torch.int8)
    local = [torch.tensor([100], dtype=torch.int8)] * 4
    (got,) = redistribute_locals(spec, spec.with_placements([R]), tuple(local))
    assert got.dtype is torch.int8 and got.item() == 100


LINKS: list[dict[str, Any]] = [{}, {"links": [Link(1e-5, 1e9), Link(1e-6, 1e11), Link(1e-5, 1e10)]}]


def test_average_of_small_integers_among_sums_does_not_overflow() -> None:
    mesh = init_device_mesh("cpu", (4, 2))
    spec = spec_of(mesh, [Partial("avg"), P], (4,), torch.int8)
    local = [torch.full((4,), 60 - 50 * (rank % 2), dtype=torch.int8) for rank in range(8)]
    for target in ([R, R], [S0, R], [R, S0], [S0, S0]):
        dst = spec.with_placements(target)
        after = redistribute_locals(spec, dst, tuple(local))
        assert_holds(dst, by_coord(dst, after), torch.full((4,), 70, dtype=torch.int8), "")


def test_what_cannot_be_pending_is_said_before_anything_moves() -> None:
    mesh = init_device_mesh("cpu", (2,))
    spec = spec_of(mesh, [Partial("max")], (2,), torch.complex64)
    with pytest.raises(LayoutError, match="complex numbers have no order"):
        steps_between(spec, spec.with_placements([R]))
    spec = spec_of(mesh, [R], (2,), torch.bool)
    with pytest.raises(LayoutError, match="Use Partial\\('max'\\) for any"):
        steps_between(spec, spec.with_placements([Partial("avg")]))


# --- what moves ---------------------------------------------------------------------------------


def heard(src: DTensorSpec, dst: DTensorSpec) -> list[tuple[str, tuple[int, ...], int]]:
    """The collectives that ran."""
    calls: list[tuple[str, tuple[int, ...], int]] = []

    def listener(event: Communication) -> None:
        calls.append((event.kind, event.axes, event.nbytes))

    before = stored(src, scatter(src, whole_numbers(src.shape)))
    listeners.append(listener)
    try:
        redistribute_locals(src, dst, tuple(before))
    finally:
        listeners.remove(listener)
    return calls


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (3, 2)], ids=str)
def test_one_axis_uses_the_native_collective(size: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", (4,))

    def kinds(src: Placement, dst: Placement) -> list[str]:
        return [k for k, _, _ in heard(spec_of(mesh, [src], size), spec_of(mesh, [dst], size))]

    assert kinds(S0, S1) == kinds(S1, S0) == ["exchange"]
    assert kinds(P, S0) == kinds(P, S1) == ["reduce_scatter"]
    assert kinds(P, R) == ["all_reduce"]
    assert kinds(S0, R) == kinds(S1, R) == ["all_gather"]
    assert kinds(S0, P) == kinds(S1, P) == ["all_gather"]
    for nothing in (kinds(R, S0), kinds(R, S1), kinds(R, P)):
        assert nothing == []


def test_bytes_are_the_least_that_the_layouts_require() -> None:
    mesh = init_device_mesh("cpu", (4,))
    size, item = (8, 8), 4

    def nbytes(src: Placement, dst: Placement) -> int:
        calls = heard(spec_of(mesh, [src], size), spec_of(mesh, [dst], size))
        return sum(n for _, _, n in calls)

    assert nbytes(S0, S1) == 12 * item  # a quarter of the shard of 16 stays
    assert nbytes(S0, R) == 48 * item
    assert nbytes(P, S0) == 3 * 16 * item
    assert nbytes(P, R) == 2 * 3 * 16 * item


@pytest.mark.parametrize("other", [R, S0, S1, P], ids=repr)
@pytest.mark.parametrize("axis", [0, 1])
def test_one_axis_of_two_never_gathers(axis: int, other: Placement) -> None:
    mesh = init_device_mesh("cpu", (2, 2))

    def layout(place: Placement) -> DTensorSpec:
        return spec_of(mesh, [place, other] if axis == 0 else [other, place], (8, 8))

    for src, dst in ((S0, S1), (S1, S0), (P, S0), (P, S1)):
        kinds = {kind for kind, _, _ in heard(layout(src), layout(dst))}
        assert not kinds & {"all_gather", "all_reduce"}, (src, dst, kinds)
        wanted = {"reduce_scatter", "reduce_exchange"} if src is P else {"exchange"}
        assert kinds & wanted, (src, dst, kinds)


@pytest.mark.parametrize("size", [(7, 5), (3, 2)], ids=str)
def test_no_step_loses_data(size: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    specs = [spec_of(mesh, each, size) for each in layouts_of(2, [R, S0, S1, P])]
    for src in specs:
        for dst in specs:
            for step in steps_between(src, dst):
                seen = torch.zeros(size, dtype=torch.bool)
                for coord in step.dst.topology.group_coords((0, 0), (0, 1)):
                    (a, b), (c, d) = step.dst.box(coord)
                    seen[a:b, c:d] = True
                assert seen.all(), (src, dst, step.kind)


def test_local_tensors_keep_the_order_of_dims() -> None:
    mesh = init_device_mesh("cpu", (2,))
    size, stride = (6, 4), (1, 6)
    full = whole_numbers(size).t().contiguous().t()
    specs = [spec_of(mesh, [p], size, stride=stride) for p in (R, S0, S1, P)]
    for src in specs:
        before = [part.t().contiguous().t() for part in stored(src, scatter(src, full))]
        for dst in specs:
            for part in redistribute_locals(src, dst, tuple(before)):
                assert part.stride(0) == 1, (src, dst, part.stride())


# --- anything ---------------------------------------------------------------------------------


@st.composite
def pieces(draw: Any, size: int, count: int) -> tuple[int, ...]:
    marks = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
    return tuple(b - a for a, b in zip([0, *marks], [*marks, size], strict=True))


@st.composite
def layouts(draw: Any, mesh: Any, size: tuple[int, ...]) -> DTensorSpec:
    kinds: list[Placement] = [R, *map(Partial, ("sum", "avg", "max", "min", "product"))]
    kinds += [Shard(dim) for dim in range(len(size))] * 3
    placements = [draw(st.sampled_from(kinds)) for _ in mesh.shape]
    cuts: list[tuple[int, ...] | None] = []
    for dim, length in enumerate(size):
        counts = [n for n, p in zip(mesh.shape, placements, strict=True) if p.is_shard(dim)]
        ragged = counts and draw(st.booleans())
        cuts.append(draw(pieces(length, prod(counts))) if ragged else None)
    return spec_of(mesh, placements, size, torch.float64, cuts=cuts)


@st.composite
def moves(draw: Any) -> tuple[DTensorSpec, DTensorSpec]:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    mesh = init_device_mesh("cpu", shape)
    size = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    return draw(layouts(mesh, size)), draw(layouts(mesh, size))


@settings(
    max_examples=quicker(400, 0.4), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(moves(), st.integers(0, 3))
def test_any_two_layouts(move: tuple[DTensorSpec, DTensorSpec], seed: int) -> None:
    src, dst = move
    assert_moves(src, dst, whole_numbers(src.shape, seed, torch.float64), seed)
