"""Recurrent networks whose time is sharded: values, gradients, writes and checkpoints."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Replicate, Shard, distribute_module, manual_seed

from ..compare import eager, numbers, spread

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
IN, HIDDEN = 8, 2
# the kind of layer, its options, how many sequences (None: no dim for them)
CASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "lstm": ("lstm", {}, 1),
    "lstm, unbatched": ("lstm", {}, None),
    "lstm, two layers": ("lstm", {"num_layers": 2, "batch_first": True}, 3),
    "lstm, both ways": ("lstm", {"bidirectional": True, "batch_first": True}, 1),
    "lstm, projection": ("lstm", {"num_layers": 2, "bidirectional": True, "proj_size": 1}, 1),
    "lstm, dropout": ("lstm", {"num_layers": 2, "dropout": 0.5, "batch_first": True}, 1),
    "gru": ("gru", {"num_layers": 2, "bidirectional": True}, 2),
    "gru, unbatched": ("gru", {"bidirectional": True, "bias": False}, None),
    "rnn": ("rnn", {"num_layers": 2, "nonlinearity": "relu"}, 1),
}


def layer_of(kind: str, mesh: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    layer: nn.Module = KINDS[kind](IN, HIDDEN, dtype=torch.float64, **options)
    return layer if mesh is None else distribute_module(layer, mesh)


def inputs_of(case: str, steps: int) -> tuple[list[torch.Tensor], int]:
    """Input and states of a layer, and where the input has the time."""
    kind, options, batch = CASES[case]
    time = 1 if options.get("batch_first") and batch is not None else 0
    shape = [steps, IN] if batch is None else [steps, batch, IN]
    if time:
        shape[:2] = shape[1::-1]
    ways = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    widths = [options.get("proj_size") or HIDDEN, *([HIDDEN] if kind == "lstm" else [])]
    states = [
        numbers(*([ways, w] if batch is None else [ways, batch, w]), seed=at)
        for at, w in enumerate(widths)
    ]
    return [numbers(*shape), *states], time


def results(layer: nn.Module, given: list[Any]) -> list[Any]:
    """Output and last states."""
    manual_seed(7)  # for dropout
    x, *states = given
    out, last = layer(x, tuple(states) if len(states) > 1 else states[0])
    return [out, *(last if isinstance(last, tuple) else [last])]


def whole(value: Any) -> torch.Tensor:
    made: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return made


def check_layer(case: str, mesh: Any, places: Any, steps: int, of_states: Any = None) -> None:
    """Values, strides and gradients are those of one device."""
    kind, options, _ = CASES[case]
    given, _ = inputs_of(case, steps)
    of_states = of_states or [Replicate()] * mesh.ndim
    ours: list[Any] = [
        spread(value, mesh, places if not at else of_states).detach().requires_grad_()
        for at, value in enumerate(given)
    ]
    theirs = [value.requires_grad_() for value in given]
    ends, layers = [], [layer_of(kind, mesh, **options), layer_of(kind, **options)]
    for layer, inputs in zip(layers, (ours, theirs), strict=True):
        found = results(layer, inputs)
        sum((each * each).sum() for each in found).backward()
        grads = [v.grad for v in inputs] + [p.grad for p in layer.parameters()]
        ends.append([*found, *grads])
    for got, want in zip(*ends, strict=True):
        torch.testing.assert_close(whole(got), want, rtol=1e-9, atol=1e-9)
    assert [v.stride() for v in ends[0][:2]] == [v.stride() for v in ends[1][:2]]


@pytest.mark.parametrize("case", CASES)
def test_layers(case: str) -> None:
    _, time = inputs_of(case, 1)
    check_layer(case, eager(4), [Shard(time)], 103, [Shard(0)])


def test_beside_shards_of_the_batch() -> None:
    """One rank has no sequence; and a time over two axes."""
    check_layer("rnn", eager(2, 4), [Shard(1), Shard(0)], 103)
    check_layer("lstm, two layers", eager(2, 4), [Shard(0), Shard(1)], 103)
    check_layer("lstm", eager(2, 2), [Shard(0), Shard(0)], 103)


def check_ranks_without_times(case: str, steps: int) -> None:
    kind, options, _ = CASES[case]
    (x, *states), time = inputs_of(case, steps)
    mesh = eager(4)
    ends = []
    for where, given in (
        (mesh, spread(x, mesh, [Shard(time)]).detach().requires_grad_()),
        (None, x.requires_grad_()),
    ):
        layer = layer_of(kind, where, **options).requires_grad_(False)
        found = results(layer, [given, *states])
        sum(each.sin().sum() for each in found).backward()
        ends.append([*found, given.grad])
    for got, want in zip(*ends, strict=True):
        torch.testing.assert_close(whole(got), want)


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("case", ["gru, unbatched", "lstm, both ways"])
def test_ranks_without_times(case: str, steps: int) -> None:
    check_ranks_without_times(case, steps)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_again(kind: str) -> None:
    """Through a graph that was kept, and through the gradient itself."""
    x = numbers(99, 1, IN)
    found = []
    for mesh in (None, eager(4)):
        layer = layer_of(kind, mesh)
        given: Any = x.clone() if mesh is None else spread(x, mesh, [Shard(0)]).detach()
        given.requires_grad_()
        loss = layer(given)[0].sin().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        (slope,) = torch.autograd.grad(layer(given)[0].sin().sum(), [given], create_graph=True)
        (slope * slope).sum().backward()
        found.append([given.grad, *(p.grad for p in layer.parameters())])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(whole(got), want)


def check_checkpoints(mesh: Any) -> None:
    """The layer runs again in the backward, on all ranks at the same time."""
    x = numbers(99, 1, IN)
    found = []
    for where in (mesh, None):
        layer = layer_of("gru", where)
        given: Any = x.clone() if where is None else spread(x, mesh, [Shard(0)]).detach()
        out = checkpoint(lambda v: layer(v)[0].tanh(), given.requires_grad_(), use_reentrant=False)  # noqa: B023
        out.sin().sum().backward()
        found.append([given.grad, *(p.grad for p in layer.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(whole(got), want)


def test_checkpoints() -> None:
    check_checkpoints(eager(4))


@pytest.mark.parametrize(
    ("written", "at"),
    [("input", Shard(1)), *itertools.product(("output", "weight"), (Shard(0), Shard(1)))],
    ids=str,
)
def test_writes_before_the_backward_raise(written: str, at: Any) -> None:
    """As on one device; an input that was moved is a copy, which nobody writes into."""
    mesh = eager(4)
    torch.manual_seed(1)
    layer = distribute_module(nn.LSTM(IN, HIDDEN), mesh)  # in float32 the output is kept
    x = spread(numbers(99, 1 if at == Shard(0) else 4, IN).float(), mesh, [at])
    out, _ = layer(x)
    with torch.no_grad():
        {"input": x, "output": out, "weight": layer.weight_hh_l0}[written].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def _flat(made: Any) -> tuple[Any, ...]:
    out, last = made
    return out, *last


class _Unasked(torch.autograd.Function):
    """A gradient that does not go on."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> None:
        return None


