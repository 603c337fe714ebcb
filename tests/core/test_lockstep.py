"""`lockstep` in one process: every rank is this one, so there is nothing to compare."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard


def test_a_virtual_mesh_has_nothing_to_compare() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), lockstep=True)
    full = torch.arange(12.0).view(4, 3)
    x = sw.distribute_tensor(full, mesh, [Shard(0), Replicate()]).requires_grad_()
    with sw.lockstep(), sw.lockstep():
        (x.softmax(0) * x).sum().backward()
        assert x.sum().item() == full.sum()
    plain = full.clone().requires_grad_()
    (plain.softmax(0) * plain).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def test_an_error_inside_is_the_programs_own() -> None:
    with pytest.raises(ValueError, match="on purpose"), sw.lockstep():
        raise ValueError("on purpose")
