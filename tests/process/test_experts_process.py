"""Tokens sent to their experts on four processes, also where ranks have no token or no expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Shard

from ..core.test_experts import CASES, EXPERT, TENSOR, Case, assert_equals_the_loop
from .harness import ProcessPool, RankError

Pools = Callable[[int], ProcessPool]
LAYOUTS: dict[str, tuple[Any, Any, list[Any]]] = {
    "ep": ({"ep": 4}, EXPERT, [{}, {"ep": Shard(0)}]),
    "ep x tp": ({"ep": 2, "tp": 2}, TENSOR, [{}, {"ep": Shard(0), "tp": Shard(0)}]),
    "dp x ep": ({"dp": 2, "ep": 2}, EXPERT, [{"dp": Shard(0)}, {"dp": Shard(0), "ep": Shard(0)}]),
}


def run_all(layout: str, cases: list[Case]) -> None:
    axes, parameters, tokens = LAYOUTS[layout]
    mesh = sw.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    for case in cases:
        for places in tokens:
            assert_equals_the_loop(mesh, case, places, parameters)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_travel_to_their_experts(processes: Pools, layout: str) -> None:
    every = list(CASES.values())
    processes(4).run(run_all, layout, every if layout == "ep" else every[1::3])


def out_of_range() -> None:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    place = {"ep": Shard(0)}
    tokens, experts = (sw.ones(*s, device_mesh=mesh, placements=place) for s in ((8, 8), (8, 8, 8)))
    chosen = torch.tensor([[0]] * 7 + [[8]])
    sw.dispatch_tokens(tokens, sw.distribute_tensor(chosen, mesh, place), None, experts)


def test_an_expert_that_does_not_exist_raises_on_every_rank(processes: Pools) -> None:
    with pytest.raises(RankError) as caught:
        processes(4).run(out_of_range)
    assert str(caught.value).count("OutOfRangeError: dispatch_tokens: expert_index") == 4
