"""`distribute_module`: every parameter stays the object that others hold, and becomes a DTensor."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.errors import LayoutError

from ..compare import ints, numbers, virtual

WIDTH, VOCABULARY = 6, 7


class Tied(nn.Module):
    """An embedding whose weight is the head's, a layer with weak references, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", numbers(WIDTH, dtype=torch.float32))
        self.register_buffer("places", torch.arange(5).expand(1, -1), persistent=False)
        self.same_scale = self.scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.inner(self.embedding(tokens))[0] * self.same_scale)
        return found


def shard(name: str, part: nn.Module, mesh: Any) -> None:
    for key, value in list(part.named_parameters(recurse=False)):
        places = [Shard(0)] * (mesh.ndim - 1) + [Shard(value.ndim - 1)]
        part.register_parameter(key, nn.Parameter(distribute_tensor(value, mesh, places)))


def shard_embedding(name: str, part: nn.Module, mesh: Any) -> None:
    if isinstance(part, nn.Embedding):
        shard(name, part, mesh)


def steps(model: nn.Module, optimizer: Any, count: int) -> list[float]:
    losses = []
    for step in range(count):
        tokens = ints(4, 3, high=VOCABULARY, seed=step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "adamw, foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.3),  # has state from the beginning
}


@pytest.mark.parametrize("when", ["before", "after", "trained", "trained, named"])
@pytest.mark.parametrize("partition", [None, shard, shard_embedding])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_that_of_one_device(kind: str, partition: Any, when: str) -> None:
    torch.manual_seed(0)
    plain = Tied()
    ours = copy.deepcopy(plain)
    assert len(list(plain.parameters())) == 5  # one for both ends
    make = OPTIMIZERS[kind]
    wanted, optimizer = make(plain.parameters()), make(ours.parameters())
    if when.startswith("trained"):
        assert steps(ours, optimizer, 2) == steps(plain, wanted, 2)
    named = {"optimizers": [optimizer]} if "named" in when else {}
    held = list(ours.parameters())
    distribute_module(ours, virtual(2, 2), partition, **named)
    assert all(a is b for a, b in zip(held, ours.parameters(), strict=True))
    if when == "after":
        optimizer = make(ours.parameters())
    assert steps(ours, optimizer, 4) == pytest.approx(steps(plain, wanted, 4), rel=1e-5)
    assert ours.head.weight is ours.embedding.weight
    for ref, weight in zip(ours.inner._flat_weight_refs, ours.inner.parameters(), strict=True):
        assert ref() is weight  # type: ignore[misc]
    assert ours.same_scale is ours.scale
    for tensor in (*ours.parameters(), *ours.buffers()):
        assert isinstance(tensor, DTensor)
    if partition is not None:
        assert not ours.head.weight._spec.is_replicated()
    if named:
        state = optimizer.state[ours.head.weight]
        moments = [value for value in state.values() if value is not None and value.ndim]
        assert moments
        for value in moments:
            assert value._spec is ours.head.weight._spec


def test_gradients_stay_in_the_layout_of_their_parameter() -> None:
    torch.manual_seed(0)
    plain = Tied()
    ours = copy.deepcopy(plain)
    tokens = ints(4, 3, high=VOCABULARY)
    for model in (plain, ours):
        model(tokens).square().sum().backward()
    held = ours.head.weight.grad
    distribute_module(ours, virtual(2, 2), shard)
    assert ours.head.weight.grad is held
    for model in (plain, ours):
        model(-tokens + VOCABULARY - 1).square().sum().backward()  # adds to what is there
    for want, have in zip(plain.parameters(), ours.parameters(), strict=True):
        assert have.grad._spec.placements == have.placements
        torch.testing.assert_close(have.grad.full_tensor(), want.grad, rtol=1e-4, atol=1e-5)


