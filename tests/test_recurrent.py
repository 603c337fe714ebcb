"""Recurrent networks on a sharded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Replicate, Shard, communication, distribute_module

from .compare import check, numbers, spread, virtual

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def made(kind: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    module: nn.Module = KINDS[kind](3, 2, dtype=dtype, **options)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str, dtype: torch.dtype) -> None:
    """Parameters are plain, and the state is given, as a DTensor."""
    layer = made(kind, dtype, num_layers=2, bidirectional=True)

    def run(x: Any, h: Any) -> Any:
        state = (h, h * 0.5) if kind == "lstm" else h
        out, last = layer(x, state)
        return [out, *(last if kind == "lstm" else [last])]

    inputs = numbers(4, 5, 3).to(dtype), numbers(4, 5, 2, seed=1).to(dtype)
    close = 1e-9 if dtype is torch.float64 else 1e-4
    check(run, *inputs, mesh=virtual(2), limit=3, tolerance=close, mixed=False, stride=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_plain_parameters(kind: str, dtype: torch.dtype) -> None:
    """The first state is one that the module makes, which is plain."""
    x = numbers(5, 4, 3).to(dtype)
    grads = []
    for given in (x, spread(x, virtual(2), [Shard(0)])):
        layer = made(kind, dtype, batch_first=True)
        out = layer(given)[0]
        (out * out).sum().backward()
        grads.append([p.grad for p in layer.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def test_an_lstm_runs_on_its_batch() -> None:
    mesh, layer = virtual(4), made("lstm", torch.float32, num_layers=2, bidirectional=True)
    distribute_module(layer, mesh)
    x = spread(numbers(4, 6, 3).float(), mesh, [Shard(1)])
    state = spread(numbers(4, 6, 2).float(), mesh, [Shard(1)])
    with communication("error", fallback="error"):
        out, _ = layer(x, (state, state))
        assert out.placements == (Shard(1),)
        out.sum().backward()
    assert all(p.grad.placements == (Replicate(),) for p in layer.parameters())  # type: ignore


@pytest.mark.parametrize("at", [Replicate(), Shard(0), Shard(1)])
def test_inference(at: Any) -> None:
    """Without gradients the kernel of an LSTM returns no workspace."""
    layer, x = made("lstm", torch.float32), numbers(4, 6, 3).float()
    with torch.no_grad():
        got: Any = layer(spread(x, virtual(2), [at]))[0]
        torch.testing.assert_close(got.full_tensor(), layer(x)[0])


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell: Any) -> None:
    torch.manual_seed(1)
    layer = cell(3, 2, dtype=torch.float64)

    def run(x: Any, h: Any) -> Any:
        return layer(x, (h, h * 2) if cell is nn.LSTMCell else h)

    check(run, numbers(5, 3), numbers(5, 2), mesh=virtual(2), limit=4, mixed=False)
