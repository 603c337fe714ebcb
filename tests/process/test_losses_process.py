"""A sample of losses on real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwise import Replicate, Shard, init_device_mesh

from ..compare import assert_same, check
from ..ops import test_losses as losses
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def sample() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in ("multi_margin", "multilabel_margin", "triplet_margin", "cosine_embedding"):
        loss, inputs = losses.LOSSES[name]
        check(loss, *inputs, mesh=mesh, limit=2)

    eager = losses.eager(2)

    def ctc(p: Any, t: Any, i: Any, n: Any) -> Any:
        return F.ctc_loss(p, t, i, n)

    for targets in (losses.WORDS, losses.FLAT):
        check(ctc, losses.LOG_PROBS, targets, losses.INPUTS, losses.LENGTHS, mesh=mesh, limit=2)
    apart = [(Shard(1),), (Shard(0),), (Replicate(),)]
    assert_same(lambda x, t, w: F.nll_loss(x, t, w.detach()), losses.named(301, 20), apart, eager)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    check(
        lambda x, m, t: F.linear_cross_entropy(x, m, t, options=options),
        losses.X,
        losses.MATRIX,
        losses.TARGET,
        mesh=mesh,
        limit=2,
    )


def test_losses(processes: Pools) -> None:
    processes(2).run(sample, timeout=120)
