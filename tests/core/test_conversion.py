"""Ways in and out of DTensors with the options that PyTorch's own takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    per_rank,
)
from shardwise.errors import LayoutError, MeshError

from ..compare import spread, virtual

PLACES = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}


def mesh_of(*shape: int) -> Any:
    return sw.init_device_mesh("cpu", shape)


# --- dtypes of a move -----------------------------------------------------------------------------


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (torch.bfloat16, None),
        (None, torch.float64),
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_a_move_in_other_dtypes(
    source: str, target: str, forward: torch.dtype | None, backward: torch.dtype | None
) -> None:
    """The result has the forward dtype, the gradient that of the tensor, with the values that
    casts around the move give."""
    torch.manual_seed(0)
    whole = torch.randn(5, 3) * 3
    leaf = sw.distribute_tensor(whole, mesh_of(2), [PLACES[source]]).requires_grad_()
    made = (leaf * 1).redistribute(
        placements=[PLACES[target]], forward_dtype=forward, backward_dtype=backward
    )
    assert made.placements == (PLACES[target],)
    assert made.dtype is (forward or torch.float32)
    expected = whole.to(forward or torch.float32)
    torch.testing.assert_close(made.full_tensor(), expected)
    weight = torch.randn(5, 3)
    (made * weight.to(made.dtype)).sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype is torch.float32
    grad = weight.to(made.dtype).to(backward or torch.float32).float()
    torch.testing.assert_close(leaf.grad.full_tensor(), grad)


def test_a_move_in_fewer_bits_moves_fewer_bytes() -> None:
    x = sw.distribute_tensor(torch.ones(8, 8), mesh_of(2), [Shard(0)]).requires_grad_()
    received = []
    for options in ({}, {"forward_dtype": torch.bfloat16, "backward_dtype": torch.bfloat16}):
        with CommDebugMode() as comm:
            x.redistribute(placements=[Shard(1)], **options).sum().backward()
        received.append(sum(comm.bytes.values()))
    assert received[1] == received[0] / 2 > 0


def test_gradient_of_a_gradient_through_a_move_in_other_dtypes() -> None:
    whole = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    x = sw.distribute_tensor(whole, mesh_of(2), [Shard(0)]).requires_grad_()
    made = x.redistribute(placements=[Shard(1)], forward_dtype=torch.float64)
    (grad,) = torch.autograd.grad((made**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(grad.detach().full_tensor(), 3 * whole**2)
    torch.testing.assert_close(second.full_tensor(), 6 * whole)


def test_writes_into_a_tensor_that_only_its_gradient_recasts() -> None:
    """Same layout, same dtype: a view of the tensor, as `redistribute` gives it."""
    x = sw.distribute_tensor(torch.ones(4), mesh_of(2), [Shard(0)])
    made = x.redistribute(placements=[Shard(0)], backward_dtype=torch.float64)
    made.mul_(3)
    assert torch.equal(x.full_tensor(), torch.full((4,), 3.0))


# --- from_local -----------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [("S0", "P"), ("R", "S0"), ("P", "R"), ("S0", "S1")])
def test_gradients_of_local_tensors_in_given_placements(places: tuple[str, str]) -> None:
    mesh = mesh_of(2, 2)
    own = [PLACES[name] for name in places]
    parts = per_rank(mesh, lambda coord: torch.full((2, 3), 1.0 + coord[0] + 2 * coord[1]))
    leaves = [part.requires_grad_() for part in parts.parts]
    x = DTensor.from_local(parts, mesh, own, grad_placements=own, run_check=False)
    weight = torch.randn(x.shape)
    (x * weight).sum().backward()
    grads = per_rank(mesh, lambda coord: leaves[2 * coord[0] + coord[1]].grad)
    if "R" in places:  # one local tensor stands for all
        assert sum(leaf.grad is not None for leaf in leaves) == 2
        found = [leaf.grad for leaf in leaves if leaf.grad is not None]
        axis = places.index("R")
        grads = per_rank(mesh, lambda coord: found[coord[1 - axis]])
    total = DTensor.from_local(grads, mesh, own, shape=x.shape, stride=x.stride())
    torch.testing.assert_close(total.full_tensor(), weight)


def test_gradients_that_a_virtual_mesh_cannot_keep() -> None:
    with pytest.raises(LayoutError, match="virtual mesh keeps one local tensor"):
        DTensor.from_local(torch.ones(2), mesh_of(2), [Replicate()], grad_placements=[Partial()])
    with pytest.raises(LayoutError, match="shape of its local tensor"):
        DTensor.from_local(torch.ones(2), mesh_of(2), [Shard(0)], grad_placements=[Replicate()])


def test_parts_that_make_up_no_tensor() -> None:
    mesh = mesh_of(3)
    for make, words in (
        (lambda c: torch.ones(2, dtype=[torch.int32, torch.int64][c[0] > 1]), "different dtypes"),
        (lambda c: torch.ones([2] * (1 + (c[0] == 2))), "different numbers of dims"),
        (lambda c: torch.ones(2, 3) if c[0] else torch.ones(3, 2).t(), "different orders of dims"),
    ):
        with pytest.raises(LayoutError, match=words):
            DTensor.from_local(per_rank(mesh, make), mesh, [Shard(0)])


def test_parts_of_one_row_lie_in_any_order() -> None:
    """The strides of the whole are those of the parts that tell an order."""
    mesh = mesh_of(3)
    whole = (torch.arange(20.0).view(4, 5) - 6).t()
    pieces = whole.split([1, 4, 0])
    local = per_rank(mesh, lambda coord: pieces[coord[0]].clone())
    x = DTensor.from_local(local, mesh, [Shard(0)])
    assert x.stride() == (1, 5)
    assert torch.equal(x.full_tensor(), whole)
    assert torch.equal(x.t().reshape(-1).full_tensor(), whole.t().reshape(-1))


def test_expanded_parts() -> None:
    x = DTensor.from_local(torch.arange(3.0).expand(2, 3), mesh_of(2), [Shard(0)])
    assert x.stride() == (3, 1)
    assert torch.equal((x + 1).full_tensor(), torch.arange(1.0, 4).expand(4, 3))


# --- a mesh as a context --------------------------------------------------------------------------


def test_a_virtual_mesh_is_a_context() -> None:
    outer, inner = mesh_of(2), mesh_of(3)
    plain = torch.arange(6.0)
    with outer as entered:
        assert entered is outer
        x = sw.distribute_tensor(plain, placements=[Shard(0)])
        with inner:
            y = sw.zeros(6, placements=[Shard(0)])
            z = sw.randperm(5)
        w = DTensor.from_local(torch.ones(2), placements=[Shard(0)])
    assert [each.device_mesh for each in (x, y, z, w)] == [outer, inner, inner, outer]
    assert torch.equal(x.full_tensor(), plain)
    with pytest.raises(MeshError, match="a device mesh is needed"):
        sw.zeros(3)
    with pytest.raises(KeyError), outer:
        raise KeyError
    with pytest.raises(MeshError, match="a device mesh is needed"):
        sw.distribute_tensor(plain)
    assert copy.deepcopy(outer) == outer


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", [False, True])
def test_is_same_size_looks_at_no_value(inference: bool) -> None:
    x = sw.distribute_tensor(torch.ones(4, 2), mesh_of(2), [Shard(0)])
    with torch.inference_mode(inference), sw.plain_tensors("error"):
        assert torch.is_same_size(x, torch.zeros(4, 2))
        assert torch.is_same_size(torch.zeros(4, 2, device="meta"), x)
        assert not torch.is_same_size(x, torch.zeros(2, 4))


def test_local_tensors_can_be_differentiated_twice() -> None:
    w = spread(torch.full((2,), 2.0), virtual(2), [Shard(0)]).requires_grad_()
    y = DTensor.from_local(w.to_local() ** 3, virtual(2), [Shard(0)]).sum()
    (grad,) = torch.autograd.grad(y, w, create_graph=True)
    (grad.sum() + w.sum()).backward()
    assert w.grad.full_tensor().tolist() == [13.0, 13.0]


def test_the_whole_tensor_can_be_differentiated_twice() -> None:
    w = spread(torch.full((2,), 2.0), virtual(2), [Shard(0)]).requires_grad_()
    (grad,) = torch.autograd.grad((w.full_tensor() ** 3).sum(), w, create_graph=True)
    grad.sum().backward()
    assert w.grad.full_tensor().tolist() == [12.0, 12.0]


def test_the_gradient_of_ragged_local_tensors_is_cut_as_they_are() -> None:
    x = distribute_tensor(torch.arange(6.0), virtual(2), [Shard(0)], cuts=[(1, 5)]).requires_grad_()
    local = x.to_local(grad_placements=[Shard(0)])
    DTensor.from_local(local**2, virtual(2), [Shard(0)], run_check=True).sum().backward()
    assert x.grad.full_tensor().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


@pytest.mark.parametrize("place", [Replicate(), Partial(), Shard(1)])
def test_the_gradient_of_a_shard_is_a_shard(place: Placement) -> None:
    x = spread(torch.ones(4, 4), virtual(2), [Shard(0)]).requires_grad_()
    with pytest.raises(LayoutError, match="a gradient has the shape of its local tensor"):
        x.to_local(grad_placements=[place])