def test_attributes_flags_and_persistence_stay() -> None:
    ours = Tied()
    ours.embedding.weight.tag = "both"
    ours.inner.weight_hh_l0.requires_grad_(False)
    ours.inner.bias_hh_l0.requires_grad_(False)
    ours.scale.unit = "metres"
    ours.embedding.weight.sparse_hint = [1]

    def some(name: str, part: nn.Module, mesh: Any) -> None:
        if name == "inner":  # the default of nn.Parameter does not make it train again
            made = nn.Parameter(distribute_tensor(part.weight_hh_l0, mesh, [Shard(0)]))
            made.tag = "inner"
            part.weight_hh_l0 = made
            frozen = distribute_tensor(part.weight_ih_l0, mesh, [Shard(0)])
            part.weight_ih_l0 = nn.Parameter(frozen, requires_grad=False)

    names = list(ours.state_dict())
    distribute_module(ours, virtual(2), some)
    assert list(ours.state_dict()) == names  # `places` is still none of them
    assert ours.head.weight.tag == "both" and ours.head.weight.sparse_hint == [1]
    assert ours.scale.unit == "metres"
    assert ours.inner.weight_hh_l0.tag == "inner"
    flags = {name: value.requires_grad for name, value in ours.named_parameters()}
    assert flags == {
        "embedding.weight": True,
        "inner.weight_ih_l0": False,
        "inner.weight_hh_l0": False,
        "inner.bias_ih_l0": True,
        "inner.bias_hh_l0": False,
    }
    again = copy.deepcopy(ours)
    assert again.head.weight is again.embedding.weight and again.head.weight.tag == "both"
    loaded = pickle.loads(pickle.dumps(ours))
    assert loaded.head.weight is loaded.embedding.weight


@pytest.mark.parametrize("places", [[Replicate()], [Shard(0)], [Shard(1)]], ids=str)
def test_hooks_go_on_and_can_be_removed(places: Any) -> None:
    def as_places(name: str, part: nn.Module, mesh: Any) -> None:
        part.weight = nn.Parameter(distribute_tensor(part.weight, mesh, places))

    layer = nn.Linear(4, 6, bias=False)
    seen: list[Any] = []
    first = layer.weight.register_hook(lambda g: seen.append(("grad", g._spec.placements)))
    twice = layer.weight.register_hook(lambda g: g * 2)
    last = layer.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(("after", p.grad._spec.placements))
    )
    distribute_module(layer, virtual(2), as_places)
    x = distribute_tensor(numbers(4, 4, dtype=torch.float32), virtual(2), [Shard(0)])

    def gradient() -> torch.Tensor:
        seen.clear()
        layer.weight.grad = None
        layer(x).sum().backward()
        return layer.weight.grad.full_tensor()

    whole = x.full_tensor().sum(0).expand(6, 4)
    assert torch.allclose(gradient(), 2 * whole)
    assert seen == [("grad", tuple(places)), ("after", tuple(places))]
    twice.remove()
    assert torch.allclose(gradient(), whole)
    first.remove()
    assert torch.allclose(gradient(), whole) and seen == [("after", tuple(places))]
    last.remove()
    assert torch.allclose(gradient(), whole) and seen == []
    added = layer.weight.register_hook(lambda g: g * 3)
    assert torch.allclose(gradient(), 3 * whole)
    added.remove()
    assert layer.weight.grad._spec.placements == tuple(places)


def test_hooks_of_what_a_partition_function_makes_can_be_removed() -> None:
    handles: list[Any] = []

    def with_hook(name: str, part: nn.Module, mesh: Any) -> None:
        made = nn.Parameter(distribute_tensor(part.weight, mesh, [Shard(0)]))
        handles.append(made.register_hook(lambda g: g * 2))
        part.weight = made

    layer = distribute_module(nn.Linear(4, 6, bias=False), virtual(2), with_hook)
    layer(torch.ones(1, 4)).sum().backward()
    assert torch.equal(layer.weight.grad.full_tensor(), torch.full((6, 4), 2.0))
    handles[0].remove()
    layer.weight.grad = None
    layer(torch.ones(1, 4)).sum().backward()
    assert torch.equal(layer.weight.grad.full_tensor(), torch.ones(6, 4))


