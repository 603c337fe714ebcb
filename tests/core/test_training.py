"""Training on DTensors gives the parameters that training on one device gives."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    keep_partial_grads,
)

from ..compare import numbers, spread, virtual

LAYOUTS = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))


def make_model(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7) if norm else nn.Identity()]
    return nn.Sequential(*layers, nn.Linear(7, 3)).double()


def sharded(model: nn.Module, mesh: Any, places: tuple[Any, ...]) -> nn.Module:
    """A copy of a model with DTensor parameters; vectors are sharded where matrices are."""
    made = copy.deepcopy(model)
    for module in made.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            at = [p if p.is_replicate() or p.dim < value.ndim else Shard(0) for p in places]
            setattr(module, name, nn.Parameter(distribute_tensor(value.detach(), mesh, at)))
    return made


def same_parameters(have: nn.Module, want: nn.Module) -> None:
    for (name, a), b in zip(have.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-9, atol=1e-9, msg=name)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW single": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_on_one_device(name: str) -> None:
    mesh, x, y = virtual(2, 2), numbers(6, 5), numbers(6, 3, seed=1)
    for places in LAYOUTS:
        want = make_model()
        have = sharded(want, mesh, places)
        steps = [OPTIMIZERS[name](m.parameters()) for m in (want, have)]
        batch = distribute_tensor(x, mesh, [Shard(0), Replicate()])
        for _ in range(2):
            for model, optimizer, data in zip((want, have), steps, (x, batch), strict=True):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(data), y).backward()
                optimizer.step()
        same_parameters(have, want)
        for p in have.parameters():
            assert all(state.placements == p.placements for state in states(steps[1], p))


def states(optimizer: torch.optim.Optimizer, p: Any) -> list[Any]:
    found = optimizer.state[p].values()
    return [s for s in found if isinstance(s, DTensor) and s.shape == p.shape]


@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW fused", "SGD foreach"])
def test_parameters_in_many_layouts_step_together(name: str) -> None:
    """One list of parameters, some sharded over one axis, some over the other."""
    mesh, x = virtual(2, 2), numbers(6, 5)
    places = [(Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(0))]
    want = make_model()
    have = copy.deepcopy(want)
    for index, (module, key) in enumerate([(m, k) for m in have for k in ("weight", "bias")]):
        if hasattr(module, key):
            value = distribute_tensor(getattr(module, key).detach(), mesh, places[index % 3])
            setattr(module, key, nn.Parameter(value))
    for model in (want, have):
        optimizer = OPTIMIZERS[name](model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    same_parameters(have, want)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clip_grad_norm(norm_type: float, foreach: bool) -> None:
    mesh, x = virtual(2, 2), numbers(6, 5)
    for places in LAYOUTS:
        want = make_model()
        have = sharded(want, mesh, places)
        norms = []
        for model in (want, have):
            model(x).square().sum().backward()
            norms.append(
                nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type, foreach=foreach)
            )
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])
        for a, b in zip(have.parameters(), want.parameters(), strict=True):
            assert a.grad.placements == a.placements
            torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def test_a_state_dict_makes_the_round_trip() -> None:
    mesh = virtual(2, 2)
    first = sharded(make_model(), mesh, (Shard(0), Shard(1)))
    second = sharded(make_model(), mesh, (Replicate(), Shard(0)))
    with torch.no_grad():
        for p in first.parameters():
            p.add_(1)
    second.load_state_dict(first.state_dict())
    for a, b in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    assert second[0].weight.placements == (Replicate(), Shard(0)), "loading keeps the layout"


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_copies_are_whole_and_apart(place: Any, how: str) -> None:
    x = nn.Parameter(spread(numbers(5, 3), virtual(2), [place]))
    x.note = "kept"
    if how == "deepcopy":
        y = copy.deepcopy(x)
    elif how == "pickle":
        y = pickle.loads(pickle.dumps(x))
    else:
        buffer = io.BytesIO()
        torch.save(x, buffer)
        buffer.seek(0)
        y = torch.load(buffer, weights_only=False)
    assert isinstance(y, nn.Parameter) and y.requires_grad and y.note == "kept"
    assert y.placements == x.placements and torch.equal(y.full_tensor(), x.full_tensor())
    (y * 2).sum().backward()
    assert x.grad is None
    with torch.no_grad():
        y.zero_()
    assert x.full_tensor().abs().sum() > 0


def test_a_parameter_is_one() -> None:
    p = nn.Parameter(distribute_tensor(numbers(4, 4), virtual(2), [Shard(0)]))
    assert isinstance(p, nn.Parameter) and isinstance(p, DTensor) and p.is_leaf and p.requires_grad
    layer = nn.Linear(4, 4, bias=False).double()
    layer.weight = p
    assert next(layer.parameters()) is p
    assert isinstance(layer.state_dict()["weight"], DTensor)
    frozen = nn.Parameter(p.detach(), requires_grad=False)
    assert not frozen.requires_grad


def test_distribute_tensor_keeps_requires_grad_and_makes_a_leaf() -> None:
    plain = numbers(4, 4).requires_grad_()
    x = distribute_tensor(plain * 2, virtual(2), [Shard(0)])
    assert x.requires_grad and x.is_leaf
    assert not distribute_tensor(numbers(4), virtual(2), [Shard(0)]).requires_grad


# --- gradients ----------------------------------------------------------------------------------


def test_the_gradient_of_a_replicated_leaf_is_reduced_once() -> None:
    mesh = virtual(4)
    x = distribute_tensor(numbers(4, 5), mesh, [Shard(0)])
    w = distribute_tensor(numbers(5, 3), mesh, [Replicate()]).requires_grad_()
    out = (x @ w).sum()
    with CommDebugMode() as seen:
        out.backward()
    assert seen.get_comm_counts() == {"all_reduce": 1}
    assert w.grad.placements == (Replicate(),)


def test_the_gradient_of_a_sharded_leaf_is_scattered() -> None:
    mesh = virtual(4)
    x = distribute_tensor(numbers(12, 5), mesh, [Shard(0)])
    w = distribute_tensor(numbers(8, 5), mesh, [Shard(0)]).requires_grad_()
    out = (x @ w.redistribute(placements=[Replicate()]).t()).sum()
    with CommDebugMode() as seen:
        out.backward()
    assert seen.get_comm_counts() == {"reduce_scatter": 1}
    assert w.grad.placements == (Shard(0),)


def test_a_leaf_used_twice_is_reduced_once() -> None:
    mesh, a, b = virtual(2), numbers(6, 4), numbers(4, 4)
    plain = b.clone().requires_grad_()
    ((a @ plain) @ plain).sum().backward()
    x = distribute_tensor(a, mesh, [Shard(0)])
    w = distribute_tensor(b, mesh, [Replicate()]).requires_grad_()
    out = ((x @ w) @ w).sum()
    with CommDebugMode() as seen:
        out.backward()
    assert seen.get_comm_counts() == {"all_reduce": 1}
    torch.testing.assert_close(w.grad.full_tensor(), plain.grad)


def test_partial_gradients_accumulate_without_communication() -> None:
    mesh, a, b = virtual(2), numbers(6, 4), numbers(4, 4)
    plain = b.clone().requires_grad_()
    x = distribute_tensor(a, mesh, [Shard(0)])
    w = distribute_tensor(b, mesh, [Replicate()]).requires_grad_()
    with CommDebugMode() as seen, keep_partial_grads():
        for _ in range(3):
            (x @ w).sum().backward()
    for _ in range(3):
        (a @ plain).sum().backward()
    assert seen.get_total_counts() == 0
    assert w.grad.placements == (Partial(),)
    torch.testing.assert_close(w.grad.full_tensor(), plain.grad)
    (x @ w).sum().backward()  # from here on reduced again
    (a @ plain).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_gradients_accumulate_in_the_layout_of_the_leaf(place: Any) -> None:
    mesh, a, b = virtual(3), numbers(7, 4), numbers(4, 5)
    plain = b.clone().requires_grad_()
    w = spread(b.clone().requires_grad_(), mesh, [place])
    for batch in (Shard(0), Shard(1), Replicate()):
        (a @ plain).square().sum().backward()
        (distribute_tensor(a, mesh, [batch]) @ w).square().sum().backward()
    assert w.grad.placements == (Replicate() if place.is_partial() else place,)
    torch.testing.assert_close(w.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_a_plain_parameter_gets_a_plain_whole_gradient(place: Any) -> None:
    mesh, a = virtual(2), numbers(7, 5)
    want, have = make_model(), make_model()
    want(a).square().sum().backward()
    have(spread(a, mesh, [place])).square().sum().backward()
    for p, q in zip(have.parameters(), want.parameters(), strict=True):
        assert type(p.grad) is torch.Tensor
        torch.testing.assert_close(p.grad, q.grad)


def test_a_plain_non_leaf_gets_a_plain_gradient() -> None:
    plain = numbers(5).requires_grad_()
    x = distribute_tensor(numbers(7, 5), virtual(2), [Shard(0)])
    scale = plain.exp()
    (x * scale).sum().backward()
    torch.testing.assert_close(plain.grad, plain.exp() * x.full_tensor().sum(0))


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_second_derivatives(place: Any) -> None:
    mesh, a = virtual(2), numbers(5, 3)

    def penalty(x: Any) -> Any:
        (first,) = torch.autograd.grad((x.tanh() @ x.t()).sum(), x, create_graph=True)
        return first, first.square().sum()

    plain = a.clone().requires_grad_()
    x = spread(a.clone().requires_grad_(), mesh, [place])
    (want, total), (have, ours) = penalty(plain), penalty(x)
    torch.testing.assert_close(have.full_tensor(), want)
    total.backward()
    ours.backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def test_gradients_through_a_redistribution_and_back() -> None:
    mesh, a = virtual(2, 2), numbers(5, 6)
    plain = a.clone().requires_grad_()
    (plain.exp() * numbers(5, 6, seed=2)).sum().backward()
    for src in LAYOUTS:
        for dst in LAYOUTS:
            x = distribute_tensor(a, mesh, src).requires_grad_()
            y = x.exp().redistribute(placements=dst) * numbers(5, 6, seed=2)
            y.sum().backward()
            assert x.grad.placements == src
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def test_a_gradient_set_by_hand_and_cleared() -> None:
    w = distribute_tensor(numbers(4, 4), virtual(2), [Shard(0)]).requires_grad_()
    (w * 2).sum().backward()
    w.grad.mul_(3)
    assert torch.equal(w.grad.full_tensor(), torch.full((4, 4), 6.0, dtype=torch.float64))
    w.grad = None
    (w * 2).sum().backward()
    assert torch.equal(w.grad.full_tensor(), torch.full((4, 4), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("cls", [nn.TransformerEncoderLayer, nn.LSTM, nn.Conv1d, nn.BatchNorm1d])
def test_modules_of_pytorch_run_unchanged(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    if cls is nn.TransformerEncoderLayer:
        model: nn.Module = cls(4, 2, 8, dropout=0.0, batch_first=True)
    elif cls is nn.BatchNorm1d:
        model = cls(3)
    else:
        model = cls(4 if cls is nn.LSTM else 3, 4, *([3] if cls is nn.Conv1d else []))
    model, x = model.double(), numbers(5, 3, 4)
    mesh = virtual(2)
    ours = copy.deepcopy(model)
    for module in ours.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    outs = []
    for each, data in ((model, x), (ours, distribute_tensor(x, mesh, [Shard(0)]))):
        out = each(data)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        outs.append(out)
    torch.testing.assert_close(outs[1].full_tensor(), outs[0])
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def penalty(w: Any, x: Any) -> Any:
    """The sum of a weight and of a gradient that depends on it."""
    (grad,) = torch.autograd.grad((w * x**2).sum(), x, create_graph=True)
    return w.sum() + grad.sum()


def test_a_gradient_of_a_plain_tensor_can_be_differentiated_again() -> None:
    w = spread(torch.ones(2), virtual(2), [Shard(0)]).requires_grad_()
    x = torch.full((2,), 3.0, requires_grad=True)
    penalty(w, x).backward()
    assert w.grad.full_tensor().tolist() == [7.0, 7.0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
@pytest.mark.parametrize("kind", [torch.Tensor.requires_grad_, torch.nn.Parameter])
def test_the_gradient_of_a_copy_of_a_plain_tensor_is_plain(copied: Any, kind: Any) -> None:
    x = spread(torch.arange(4.0), virtual(2), [Shard(0)])
    w = kind(torch.ones(4))
    (w * x).sum().backward()
    w.grad = None
    other = copied(w)
    (other * x).sum().backward()
    assert not isinstance(other.grad, DTensor)
    assert other.grad.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("kept", [1, 2])
def test_a_backward_after_partial_gradients(place: Placement, kept: int) -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    weight, batch = torch.randn(5, 4, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    plain = weight.clone().requires_grad_()
    leaf = sw.distribute_tensor(weight, mesh, [place]).requires_grad_()
    rows = sw.distribute_tensor(batch, mesh, [Shard(0)])
    with sw.keep_partial_grads():
        for _ in range(kept):
            (rows @ leaf).square().sum().backward()
            (batch @ plain).square().sum().backward()
    assert leaf.grad is not None and leaf.grad.placements[0].is_partial()
    (rows @ leaf).sin().sum().backward()
    (batch @ plain).sin().sum().backward()
    assert leaf.grad.placements == (place,)
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)
    (rows @ leaf).cos().sum().backward()
    (batch @ plain).cos().sum().backward()
    assert leaf.grad.placements == (place,)
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)


def test_gradients_that_are_asked_for_leave_the_leaf_alone() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    leaf = sw.distribute_tensor(torch.ones(4, 2), mesh, [Replicate()]).requires_grad_()
    rows = sw.distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [Shard(0)])
    with sw.keep_partial_grads():
        (rows @ leaf).sum().backward()
    (asked,) = torch.autograd.grad((rows @ leaf).square().sum(), leaf)
    assert asked.placements == (Replicate(),)
    assert leaf.grad is not None and leaf.grad.placements[0].is_partial()


def rms_norm(weight: Any, x: Any) -> Any:
    """As many models write it by hand."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


@pytest.mark.parametrize("norm", [rms_norm, lambda w, x: nn.functional.rms_norm(x, (6,), w)])
def test_a_norm_before_a_column_parallel_layer_takes_one_collective_in_the_backward(
    norm: Any,
) -> None:
    """The gradient that arrives is reduced; what the norm makes of it is local then."""
    mesh, values = virtual(2), [numbers(6), numbers(6, 8, seed=1), numbers(8, 6, seed=2)]
    want = [value.clone().requires_grad_() for value in values]
    have = [
        distribute_tensor(value, mesh, [at]).requires_grad_()
        for value, at in zip(values, [Replicate(), Shard(1), Shard(0)], strict=True)
    ]

    def block(leaves: list[Any], x: Any) -> Any:
        scale, up, down = leaves
        return x + norm(scale, x) @ up @ down

    x = numbers(2, 3, 6, seed=3)
    for leaves, given in ((want, x), (have, distribute_tensor(x, mesh, [Replicate()]))):
        y = given.clone().requires_grad_()
        loss = block(leaves, block(leaves, y)).square().sum()
        with CommDebugMode() as comm:
            loss.backward()
    assert comm.get_comm_counts() == {"all_reduce": 2}
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)