def test_no_gradient_to_differentiate_again() -> None:
    mesh = eager(4)
    x = spread(numbers(99, 1, IN), mesh, [Shard(0)]).detach().requires_grad_()
    out, _ = layer_of("gru", mesh)(x)
    loss = _Unasked.apply(out).sum()
    assert torch.autograd.grad(loss, [x], create_graph=True, allow_unused=True) == (None,)


@pytest.mark.parametrize("batch", [1, 4])
def test_results_that_a_checkpoint_has_and_nobody_uses(batch: int) -> None:
    """PyTorch makes plain zeros of their gradients, whether time or batch is sharded."""
    found = []
    for mesh in (eager(4), None):
        layer, x = layer_of("lstm", mesh), numbers(99, batch, IN)
        given: Any = x if mesh is None else spread(x, mesh, [Shard(0)]).detach()
        out, *_ = checkpoint(
            lambda v: _flat(layer(v)),  # noqa: B023
            given.requires_grad_(),
            use_reentrant=True,
        )
        out.sin().sum().backward()
        found.append([given.grad, *(p.grad for p in layer.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(whole(got), want)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("at", [Shard(0), Shard(1)], ids=str)
def test_a_projected_output_may_be_written(at: Any) -> None:
    """As on one device: the gradients do not need it."""
    x = numbers(99, 1 if at == Shard(0) else 4, IN).float()
    found = []
    for mesh in (eager(4), None):
        torch.manual_seed(1)
        layer: Any = nn.LSTM(IN, HIDDEN, proj_size=1)
        layer = layer if mesh is None else distribute_module(layer, mesh)
        out, _ = layer(x if mesh is None else spread(x, mesh, [at]))
        loss = out.sum()
        with torch.no_grad():
            out.mul_(2)
        loss.backward()
        found.append([p.grad for p in layer.parameters()])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(whole(got), want)
