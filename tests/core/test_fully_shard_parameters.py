"""The parameters of `fully_shard`: changed, frozen and shared ones, and their dtypes."""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import CommDebugMode, Shard, distribute_tensor, fully_shard

from ..compare import virtual


@pytest.mark.parametrize("keeps", [True, False])
def test_other_memory_and_other_dtypes_are_seen(keeps: bool) -> None:
    mesh, x = virtual(2, names=("dp",)), torch.ones(4, 3)
    layer = fully_shard(nn.Linear(3, 5, bias=False), mesh, reshard_after_forward=not keeps)
    given = distribute_tensor(x, mesh, [Shard(0)])
    for value in (2.0, 3.0):
        layer(given).sum()
        layer.weight.data = distribute_tensor(torch.full((5, 3), value), mesh, [Shard(0)])
        torch.testing.assert_close(layer(given).full_tensor(), torch.full((4, 5), 3 * value))
    layer.double()
    layer(given.double()).sum().backward()
    torch.testing.assert_close(
        layer.weight.grad.full_tensor(),  # type: ignore[union-attr]
        torch.full((5, 3), 4.0, dtype=torch.float64),
    )


def test_a_backward_refuses_parameters_that_were_modified_after_the_forward() -> None:
    mesh = virtual(2, names=("dp",))
    layer = fully_shard(nn.Linear(3, 5), mesh)
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_()
    loss = layer(x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="was modified between a forward and its backward"):
        loss.backward()


class Clamped(nn.Linear):
    """A layer that writes into its weight, before it is used or after."""

    def __init__(self, first: bool) -> None:
        super().__init__(3, 5)
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for writes in (self.first, not self.first):
            if writes:
                with torch.no_grad():
                    self.weight.clamp_(-0.1, 0.1)
            else:
                made = super().forward(x)
        return made


@pytest.mark.parametrize("count", [1, 2])
def test_writes_of_a_forward_reach_the_shards(count: int) -> None:
    mesh, x = virtual(count, names=("dp",)), torch.randn(4, 3)
    given = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    model = Clamped(first=True)
    made = fully_shard(copy.deepcopy(model), mesh)
    model(x).square().sum().backward()
    made(given).square().sum().backward()
    torch.testing.assert_close(made.weight.full_tensor(), model.weight.detach())  # type: ignore
    torch.testing.assert_close(made.weight.grad.full_tensor(), model.weight.grad)  # type: ignore
    late = fully_shard(Clamped(first=False), mesh)(given).sum()
    with pytest.raises(RuntimeError, match="was modified between a forward and its backward"):
        late.backward()


def test_an_embedding_with_a_largest_norm() -> None:
    mesh, index = virtual(2, names=("dp",)), torch.arange(8)
    model = nn.Embedding(10, 4, max_norm=1.0)
    made = fully_shard(copy.deepcopy(model), mesh)
    model(index), made(distribute_tensor(index, mesh, [Shard(0)]))
    torch.testing.assert_close(made.weight.full_tensor(), model.weight.detach())  # type: ignore


def test_an_embedding_with_a_largest_norm_in_a_captured_step() -> None:
    mesh, index = virtual(2, names=("dp",)), torch.arange(8)
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 4))
    made = fully_shard(copy.deepcopy(model), mesh)

    def step_of(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(index: Any) -> Any:
            optimizer.zero_grad()
            loss = module(index).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    plain, step = step_of(model), sw.capture(step_of(made))
    sharded = distribute_tensor(index, mesh, [Shard(0)])
    for _ in range(7):
        torch.testing.assert_close(step(sharded).full_tensor(), plain(index).detach())
    assert step.stats()["replayed"] > 0
    torch.testing.assert_close(made[0].weight.full_tensor(), model[0].weight.detach())


class Adapted(nn.Module):
    """A frozen matrix and a trained one of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.ones(16, 1)), nn.Parameter(torch.randn(1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + x @ self.down @ self.up


def test_nothing_is_reduced_for_frozen_parameters_of_a_unit() -> None:
    torch.manual_seed(0)
    mesh, x = virtual(2, names=("dp",)), torch.randn(4, 16)
    model = Adapted()
    made = fully_shard(copy.deepcopy(model), mesh)
    model(x).square().sum().backward()
    with CommDebugMode() as comm:
        made(distribute_tensor(x, mesh, [Shard(0)])).square().sum().backward()
    assert comm.bytes["reduce_scatter"] == 4 * (
        8 + 16
    )  # half of `down`, and `up`, which one rank has
    torch.testing.assert_close(made.up.grad.full_tensor(), model.up.grad)  # type: ignore


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(index))  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [4, 64])
def test_a_parameter_of_two_units_is_gathered_in_both(rows: int) -> None:
    mesh, index = virtual(2, names=("dp",)), torch.arange(rows) % 32
    model = Tied()
    made = copy.deepcopy(model)
    fully_shard(made.embed, mesh)
    fully_shard(made, mesh)
    given = distribute_tensor(index, mesh, [Shard(0)])
    model(index).square().sum().backward()
    with CommDebugMode() as comm:
        logits = made(given)
    assert comm.bytes["all_gather"] % (16 * 8 * 4) == 0  # weights, and no activations
    assert logits.placements == (Shard(0),)
    logits.square().sum().backward()
    torch.testing.assert_close(made.embed.weight.grad.full_tensor(), model.embed.weight.grad)
    with torch.no_grad():
        made(given)
    assert made.embed._unit._whole is None


@pytest.mark.parametrize("first", [True, False])
def test_a_parameter_of_another_unit_is_not_saved_whole(first: bool) -> None:
    mesh, index = virtual(2, names=("dp",)), torch.arange(8)
    made: Any = Tied()
    fully_shard(made.embed if first else made.head, mesh)
    fully_shard(made, mesh)
    seen: list[Any] = []
    made.head.register_forward_hook(
        lambda module, *_: seen.extend(weakref.ref(part) for part in module.weight._locals)
    )
    logits = made(distribute_tensor(index, mesh, [Shard(0)]))
    assert seen and all(each() is None for each in seen)
    logits.sum().backward()
    for unit in (made._unit, made.embed._unit if first else made.head._unit):
        assert unit._whole is None and unit._started is None


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Paired(nn.Linear):
    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
        return Pair(super().forward(pair.first), pair.second)


def test_mixed_precision_casts_tensors_in_named_tuples() -> None:
    mesh = virtual(2, names=("dp",))
    policy = sw.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    layer: Any = fully_shard(Paired(3, 5), mesh, mp_policy=policy)
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    made = layer(Pair(x, x.long()))
    assert type(made) is Pair
    assert made.first.dtype is torch.float64 and made.second.dtype is torch.int64
