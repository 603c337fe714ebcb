"""Gradients of leaves on four processes: reduced together, in step, and those of plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

import shardwise as sw
from shardwise import Placement, Replicate, Shard
from shardwise.comm import native

from ..core.test_gradient_buckets import SCENARIOS, compare
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)
ONE, MANY = 1 << 20, 400  # bytes of a buffer: one bucket holds all gradients, or one or two


def scenarios(places: list[Placement], room: int, own: bool) -> None:
    """On one rank: every scenario, with the backend's own collectives if `own`."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
    prefers, native.prefers_own = native.prefers_own, lambda *of: own or prefers(*of)
    try:
        with sw.exchange_buffer(room):
            for run in SCENARIOS.values():
                compare(run, mesh, places)
    finally:
        native.prefers_own = prefers


@pytest.mark.parametrize(
    ("places", "room", "own"),
    [([R, R], ONE, False), ([S0, R], MANY, False), ([S0, S1], ONE, True), ([R, S1], MANY, True)],
)
def test_scenarios(processes: Pools, places: list[Placement], room: int, own: bool) -> None:
    processes(4).run(scenarios, places, room, own, timeout=120.0)
