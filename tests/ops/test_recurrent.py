"""Recurrent networks on a sharded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from shardwise import (
    DTensor,
    Replicate,
    Shard,
    communication,
    distribute_module,
    manual_seed,
    plain_tensors,
)
from shardwise.errors import PlainTensorError

from ..compare import assert_same, check, numbers, spread, virtual

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
    x = spread(numbers(4, 8, 3).float(), mesh, [Shard(1)])
    state = spread(numbers(4, 8, 2).float(), mesh, [Shard(1)])
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


def weights(gates: int, layers: int, both: bool, projection: int = 0) -> list[torch.Tensor]:
    """The weights of a layer from 3 to 2 channels."""
    width = projection or 2
    made: list[torch.Tensor] = []
    for layer in range(layers):
        for _ in range(2 if both else 1):
            inner = width * (2 if both else 1) if layer else 3
            shapes = [(2 * gates, inner), (2 * gates, width), (2 * gates,), (2 * gates,)]
            shapes += [(projection, 2)] if projection else []
            made += [numbers(*shape, seed=len(made) + at) for at, shape in enumerate(shapes)]
    return made


# the operator, its gates, layers, whether in both directions, whether the batch is first
LAYERS: dict[str, tuple[Any, int, int, bool, bool]] = {
    "gru": (torch.gru, 3, 1, False, True),
    "gru, two layers": (torch.gru, 3, 2, True, False),
    "lstm": (torch.lstm, 4, 1, True, True),
    "rnn_tanh": (torch.rnn_tanh, 1, 2, True, True),
    "rnn_relu": (torch.rnn_relu, 1, 1, False, False),
}


def layer_of(name: str, projection: int = 0) -> tuple[Any, list[torch.Tensor]]:
    """A function of an input and weights that makes its own first state, and the weights."""
    op, gates, layers, both, first = LAYERS[name]
    ways = layers * (2 if both else 1)

    def run(x: Any, *given: Any) -> Any:
        batch = x.shape[0 if first else 1]
        states = [torch.zeros(ways, batch, n, dtype=x.dtype) for n in (projection or 2, 2)]
        state = states if op is torch.lstm else states[0]
        return op(x, state, given, True, layers, 0.0, True, both, first)

    return run, weights(gates, layers, both, projection)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    """Weights in any layout, and a state that is plain."""
    run, given = layer_of(name)
    check(run, numbers(4, 5, 3), *given, mesh=virtual(2), limit=3)
    where = [(Shard(0),), *[(Replicate(),)] * len(given)]
    assert_same(run, [numbers(2, 3, 3), *given], where, virtual(4))  # ranks without a sequence


def test_projection() -> None:
    run, given = layer_of("lstm", projection=1)
    check(run, numbers(3, 5, 3), *given, mesh=virtual(2, 2), limit=3)


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_moves(name: str) -> None:
    """Neither forward nor backward, but for the gradients of the weights."""
    run, given = layer_of(name)
    mesh, batch = virtual(3), 0 if LAYERS[name][4] else 1
    ours = [spread(w.requires_grad_(), mesh, [Replicate()]) for w in given]
    x = spread(numbers(5, 5, 3).requires_grad_(), mesh, [Shard(batch)])
    with communication("error", fallback="error"):
        out, *last = run(x, *ours)
        assert out.placements == (Shard(batch),)
        assert all(state.placements == (Shard(1),) for state in last)
        (out * out).sum().backward()
    assert x.grad.placements == (Shard(batch),)


def test_second_derivatives() -> None:
    run, given = layer_of("gru")

    def slope(x: Any, *given: Any) -> Any:
        (grad,) = torch.autograd.grad(run(x, *given)[0].pow(2).sum(), [given[0]], create_graph=True)
        return grad

    check(slope, numbers(3, 2, 3), *given, mesh=virtual(2), limit=2, mixed=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
def test_packed_sequences(kind: str, at: Any) -> None:
    x, lengths = numbers(3, 4, 3), torch.tensor([2, 4, 1])
    found = []
    for given in (x, spread(x.clone().requires_grad_(), virtual(2), [at])):
        layer = made(kind, torch.float64, bidirectional=True, batch_first=True)
        given = given if isinstance(given, DTensor) else given.requires_grad_()
        packed = pack_padded_sequence(given, lengths, batch_first=True, enforce_sorted=False)
        out, state = layer(packed)
        assert isinstance(out, PackedSequence)
        full, sizes = pad_packed_sequence(out, batch_first=True, padding_value=-1.0, total_length=5)
        last = state[1] if kind == "lstm" else state
        (full * full).sum().add(last.sum()).backward()
        results = [full, last, given.grad]
        found.append([*results, sizes, *(p.grad for p in layer.parameters())])
    for want, have in zip(*found, strict=True):
        assert want.shape == have.shape
        assert want.stride() == have.stride()
        got = have.full_tensor() if isinstance(have, DTensor) else have
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_between_layers(packed: bool) -> None:
    """It draws what one device draws, in every layout."""
    found = []
    x = numbers(4, 3, 3).float()
    for at in (None, Shard(0), Shard(1)):
        layer = made("gru", torch.float32, num_layers=2, dropout=0.5)
        given: Any = x if at is None else spread(x, virtual(2), [at])
        if packed:
            given = pack_padded_sequence(given, torch.tensor([4, 2, 1]))
        manual_seed(3)
        out = layer(given)[0]
        out = out.data if packed else out
        assert at is None or isinstance(out, DTensor)
        found.append(out.full_tensor() if isinstance(out, DTensor) else out)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_make_their_state(cell: Any) -> None:
    layer = distribute_module(cell(3, 2, dtype=torch.float64), virtual(2))
    with communication("error", fallback="error"):
        got: Any = layer(spread(numbers(5, 3), virtual(2), [Shard(0)]))
    for state in got if isinstance(got, tuple) else [got]:
        assert state.placements == (Shard(0),)


def test_plain_input_and_sharded_weights() -> None:
    """A plain tensor counts as replicated, and the result is no plain tensor."""
    run, given = layer_of("gru")
    ours = [spread(weight, virtual(2), [Shard(0)]) for weight in given]
    out, last = run(numbers(4, 5, 3), *ours)
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.full_tensor(), run(numbers(4, 5, 3), *given)[0])
    assert isinstance(last, DTensor)


def test_batches_sharded_block_by_block() -> None:
    """As a view leaves them that joins a sharded dim with the one before it."""
    run, given = layer_of("gru")
    where = [(Shard(1),), *[(Replicate(),)] * len(given)]

    def joined(x: Any, *given: Any) -> Any:
        return run(x.reshape(8, 3, 3), *given)

    assert_same(joined, [numbers(2, 4, 3, 3), *given], where, virtual(2))


def test_a_first_state_that_is_plain_can_be_refused() -> None:
    layer = distribute_module(made("gru", torch.float32), virtual(2))
    x = spread(numbers(4, 6, 3).float(), virtual(2), [Shard(1)])
    with plain_tensors("error"):
        with pytest.raises(PlainTensorError, match=r"^aten\.gru\.input: a plain tensor"):
            layer(x)
        state = spread(torch.zeros(1, 6, 2), virtual(2), [Shard(1)])
        assert layer(x, state)[0].placements == (Shard(1),)
