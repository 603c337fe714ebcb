"""Gradients of leaves: in the leaf's layout, whatever a backward before has left pending."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise import Placement, Replicate, Shard


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("kept", [1, 2])
def test_a_backward_after_partial_gradients(place: Placement, kept: int) -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    weight, batch = torch.randn(5, 4, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    plain = weight.clone().requires_grad_()
    leaf = sw.distribute_tensor(weight, mesh, [place]).requires_grad_()
    rows = sw.distribute_tensor(batch, mesh, [Shard(0)])
    with sw.keep_partial_grads():
        for _ in range(kept):
            (rows @ leaf).square().sum().backward()
            (batch @ plain).square().sum().backward()
    assert leaf.grad is not None and leaf.grad.placements[0].is_partial()
    (rows @ leaf).sin().sum().backward()
    (batch @ plain).sin().sum().backward()
    assert leaf.grad.placements == (place,)
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)
    (rows @ leaf).cos().sum().backward()
    (batch @ plain).cos().sum().backward()
    assert leaf.grad.placements == (place,)
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)


def test_gradients_that_are_asked_for_leave_the_leaf_alone() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    leaf = sw.distribute_tensor(torch.ones(4, 2), mesh, [Replicate()]).requires_grad_()
    rows = sw.distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [Shard(0)])
    with sw.keep_partial_grads():
        (rows @ leaf).sum().backward()
    (asked,) = torch.autograd.grad((rows @ leaf).square().sum(), leaf)
    assert asked.placements == (Replicate(),)
    assert leaf.grad is not None and leaf.grad.placements[0].is_partial()
