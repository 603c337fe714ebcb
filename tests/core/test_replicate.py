"""`replicate`: the gradients of one device, few collectives, accumulation, uneven batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import CommDebugMode, Replicate, Shard, distribute_tensor, replicate
from shardwise.errors import LayoutError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..compare import virtual
from .test_fully_shard import Gated, check_training, gpt


@pytest.mark.parametrize("count", [1, 3, 4])
def test_training_is_that_of_one_device(count: int) -> None:
    mesh, model = virtual(count, names=("dp",)), gpt()
    made = replicate(copy.deepcopy(model), mesh)
    assert made.embed.weight is made.head.weight
    check_training(model, made, mesh)  # the last batch has 7 rows


def test_one_collective_for_all_gradients_and_none_while_they_accumulate() -> None:
    mesh = virtual(4, names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
    made: Any = replicate(copy.deepcopy(model).eval(), mesh)
    model.eval()
    for step, rows in enumerate([8, 5, 3]):
        x = torch.randn(rows, 3).double()
        model(x).square().mean().backward()
        made.set_requires_gradient_sync(step == 2)
        loss = made(distribute_tensor(x, mesh, [Shard(0)])).square().mean()
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_comm_counts() == ({"all_reduce": 1} if step == 2 else {})
    for own, parameter in zip(made.parameters(), model.parameters(), strict=True):
        assert own.grad.placements == (Replicate(),)
        torch.testing.assert_close(own.grad.full_tensor(), parameter.grad)


def test_beside_tensor_parallelism() -> None:
    mesh = virtual(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    model = Gated()
    made: Any = copy.deepcopy(model)
    down = RowwiseParallel(use_local_output=False)
    parallelize_module(made, mesh["tp"], {"up": ColwiseParallel(), "down": down})
    replicate(made, mesh["dp"])
    assert made.up.weight.placements == (Replicate(), Shard(0))
    assert made.norm.weight.placements == (Replicate(), Replicate())
    x = torch.randn(5, 4, 12)
    model(x).square().mean().backward()
    made(distribute_tensor(x, mesh, {"dp": Shard(0)})).square().mean().backward()
    for own, parameter in zip(made.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), parameter.grad)


def test_ignored_parameters_and_errors() -> None:
    mesh = virtual(2, names=("dp",))
    layer = nn.Linear(4, 6)
    replicate(layer, mesh, ignored_params=[layer.bias])
    assert type(layer.bias) is nn.Parameter and type(layer.weight) is sw.DTensor
    with pytest.raises(LayoutError, match="a module is needed, but got int"):
        replicate(3, mesh)  # type: ignore[type-var]
    with pytest.raises(LayoutError, match=r"already\. Call it once"):
        replicate(layer, mesh)
    placed = sw.shard_module(nn.Linear(2, 2), mesh, {"*": {"dp": Shard(0)}})
    with pytest.raises(LayoutError, match="must replicate it"):
        replicate(placed, mesh)
    for wrong in (torch.relu, layer.weight, nn.Sequential(layer), ["weight"]):
        with pytest.raises(LayoutError, match="ignored_params: a list of parameters is needed"):
            replicate(nn.Linear(2, 2), mesh, ignored_params=wrong)


def test_buffers_are_replicated() -> None:
    mesh = virtual(2, names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    made = replicate(copy.deepcopy(model), mesh)
    x = torch.randn(7, 3)
    F.relu(model(x)).sum().backward()
    F.relu(made(distribute_tensor(x, mesh, [Shard(0)]))).sum().backward()
    for own, buffer in zip(made.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(own.full_tensor(), buffer)  # type: ignore[operator]