def as_it_was(model: nn.Module) -> dict[str, Any]:
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: (id(value), type(value), value.detach().clone()) for name, value in every}


def is_as_it_was(model: nn.Module, before: dict[str, Any]) -> bool:
    now = as_it_was(model)
    return before.keys() == now.keys() and all(
        a[:2] == b[:2] and torch.equal(a[2], b[2]) and type(b[2]) is torch.Tensor
        for a, b in zip(before.values(), now.values(), strict=True)
    )


class Uncommon(nn.Parameter):
    pass


def graph(model: Any) -> Any:
    return model(ints(4, 3, high=VOCABULARY)).sum()


def view(model: Any) -> Any:
    return model.inner.bias_hh_l0.view(2, -1)


def quiet_view(model: Any) -> Any:
    with torch.no_grad():
        return model.scale[1:]


def view_of_base(model: Any) -> Any:
    base = torch.ones(3, WIDTH)
    model.scale = base[1]
    return base


def same_memory(model: Any) -> None:
    model.inner.bias_hh_l0 = nn.Parameter(model.inner.bias_ih_l0.data)


def subclass(model: Any) -> None:
    model.inner.bias_hh_l0 = Uncommon(torch.ones(4 * WIDTH))


def sparse(model: Any) -> None:
    model.register_buffer("more", torch.eye(3).to_sparse())


def own_name(model: Any) -> None:
    model.head.weight._spec = 3


def grad_view(model: Any) -> None:
    model.inner.bias_hh_l0.grad = torch.ones(2, 4 * WIDTH)[1]


@pytest.mark.parametrize("partition", [None, shard])
@pytest.mark.parametrize(
    "trouble",
    [
        graph,
        view,
        quiet_view,
        view_of_base,
        same_memory,
        subclass,
        sparse,
        own_name,
        grad_view,
    ],
)
def test_what_cannot_be_exchanged_raises_before_anything_changes(
    trouble: Any, partition: Any
) -> None:
    model = Tied()
    held = trouble(model)
    before = as_it_was(model) if trouble is not sparse else None
    with pytest.raises(LayoutError, match=r"Nothing was changed"):
        distribute_module(model, virtual(2), partition)
    if before is not None:
        assert is_as_it_was(model, before)
    if trouble is graph:
        held.backward()
        assert model.head.weight.grad is not None
    assert not any(isinstance(p, DTensor) for p in (*model.parameters(), *model.buffers()))


def test_two_layouts_of_one_tensor_are_refused() -> None:
    def differently(name: str, part: nn.Module, mesh: Any) -> None:
        if name in ("embedding", "head"):
            place = Shard(0 if name == "head" else 1)
            part.weight = nn.Parameter(distribute_tensor(part.weight, mesh, [place]))

    model = Tied()
    before = as_it_was(model)
    with pytest.raises(LayoutError, match=r"embedding\.weight and head\.weight are one tensor"):
        distribute_module(model, virtual(2), differently)
    assert is_as_it_was(model, before)


def test_an_error_of_the_partition_function_changes_nothing() -> None:
    def fails(name: str, part: nn.Module, mesh: Any) -> None:
        shard(name, part, mesh)
        if name == "head":
            raise KeyError("head")

    model = Tied()
    before = as_it_was(model)
    with pytest.raises(KeyError, match="head"):
        distribute_module(model, virtual(2), fails)
    assert is_as_it_was(model, before)


def test_what_a_state_dict_held_before_keeps_its_values() -> None:
    model = Tied()
    state = model.state_dict()
    whole = {name: value.clone() for name, value in state.items()}
    distribute_module(model, virtual(2), shard)
    with torch.no_grad():
        model.head.weight.zero_()
    assert all(type(state[name]) is torch.Tensor for name in whole)
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    model.load_state_dict(state)
    assert torch.equal(model.head.weight.full_tensor(), whole["head.weight"])


