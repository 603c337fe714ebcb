"""`fully_shard` on real processes: the losses and weights of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Shard, init_device_mesh
from shardwise.comm import native

from ..compare import ints
from ..core.test_fully_shard import (
    Gated,
    by_batch,
    gpt,
    recipe,
    regression,
    sharded,
    stack,
    steps,
)
from ..core.test_parallel_styles import VOCABULARY, Transformer, parallelize
from .harness import ProcessPool
from .peak import Peak

Pools = Callable[[int], ProcessPool]
PLAN: Any = {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}
MESHES = {
    "fsdp": ((4,), ("dp",)),
    "hybrid": ((2, 2), ("nodes", "dp")),
    "tensor": ((2, 2), ("dp", "tp")),
    "replicate": ((4,), ("dp",)),
}


def trained(kind: str, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", MESHES[kind][0], mesh_dim_names=MESHES[kind][1])
    model = gpt()
    if kind == "replicate":
        model = sw.replicate(model, mesh)
    elif kind == "tensor":
        model = sharded(sw.shard_module(model, mesh, PLAN), mesh["dp"])
    else:
        model = sharded(model, mesh)
    losses = steps(model, by_batch(mesh), count)
    whole: Any = {name: value.full_tensor() for name, value in model.named_parameters()}
    return losses, {name: value.detach() for name, value in whole.items()}


@pytest.mark.parametrize("kind", MESHES)
def test_training_is_that_of_one_device(kind: str, processes: Pools) -> None:
    model = gpt()
    expected = steps(model, lambda batch: batch, 30)
    for losses, weights in processes(4).run(trained, kind, 30):
        torch.testing.assert_close(losses, expected)
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach())


def trained_natively(kind: str, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """As `trained`, by the backend's own collectives, which gloo is not asked for."""
    prefers, native.prefers_own = native.prefers_own, lambda *of: True
    try:
        return trained(kind, count)
    finally:
        native.prefers_own = prefers


@pytest.mark.parametrize("kind", MESHES)
def test_training_by_the_collectives_of_a_backend(kind: str, processes: Pools) -> None:
    model = gpt()
    expected = steps(model, lambda batch: batch, 3)
    for losses, weights in processes(4).run(trained_natively, kind, 3):
        torch.testing.assert_close(losses, expected)
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach())


def gathers_overlap() -> bool:
    """While a block runs, the parameters of the next one are on their way."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = sharded(gpt(layers=3), mesh)
    seen = []

    def look(block: nn.Module, *_: Any) -> None:
        seen.append([each._unit._started is not None for each in model.blocks])  # type: ignore

    for block in model.blocks:
        block.up.register_forward_hook(look)
    batch = by_batch(mesh)(torch.zeros(4, 5, dtype=torch.long))
    model(batch)
    model(batch)
    return seen[3:] == [[False, True, False], [False, False, True], [False, False, False]]


def test_the_next_unit_is_gathered_meanwhile(processes: Pools) -> None:
    assert all(processes(2).run(gathers_overlap))


def after_styles(local: bool) -> tuple[list[float], list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = stack()
    if torch.distributed.get_rank() > 1:
        for parameter in model.parameters():
            parameter.data += 1  # all ranks take the values of the first
    losses = regression(recipe(model, mesh, local), by_batch(mesh))
    return losses, [each.full_tensor().detach() for each in model.parameters()]  # type: ignore


@pytest.mark.parametrize("local", [False, True])
def test_parallel_styles_then_fully_shard(local: bool, processes: Pools) -> None:
    model = stack()
    expected = regression(model, lambda x: x)
    for losses, weights in processes(4).run(after_styles, local):
        torch.testing.assert_close(losses, expected)
        for found, parameter in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.detach())


def rows_of_each_rank(inputs: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
    """PyTorch's tutorial: tensors between the styles are local, and a rank loads its own rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(Transformer(tied=False), mesh["tp"], sequence=True, local=True, rows=True)
    for block in model.layers:
        sw.fully_shard(block, mesh["dp"])
    sw.fully_shard(model, mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    outputs = []
    for batch in inputs:
        outputs.append(model(batch.chunk(2)[mesh["dp"].get_local_rank()]))
        outputs[-1].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights: Any = list(model.parameters())
    return [out.detach() for out in outputs], [each.full_tensor().detach() for each in weights]


def test_styles_of_local_tensors_then_fully_shard(processes: Pools) -> None:
    """The gradients are those of the sum over all rows."""
    model, inputs = Transformer(tied=False), ints(3, 6, 8, high=VOCABULARY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = []
    for batch in inputs:
        expected.append(model(batch))
        expected[-1].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, (outputs, weights) in enumerate(processes(4).run(rows_of_each_rank, inputs)):
        for found, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, wanted.detach().chunk(2)[rank // 2])
        for found, parameter in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.detach())


LAYERS, ROWS = 6, 4


class Wide(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(96)
        self.up, self.down = nn.Linear(96, 384), nn.Linear(384, 96)


def peak_of_a_step(full: bool) -> int:
    """The bytes that this rank holds at most in a step of AdamW, with parameters and state."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = nn.Sequential(*[Wide() for _ in range(LAYERS)])
    if full:
        for block in model:
            sw.fully_shard(block, mesh)
        sw.fully_shard(model, mesh)
    else:
        sw.replicate(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    most = 0
    for _ in range(2):
        batch = sw.distribute_tensor(torch.ones(4 * ROWS, 96), mesh, [Shard(0)])
        with Peak() as peak:
            model(batch).square().mean().backward()
        most = peak.most
        optimizer.step()
        optimizer.zero_grad()
    kept: Any = [
        *model.parameters(),
        *[s for each in optimizer.state.values() for s in each.values()],
    ]
    return most + sum(part.nbytes for each in kept for part in getattr(each, "_locals", [each]))


def activations() -> int:
    """The bytes that a forward on the rows of one rank leaves for the backward."""
    model, batch = nn.Sequential(*[Wide() for _ in range(LAYERS)]), torch.ones(ROWS, 96)
    with Peak() as peak:
        loss = model(batch).square().mean()
        held = peak.now()
    del loss
    return held


def test_peak_memory_is_that_of_shards_and_two_units(processes: Pools) -> None:
    unit = sum(each.nbytes for each in Wide().parameters())
    shards = 4 * LAYERS * unit // 4  # parameters, gradients and two moments
    expected = shards + 2 * unit + unit + activations()
    for most in processes(4).run(peak_of_a_step, True):
        assert 0.98 * expected <= most <= 1.02 * expected
    whole = min(processes(4).run(peak_of_a_step, False))
    assert whole >= 4 * LAYERS * unit
