"""Models built on the meta device of several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.models import transformer

from shardwise import Shard, init_device_mesh, materialize, shard_module
from shardwise.errors import LayoutError

from ..core.test_materialize import WithoutInit
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def materialized() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = transformer.GPT(layers=1)
    shard_module(model, mesh, {"*": {"dp": Shard(0), "tp": Shard(-1)}})
    torch.manual_seed(5)
    materialize(model)
    local = model.embed.weight.to_local()
    assert local.shape == (transformer.VOCAB // 2, transformer.WIDTH // 2) and not local.is_meta
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_the_values_are_those_of_one_device(processes: Pools) -> None:
    torch.manual_seed(5)
    want = transformer.GPT(layers=1).state_dict()
    for have in processes(4).run(materialized):
        assert have.keys() == want.keys()
        assert all(torch.equal(have[name], want[name]) for name in want)


def with_empty_shards() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    shard_module(model, mesh, {"*": {"tp": Shard(0)}})
    torch.manual_seed(5)
    value: Any = materialize(model).weight.detach()
    return value.full_tensor()


def test_ranks_without_a_part_take_part(processes: Pools) -> None:
    torch.manual_seed(5)
    want = torch.nn.Linear(3, 2).weight
    assert all(torch.equal(have, want) for have in processes(4).run(with_empty_shards))


def refused() -> str:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = WithoutInit()
    shard_module(model, mesh, {"scale": {"tp": Shard(0)}})
    try:
        materialize(model)
    except LayoutError as error:
        return str(error)
    return "nothing"


def test_every_rank_has_the_error(processes: Pools) -> None:
    for text in processes(4).run(refused):
        assert text.startswith("materialize: nobody initialised scale, mask:")