@pytest.mark.parametrize("kind", ["plain", "parameters", "DTensors"])
def test_assigned_states_keep_the_layouts(kind: str) -> None:
    torch.manual_seed(3)
    source, model = Tied(), distribute_module(Tied(), virtual(2, 2), shard)
    layouts = {name: value._spec.placements for name, value in model.state_dict().items()}
    state: dict[str, Any] = source.state_dict()
    if kind == "parameters":
        state = {name: nn.Parameter(value) for name, value in state.items()}
    if kind == "DTensors":
        state = distribute_module(source, virtual(2, 2)).state_dict()
        layouts = {name: (Replicate(), Replicate()) for name in layouts}
    result = model.load_state_dict(state, assign=True)
    assert not result.missing_keys and not result.unexpected_keys
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor) and value.placements == layouts[name]
        want: Any = source.state_dict()[name]
        want = want.full_tensor() if isinstance(want, DTensor) else want
        assert torch.equal(value.full_tensor(), want)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, "head.weight": torch.ones(2, 2)}, assign=True)
    assert isinstance(copy.deepcopy(model).head.weight, DTensor)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(
        torch.load(buffer, weights_only=False).head.weight.full_tensor(),
        model.head.weight.full_tensor(),
    )


def test_functions_of_inputs_and_outputs_may_leave_out_the_module() -> None:
    mesh = virtual(2)
    calls: list[str] = []

    def old_input(inputs: Any, mesh: Any) -> Any:
        calls.append("old in")
        return tuple(distribute_tensor(x, mesh, [Shard(0)]) for x in inputs)

    def old_output(outputs: Any, mesh: Any) -> Any:
        calls.append("old out")
        return outputs.full_tensor()

    def new_input(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        calls.append(type(module).__name__)
        return old_input(inputs, mesh)

    x = numbers(4, 3, dtype=torch.float32)
    for given in (old_input, new_input):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        with torch.no_grad():
            want = layer(x)
        distribute_module(layer, mesh, None, given, old_output)
        assert torch.allclose(layer(x), want)
    assert calls == ["old in", "old out", "Linear", "old in", "old out"]
    for given in (lambda values: values, lambda a, b, c, d: a):
        with pytest.raises(TypeError, match=r"input_fn\(module, values, mesh\)"):
            distribute_module(nn.Linear(3, 2), mesh, None, given)


def test_one_tensor_is_converted_in_place() -> None:
    from shardwise.parallel.in_place import convert

    weight = nn.Parameter(numbers(4, 3))
    whole = weight.detach().clone()
    convert(weight, virtual(2), [Shard(0)])
    assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter)
    assert weight.placements == (Shard(0),) and torch.equal(weight.full_tensor(), whole)
    with pytest.raises(LayoutError, match="Nothing was changed"):
        convert(weight, virtual(2))  # it is one already


def test_the_mesh_of_a_with_block_and_the_names_of_submodules() -> None:
    names = []

    def partition(name: str, part: nn.Module, mesh: Any) -> None:
        names.append((name, mesh.size()))
        if name == "0.inner":
            shard(name, part, mesh)

    block = nn.Sequential(nn.Sequential())
    block[0].add_module("inner", nn.Linear(4, 4))
    with virtual(2):
        assert distribute_module(block, partition_fn=partition) is block
    assert names == [("", 2), ("0", 2), ("0.inner", 2)]
    assert block[0].inner.weight.placements == (Shard(1),)
    with virtual(2):
        distribute_module(block)  # what is on the mesh stays as it is
    assert block[0].inner.weight.placements == (Shard(1),)


def test_inputs_and_outputs_are_changed_together() -> None:
    mesh, plain = virtual(3), nn.Linear(5, 4)
    ours = distribute_module(
        copy.deepcopy(plain),
        mesh,
        input_fn=lambda module, given, mesh: distribute_tensor(given[0], mesh, [Shard(0)]),
        output_fn=lambda module, output, mesh: output.redistribute(placements=[Replicate()]),
    )
    x = numbers(7, 5, dtype=torch.float32)
    out = ours(x)
    assert out.placements == (Replicate(),)
    torch.testing.assert_close(out.full_tensor(), plain(x))
