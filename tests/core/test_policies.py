"""What may happen without being written down: said, refused, per block and per module."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise import Replicate, Shard, communication, distribute_tensor, init_device_mesh
from shardwise.errors import CommunicationError, PlainTensorError

MESH = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def sharded(dim: int, *, grad: bool = False) -> shardwise.DTensor:
    return distribute_tensor(torch.ones(4, 4, requires_grad=grad), MESH, [Shard(dim)])


class Mixed(nn.Module):
    """Adds tensors that are sharded along different dims."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_auto_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (sharded(0) + sharded(1)).placements == (Shard(0),)


def test_a_warning_names_operator_line_collective_and_bytes() -> None:
    with communication("warn"), pytest.warns(UserWarning) as caught:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        sharded(0) + sharded(1)
    assert (caught[0].filename, caught[0].lineno) == (str(Path(__file__)), line)
    assert str(caught[0].message) == (
        "aten.add.Tensor moves operand 1 from [S(1)] to [S(0)] (exchange, 16 B received per rank)."
    )


def test_an_error_names_operator_line_collective_bytes_and_ways_out() -> None:
    with communication("error"), pytest.raises(CommunicationError) as caught:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        sharded(0) + sharded(1)
    assert str(caught.value) == (
        "aten.add.Tensor moves operand 1 from [S(1)] to [S(0)] (exchange, 16 B received per rank), "
        'and communication("error") forbids implicit communication. Write it down with '
        f"redistribute(...) before the call, at {Path(__file__)}:{line}, or allow it with "
        'communication("auto").'
    )


def test_what_is_written_down_is_allowed() -> None:
    with communication("error"):
        y = sharded(1).redistribute(MESH, [Shard(0)])
        assert (sharded(0) + y).placements == (Shard(0),)


def test_what_moves_nothing_is_allowed() -> None:
    with communication("error"):
        whole = distribute_tensor(torch.ones(4, 4), MESH, [Replicate()])
        assert (sharded(0) @ whole).placements == (Shard(0),)
        assert (sharded(1) @ sharded(0)).placements[0].is_partial()


def test_a_notice_in_a_backward_names_the_forward_operator() -> None:
    x, y = sharded(0, grad=True), sharded(0)
    product = x * y
    gradient = distribute_tensor(torch.ones(4, 4), MESH, [Shard(1)])
    with communication("warn"), pytest.warns(UserWarning, match="in the backward of mul"):
        product.backward(gradient)


def test_a_warning_in_a_backward_is_at_the_line_of_the_forward() -> None:
    x, y = sharded(0, grad=True), sharded(0)
    gradient = distribute_tensor(torch.ones(4, 4), MESH, [Shard(1)])
    with communication("warn"), pytest.warns(UserWarning, match="in the backward of mul") as caught:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        product = x * y
        product.backward(gradient)
    assert (caught[0].filename, caught[0].lineno) == (str(Path(__file__)), line)
    assert not torch.is_anomaly_enabled()  # nothing keeps lines after the block


def test_a_warning_names_the_parameter() -> None:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(sharded(1))
    x = distribute_tensor(torch.ones(64, 4), MESH, [Shard(0)])
    with (
        communication("warn"),
        pytest.warns(UserWarning, match=r"1 \(a view of weight of Linear\)"),
    ):
        linear(x)
    weight = sharded(1, grad=True)
    with communication("warn"), pytest.warns(UserWarning, match=r"a view of float32\[4, 4\]"):
        x @ weight.t().t()


@torch.library.custom_op("shardwise_tests::mirrored", mutates_args=())
def mirrored(x: torch.Tensor) -> torch.Tensor:
    """An operator that nobody gave a rule."""
    return x.flip(0)


def test_the_fallback_is_apart_from_moves() -> None:
    x = sharded(0)
    with communication("error", fallback="error"):
        with pytest.raises(CommunicationError, match=r"has no rule.*register_rule"):
            mirrored(x)
        with communication("error"), pytest.raises(CommunicationError, match="has no rule"):
            mirrored(x)
        with communication("error", fallback="auto"):
            assert mirrored(x).shape == (4, 4)


def test_settings_nest_and_end() -> None:
    forbid = communication("error")
    with forbid:
        with communication("auto"):
            sharded(0) + sharded(1)
        with forbid, pytest.raises(CommunicationError):
            sharded(0) + sharded(1)
        with pytest.raises(CommunicationError):
            sharded(0) + sharded(1)
    sharded(0) + sharded(1)


def test_a_module_has_a_policy_of_its_own() -> None:
    strict = Mixed()
    strict.forward = communication("error")(strict.forward)  # type: ignore[method-assign]
    model = nn.ModuleList([strict, Mixed()])
    with pytest.raises(CommunicationError):
        model[0](sharded(0), sharded(1))
    model[1](sharded(0), sharded(1))  # neither another module
    sharded(0) + sharded(1)  # nor what follows, also after an error, is under it
    assert strict(sharded(0), sharded(0)).placements == (Shard(0),)


def test_a_module_may_be_freer_than_its_surroundings() -> None:
    free = Mixed()
    free.forward = communication("auto")(free.forward)  # type: ignore[method-assign]
    with communication("error"):
        free(sharded(0), sharded(1))
        with pytest.raises(CommunicationError):
            sharded(0) + sharded(1)


def test_a_mode_that_is_none() -> None:
    with pytest.raises(CommunicationError) as caught:
        communication("never")
    assert str(caught.value) == "communication: 'never' is none of 'auto', 'warn', 'error'."


def test_plain_tensors_can_be_refused() -> None:
    with shardwise.plain_tensors("error"), pytest.raises(PlainTensorError, match="distribute_ten"):
        sharded(0) + torch.ones(4)
    with shardwise.implicit_replication():
        assert torch.equal((sharded(0) + torch.ones(4)).full_tensor(), torch.full((4, 4), 2.0))


def test_a_notice_names_the_operator_that_a_form_stands_for() -> None:
    x = sharded(0)
    with (
        communication("warn"),
        pytest.warns(UserWarning, match=r"^aten\.native_batch_norm\.default moves"),
    ):
        torch.nn.functional.batch_norm(x, None, None, training=True)
    with (
        communication("warn"),
        pytest.warns(UserWarning, match=r"^aten\.\w+\.\w+, in aten\.nll_loss_forward\.default, "),
    ):
        torch.nn.functional.nll_loss(x, torch.tensor([0, 1, 2, 3]))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_dropout_moves_nothing(train: bool, inference: bool) -> None:
    """What is filled with drawn numbers is not read; in inference mode composites arrive whole."""
    with torch.inference_mode(inference), communication("error", fallback="error"):
        for run in (nn.functional.dropout, nn.functional.alpha_dropout):
            assert run(sharded(0), 0.5, train).placements == (Shard(0),)  # type: ignore
