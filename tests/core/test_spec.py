"""A spec says which box of a tensor each rank holds."""

from __future__ import annotations

import gc
import pickle
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.layout.make_mesh import init_device_mesh
from shardwise.layout.mesh import topology
from shardwise.layout.placement import Partial, Replicate, Shard
from shardwise.layout.spec import DTensorSpec, TensorMeta, checked_placements

from ..layouts import all_coords, scatter, spec_of

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def test_equal_specs_are_one_object() -> None:
    a = spec_of(init_device_mesh("cpu", (2, 2)), [S0, R], (4, 6))
    b = spec_of(init_device_mesh("cpu", (2, 2)), (Shard(-2), Replicate()), [4, 6])
    assert a is b
    assert a is not spec_of(a.mesh, [S0, R], (4, 6), torch.float64)
    assert a is not spec_of(a.mesh, [S0, R], (4, 6), stride=(1, 4))
    assert pickle.loads(pickle.dumps(a)) is a


def test_cuts_that_are_torch_chunks_are_no_cuts() -> None:
    mesh = init_device_mesh("cpu", (2,))
    assert spec_of(mesh, [S0], (7,), cuts=[(4, 3)]) is spec_of(mesh, [S0], (7,))
    ragged = spec_of(mesh, [S0], (7,), cuts=[(3, 4)])
    assert ragged is not spec_of(mesh, [S0], (7,)) and ragged.cuts == ((3, 4),)
    assert spec_of(mesh, [R], (7,), cuts=[(3, 4)]) is spec_of(mesh, [R], (7,))
    assert pickle.loads(pickle.dumps(ragged)) is ragged


def test_specs_that_nobody_holds_are_let_go() -> None:
    mesh = init_device_mesh("cpu", (2,))
    spec_of(mesh, [S0], (123_457,))
    gc.collect()
    kept = [key for key in DTensorSpec._interned if key[2] and key[2].shape == (123_457,)]
    assert kept == []


def test_what_a_spec_says_of_the_tensor() -> None:
    spec = spec_of(init_device_mesh("cpu", (2, 3, 2)), [S1, P, R], (4, 6), torch.int64)
    assert (spec.shape, spec.ndim, spec.stride, spec.dtype) == ((4, 6), 2, (6, 1), torch.int64)
    assert isinstance(spec.shape, torch.Size)
    assert (spec.dim_map, spec.sums, spec.num_shards) == ([-1, 0], [1], 2)
    assert spec.is_sharded() and not spec.is_replicated()
    assert spec_of(spec.mesh, [R, R, R], (4, 6)).is_replicated()
    assert repr(spec) == "int64[4, 6] [S(1), P(sum), R] on (2x3x2)"


def test_a_spec_without_meta_says_so() -> None:
    spec = DTensorSpec(init_device_mesh("cpu", (2,)), [Shard(-1)])
    assert spec.placements == (Shard(-1),) and repr(spec) == "[S(-1)] on (2)"
    with pytest.raises(LayoutError, match="it has no tensor_meta"):
        _ = spec.shape


def test_dim_map_and_back() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2))
    meta = TensorMeta((4, 6), (6, 1), torch.float32)
    spec = DTensorSpec.from_dim_map(mesh, [2, -1], [0], tensor_meta=meta)
    assert spec.placements == (P, R, S0)
    assert DTensorSpec.from_dim_map(mesh, spec.dim_map, spec.sums, tensor_meta=meta) is spec
    with pytest.raises(LayoutError, match="axis 0 is used twice"):
        DTensorSpec.from_dim_map(mesh, [0, 0], [])
    with pytest.raises(LayoutError, match="axis 0 is used twice"):
        DTensorSpec.from_dim_map(mesh, [0, -1], [0])
    with pytest.raises(LayoutError, match="several axes shard dim 0"):
        _ = spec_of(mesh, [S0, S0, R], (4, 6)).dim_map


@pytest.mark.parametrize("placements", [[S0, R], [S0, S1], [S0, S0], [S1, S0], [R, P]], ids=str)
@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 3), (0, 4)], ids=str)
def test_boxes_are_what_chunking_gives(placements: list[Shard], size: tuple[int, int]) -> None:
    spec = spec_of(init_device_mesh("cpu", (2, 3)), placements, size)
    full = torch.arange(prod(size)).view(size)
    held = scatter(spec_of(spec.mesh, [R if p is P else p for p in placements], size), full)
    for coord in all_coords(spec):
        (a, b), (c, d) = spec.box(coord)
        assert torch.equal(full[a:b, c:d], held[coord])
        assert spec.local_shape(coord) == held[coord].shape


@given(st.data())
def test_ragged_boxes_tile_the_tensor(data: st.DataObject) -> None:
    mesh = init_device_mesh("cpu", (2, 3))
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=6, max_size=6))
    spec = spec_of(mesh, [S0, S0], (sum(sizes),), cuts=[sizes])
    seen = torch.zeros(sum(sizes), dtype=torch.int64)
    for coord in all_coords(spec):
        ((a, b),) = spec.box(coord)
        seen[a:b] += 1
    assert (seen == 1).all()


def test_slots_hold_each_distinct_shard_once() -> None:
    spec = spec_of(init_device_mesh("cpu", (2, 3)), [R, S0], (6,))
    assert spec.slots == ((0, 0), (0, 1), (0, 2))
    assert [spec.slot(c) for c in all_coords(spec)] == [0, 1, 2, 0, 1, 2]


def test_errors_say_what_was_given_and_what_would_do() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    where = topology(mesh)

    def text(placements: object, ndim: int | None = 2) -> str:
        with pytest.raises(LayoutError) as error:
            checked_placements("distribute_tensor", where, placements, ndim)
        return str(error.value)

    assert text([S0]) == (
        "distribute_tensor: 1 placements [S(0)] were given for the 2 axes of mesh (dp=2, tp=2). "
        "Give one per axis, such as [Shard(0), Replicate()]."
    )
    assert text(S0) == (
        "distribute_tensor: placements must be a list with one placement for each of the 2 axes of "
        "mesh (dp=2, tp=2), but got Shard(0). Write [Shard(0), Replicate()]."
    )
    assert text(["x", R]) == (
        "distribute_tensor: 'x' is not a placement. Use Replicate(), Shard(dim) or Partial(op)."
    )
    assert text([Shard(2), R]) == (
        "distribute_tensor: S(2) of a tensor of 2 dims, which has dims -2 to 1."
    )
    assert "no dim to shard: use Replicate()" in text([S0, R], 0)
    assert text(3) == "distribute_tensor: placements must be a sequence, but got 3."


@pytest.mark.parametrize("cuts", [(3, 3), (8, -1), (7,), (3, 2, 2)], ids=str)
def test_cuts_that_do_not_fit(cuts: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(LayoutError, match="Give 2 sizes >= 0 that add up to 7"):
        spec_of(mesh, [S0], (7,), cuts=[cuts])
    with pytest.raises(LayoutError, match="2 entries were given for 1 dims"):
        spec_of(mesh, [S0], (7,), cuts=[None, None])


def test_the_largest_shard_need_not_be_the_first() -> None:
    mesh = topology(init_device_mesh("cpu", (2, 2)))
    meta = TensorMeta((5, 6), (6, 1), torch.float32)
    uneven = DTensorSpec(mesh, [Shard(0), Shard(1)], meta, cuts=[(0, 5), (2, 4)])
    assert uneven.largest_shape == (5, 4)
    assert DTensorSpec(mesh, [Shard(0), Shard(0)], meta).largest_shape == (2, 6)
