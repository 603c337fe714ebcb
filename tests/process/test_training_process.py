"""A network trained on four processes ends where one device ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardwise import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, per_rank

from ..compare import numbers, virtual
from ..core import test_func
from ..core.test_training import OPTIMIZERS, make_model
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
STEPS = 3
BATCH, TARGET = numbers(7, 5), numbers(7, 3, seed=1)


def plain_losses(optimizer: str) -> list[float]:
    model = make_model()
    step = OPTIMIZERS[optimizer](model.parameters())
    return [one_step(model, step, BATCH, TARGET) for _ in range(STEPS)]


def one_step(
    model: nn.Module, step: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> float:
    step.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    step.step()
    return loss.item()


def losses(optimizer: str) -> list[float]:
    """The batch over the first axis, in parts that each rank brings; weights over the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    for index, dim in ((0, 0), (3, 1)):
        layer = model[index]
        layer.weight = nn.Parameter(
            distribute_tensor(layer.weight.detach(), mesh, [Replicate(), Shard(dim)])
        )
        at = Shard(0) if dim == 0 else Replicate()
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Replicate(), at]))
    for name in ("weight", "bias"):
        value = getattr(model[2], name).detach()
        setattr(
            model[2], name, nn.Parameter(distribute_tensor(value, mesh, [Shard(0), Replicate()]))
        )
    parts = BATCH.split([5, 2]), TARGET.split([5, 2])  # uneven
    x, y = (
        DTensor.from_local(
            per_rank(mesh, lambda coord, part=part: part[coord[0]]),
            mesh,
            [Shard(0), Replicate()],
            run_check=True,
        )
        for part in parts
    )
    step = OPTIMIZERS[optimizer](model.parameters())
    before = [p.placements for p in model.parameters()]
    made = [one_step(model, step, x, y) for _ in range(STEPS)]
    assert [p.placements for p in model.parameters()] == before
    return made


@pytest.mark.parametrize(
    "optimizer", ["SGD momentum", "AdamW single", "AdamW foreach", "AdamW fused"]
)
def test_on_four_processes(processes: Pools, optimizer: str) -> None:
    want = plain_losses(optimizer)
    for got in processes(4).run(losses, optimizer):
        assert got == pytest.approx(want, rel=1e-9)


def test_in_one_process() -> None:
    assert tuple(virtual(2, 2).shape) == (2, 2)
    assert losses("AdamW foreach") == pytest.approx(plain_losses("AdamW foreach"), rel=1e-9)


def replicas() -> list[list[torch.Tensor]]:
    """Every rank's parameters after training with replicated weights."""
    mesh = init_device_mesh("cpu", (2,))
    model = make_model()
    for module in model:
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))
    step = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = distribute_tensor(BATCH, mesh, [Shard(0)])
    y = distribute_tensor(TARGET, mesh, [Shard(0)])
    for _ in range(STEPS):
        one_step(model, step, x, y)
    return [p.detach().to_local() for p in model.parameters()]


def test_replicas_stay_equal_to_the_last_bit(processes: Pools) -> None:
    first, second = processes(2).run(replicas)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def gradients_of_func() -> None:
    torch.manual_seed(0)
    for name in test_func.CASES:
        for place in (Replicate(), Shard(0)):
            test_func.check(name, init_device_mesh("cpu", (2,)), [place], [Shard(0)])


def test_gradients_of_torch_func(processes: Pools) -> None:
    processes(2).run(gradients_of_func, timeout=120)
