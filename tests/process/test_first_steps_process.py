"""What a user does first, on two processes and on the virtual engine, in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Partial, Replicate, Shard, init_device_mesh
from shardwise.layout.mesh import AnyMesh

from ..compare import assert_same, numbers, spread, virtual
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
PLACES = [(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)]
OF_ONE_DIM = [(Replicate(),), (Shard(0),), (Partial(),)]


def sliced(mesh: AnyMesh, rows: int, columns: int) -> None:
    for at in PLACES:
        assert_same(lambda x: x[:, :5], [numbers(rows, columns)], [at], mesh)
        assert_same(lambda x: x[:, :5].sum(1), [numbers(rows, columns)], [at], mesh)


def drawn(mesh: AnyMesh, rows: int, columns: int) -> None:
    chances = numbers(rows, columns).sigmoid()
    for at in PLACES:
        assert_same(torch.bernoulli, [chances], [at], mesh)
    torch.manual_seed(1)
    results = [torch.bernoulli(spread(chances, mesh, at)).full_tensor() for at in PLACES[:1]]
    for at in PLACES:
        torch.manual_seed(1)
        results.append(torch.bernoulli(spread(chances, mesh, at)).full_tensor())
    assert all(torch.equal(each, results[0]) for each in results)


def classified(mesh: AnyMesh, rows: int, columns: int) -> None:
    target = torch.arange(rows) % columns
    target[1] = -100
    weight = numbers(columns, seed=1).abs() + 0.1

    def plain_loss(x: Any, t: Any) -> Any:
        return nn.CrossEntropyLoss()(x, t)

    def loss(x: Any, t: Any, w: Any) -> Any:
        return nn.CrossEntropyLoss(weight=w.detach(), ignore_index=2)(x, t.clamp(min=0))

    x = numbers(rows, columns)
    for at, t in itertools.product(PLACES, OF_ONE_DIM):
        assert_same(plain_loss, [x, target], [at, t], mesh)
        for w in OF_ONE_DIM:
            assert_same(loss, [x, target, weight], [at, t, w], mesh)


SCENARIO = {"x[:, :5]": sliced, "bernoulli": drawn, "CrossEntropyLoss": classified}
SIZES = {"even": (4, 6), "uneven": (5, 7)}


def on_processes(name: str, size: str) -> None:
    SCENARIO[name](init_device_mesh("cpu", (2,)), *SIZES[size])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENARIO)
def test_on_two_processes(processes: Pools, name: str, size: str) -> None:
    processes(2).run(on_processes, name, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENARIO)
def test_in_one_process(name: str, size: str) -> None:
    SCENARIO[name](virtual(2), *SIZES[size])
