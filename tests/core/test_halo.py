"""Windows over shards: every rank gets its interval, and only what it lacks moves."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.storage.halo import fetch_parts

SHARD0, SHARD1, WHOLE = sw.Shard(0), sw.Shard(1), sw.Replicate()


@pytest.mark.parametrize("rows", [8, 7, 3, 1])
@pytest.mark.parametrize("reach", [(0, 1), (1, 1), (2, 0), (5, 5)], ids=str)
@pytest.mark.parametrize(
    "placements", [(SHARD0, WHOLE), (SHARD0, SHARD0), (SHARD0, SHARD1)], ids=str
)
def test_every_shard_gets_its_window(rows, reach, placements):
    whole = torch.arange(rows * 4.0).reshape(rows, 4)
    x = sw.distribute_tensor(whole, sw.init_device_mesh("cpu", (2, 2)), placements)
    spec = x._spec
    table = [
        (max(0, start - reach[0]), max(0, start - reach[0], min(rows, stop + reach[1])))
        for start, stop in spec.pieces(0)
    ]
    parts = fetch_parts("test", x._spec, x._locals, {0: table})
    for coord, part in zip(spec.slots, parts, strict=True):
        (start, stop), (left, right) = spec.box(coord)
        start, stop = table[spec.pieces(0).index((start, stop))]
        assert part.equal(whole[start:stop, left:right])


def test_only_what_is_lacking_moves():
    x = sw.distribute_tensor(torch.ones(8, 4), sw.init_device_mesh("cpu", (4,)), [SHARD0])
    with sw.CommDebugMode() as comm:
        fetch_parts("test", x._spec, x._locals, {0: [(0, 3), (1, 5), (3, 7), (5, 8)]})
    assert sum(comm.bytes.values()) == 2 * 4 * 4  # a row from each side
