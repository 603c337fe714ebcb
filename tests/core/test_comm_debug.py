"""Counting communication."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from shardwise.comm.events import Communication, record
from shardwise.errors import CommunicationError
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
        record(Communication("check", topology(MESH), (0, 1), 16))
    assert (comm.checks, comm.get_comm_counts(), comm.bytes) == (1, {}, {})


def test_the_table() -> None:
    x = distribute_tensor(torch.randn(8, 8), MESH, [Shard(0), Shard(1)])
    with CommDebugMode() as comm:
        x.redistribute(MESH, [Shard(0), Replicate()])
        x.sum().item()
    assert str(comm).splitlines() == [
        "collective  axes   count  bytes",
        "all_gather  tp         1     96",
        "all_reduce  dp,tp      1      7",
        "total                  2    103",
        "checks: 0",
    ]
    assert repr(comm) == "CommDebugMode(all_gather 1, all_reduce 1; 103 bytes)"


class Layer(nn.Module):
    """A matrix product whose sum over tp is reduced in the forward, and over dp in the backward."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(64.0).view(8, 8)
        self.weight = nn.Parameter(distribute_tensor(whole, MESH, [Replicate(), Shard(1)]))

    def forward(self, x: DTensor) -> Any:
        return nn.functional.linear(x, self.weight) + 1


LINE = inspect.getsourcelines(Layer.forward)[1] + 1
X = distribute_tensor(torch.ones(4, 8), MESH, [Shard(0), Shard(1)])


@pytest.mark.parametrize("again", [False, True])
def test_lines_that_communicate(again: bool) -> None:
    """Gradients of parameters are reduced at the end of the backward."""
    layer = Layer()
    with CommDebugMode() as comm:
        y = checkpoint(layer, X, use_reentrant=False) if again else layer(X)
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        y.sum().backward()
    forward, backward = sorted(comm.table(), key=lambda row: -row["bytes"])
    assert (forward["line"], forward["pass"]) == (f"{__file__}:{LINE}", "forward")
    assert (forward["axes"], forward["parameters"]) == (("tp",), ())
    assert forward["bytes"] == comm.bytes_by_axis["tp"]
    assert (backward["line"], backward["pass"]) == (f"{__file__}:{line}", "backward")
    assert (backward["axes"], backward["parameters"]) == (("dp",), ("Layer.weight",))
    assert not torch.is_anomaly_enabled()


def test_a_backward_counts_for_the_line_of_the_forward() -> None:
    whole = torch.arange(32.0).view(4, 8)
    x = distribute_tensor(whole, MESH, [Shard(0), Replicate()]).requires_grad_()
    weight = distribute_tensor(torch.ones(8, 8), MESH, [Replicate(), Shard(1)])
    with CommDebugMode() as comm:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        normal = nn.functional.layer_norm(x, (8,))
        (normal @ weight).sum().backward()
    (row,) = comm.table()
    assert (row["line"], row["pass"], row["axes"]) == (f"{__file__}:{line}", "backward", ("tp",))
    assert [row["op"] for row in comm.table(by="op")] == ["backward of native_layer_norm"]


def test_rows_by_module_and_operator_are_sorted_by_bytes() -> None:
    layer = Layer()
    with CommDebugMode() as comm:
        layer(X).sum().backward()
        layer.weight.full_tensor()  # type: ignore[operator]
    assert str(comm.table(by="op")).splitlines() == [
        "op                   pass      collectives   axes  count  bytes   price  parameters",
        "full_tensor          forward   all_gather 1  tp        1    192  10.096",
        "add                  forward   all_reduce 1  tp        1     96  10.048",
        "gradients of leaves  backward  all_reduce 1  dp        1     64  10.032  Layer.weight",
    ]
    found = [(row["module"], row["pass"], row["bytes"]) for row in comm.table(by="module")]
    assert found == [("", "forward", 192), ("Layer", "forward", 96), ("Layer", "backward", 64)]
    assert sum(row["bytes"] for row in comm.table()) == sum(comm.bytes.values())


def test_an_operand_that_is_a_parameter_is_named() -> None:
    layer = Layer()
    with CommDebugMode() as comm, torch.no_grad():
        layer(distribute_tensor(torch.ones(1000, 8), MESH, [Replicate(), Shard(0)]))
    assert [row["parameters"] for row in comm.table(by="op")] == [("Layer.weight",)]


def test_an_unknown_table() -> None:
    with pytest.raises(CommunicationError, match="by='file' is none of 'line', 'module', 'op'"):
        CommDebugMode().table(by="file")  # type: ignore[arg-type]
