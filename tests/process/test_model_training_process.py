"""Whole models, sharded by a plan, train on four processes as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise import init_device_mesh

from ..training import RUNS, Trained, assert_same, on_one_device, train
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
VIRTUAL_ONLY = {  # for time
    "gpt, fully sharded x tp",
    "gpt, context by heads",
    "llama, auto",
    "resnet, channels",
    "dispatched, dp x ep",
}


def trained(name: str) -> Trained:
    axes = RUNS[name].mesh
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return train(RUNS[name], mesh)


@pytest.mark.parametrize("name", [name for name in RUNS if name not in VIRTUAL_ONLY])
def test_a_model_trains_on_processes_as_on_one_device(processes: Pools, name: str) -> None:
    for have in processes(4).run(trained, name, timeout=240):
        assert_same(have, on_one_device(name))
