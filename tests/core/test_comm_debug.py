"""Counting communication."""

from __future__ import annotations

import pytest
import torch

from shardwise import CommDebugMode, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.comm.events import record
from shardwise.layout.mesh import topology

MESH = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def test_kinds_axes_and_bytes() -> None:
    x = distribute_tensor(torch.randn(8, 8), MESH, [Shard(0), Shard(1)])
    with CommDebugMode() as comm:
        x.redistribute(MESH, [Shard(0), Replicate()])
        x.redistribute(MESH, [Shard(0), Replicate()])
        x.redistribute(MESH, [Replicate(), Shard(1)])
    assert comm.get_comm_counts() == {"all_gather": 3}
    assert comm.get_total_counts() == 3
    assert comm.by_axis == {"tp": {"all_gather": 2}, "dp": {"all_gather": 1}}
    # 4 of 8 rows are here, 2 of their 8 columns: 6 columns come; then 4 rows of 2 columns come
    assert comm.bytes_by_axis == {"tp": 2 * 4 * 6 * 4, "dp": 4 * 2 * 4}
    assert comm.bytes == {"all_gather": 2 * 4 * 6 * 4 + 4 * 2 * 4}


def test_local_work_counts_nothing() -> None:
    x = distribute_tensor(torch.randn(8, 8), MESH, [Shard(0), Shard(1)])
    with CommDebugMode() as comm:
        (x * 2 + x).relu().t()
        x.redistribute(MESH, [Shard(0), Shard(1)])
        distribute_tensor(torch.randn(8, 8), MESH, [Replicate(), Replicate()]).redistribute(
            MESH, [Shard(0), Partial()]
        )
    assert comm.get_comm_counts() == {}
    assert comm.by_axis == {}


def test_backward_counts_too() -> None:
    w = distribute_tensor(torch.randn(8, 8), MESH, [Replicate(), Shard(1)]).requires_grad_()
    x = distribute_tensor(torch.randn(4, 8), MESH, [Shard(0), Replicate()])
    with CommDebugMode() as forward:
        loss = (x @ w).sum()
    with CommDebugMode() as backward:
        loss.backward()
    assert forward.get_total_counts() == 0
    assert set(backward.by_axis) == {"dp"}


def test_entering_again_starts_from_zero_and_others_go_on() -> None:
    x = distribute_tensor(torch.randn(8, 8), MESH, [Shard(0), Shard(1)])
    inner, outer = CommDebugMode(), CommDebugMode()
    with outer:
        for _ in range(2):
            with inner:
                x.redistribute(MESH, [Shard(0), Replicate()])
    x.redistribute(MESH, [Shard(0), Replicate()])
    assert inner.get_total_counts() == 1
    assert outer.get_total_counts() == 2


def test_an_error_ends_the_counting() -> None:
    x = distribute_tensor(torch.randn(8, 8), MESH, [Shard(0), Shard(1)])
    with pytest.raises(KeyError), CommDebugMode() as comm:
        raise KeyError
    x.full_tensor()
    assert comm.get_total_counts() == 0


def test_checks_are_counted_apart() -> None:
    with CommDebugMode() as comm:
        record("check", topology(MESH), (0, 1), 16)
    assert (comm.checks, comm.get_comm_counts(), comm.bytes) == (1, {}, {})


def test_the_table() -> None:
    x = distribute_tensor(torch.randn(8, 8), MESH, [Shard(0), Shard(1)])
    with CommDebugMode() as comm:
        x.redistribute(MESH, [Shard(0), Replicate()])
        x.sum().item()
    assert str(comm).splitlines() == [
        "collective  axes   count  bytes",
        "all_gather  tp         1     96",
        "all_reduce  dp,tp      1      4",
        "total                  2    100",
        "checks: 0",
    ]
