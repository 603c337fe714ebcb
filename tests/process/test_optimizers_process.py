"""A sample of optimizers on real processes."""

from __future__ import annotations

from collections.abc import Callable

from shardwise import Replicate, Shard, init_device_mesh

from ..ops.test_optimizers import (
    check_clipping,
    check_lbfgs,
    check_muon,
    check_optimizer,
    check_scaled,
)
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def steps() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("Adam, loop", "AdamW amsgrad, fused", "SGD nesterov, foreach"):
        check_optimizer(name, mesh)
    for foreach in (False, True):
        check_clipping(mesh, 2.0, foreach)
    check_scaled(mesh, "Adagrad, foreach", bad=True)
    check_lbfgs([(mesh, (Shard(0), Replicate())), (mesh, (Shard(0), Shard(0))), None], None)
    check_muon(mesh)


def test_optimizers(processes: Pools) -> None:
    """Parameters on two axes, on one of them and plain, in one optimizer."""
    processes(4).run(steps, timeout=120)
