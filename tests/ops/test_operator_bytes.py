"""An operator on a sharded dim moves what changes its owner, and statistics: never an operand."""

from __future__ import annotations

import pytest
import torch
from benchmarks.operator_bytes import CASES, WORLD, Case, _flat, allowed

from shardwise import CommDebugMode, Replicate, Shard, distribute_tensor

from ..compare import virtual


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_more_than_the_layouts_need(case: Case) -> None:
    mesh = virtual(WORLD)
    given = [
        distribute_tensor(build(), mesh, [Replicate() if dim is None else Shard(dim)])
        for build, dim in case.inputs
    ]
    with CommDebugMode() as comm:
        made = _flat(case.call(*given))
    most = max(allowed(case, given, made, (rank,)) for rank in range(WORLD))
    assert sum(comm.bytes.values()) <= most
    for ours, plain in zip(made, _flat(case.call(*[b() for b, _ in case.inputs])), strict=True):
        torch.testing.assert_close(ours.full_tensor(), plain)
