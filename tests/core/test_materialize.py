"""Models built on the meta device: sharded first, then given memory and one device's values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.models import others, transformer, vision
from torch import nn

from shardwise import (
    DTensor,
    Replicate,
    Shard,
    load_safetensors,
    materialize,
    save_safetensors,
    shard_module,
)
from shardwise.errors import LayoutError

from ..compare import ints, virtual

R, S0, S1 = Replicate(), Shard(0), Shard(1)
EVERYWHERE: Any = {"*": {"dp": S0, "tp": Shard(-1)}}


def mesh() -> Any:
    return virtual(2, 2, names=("dp", "tp"))


def on_meta(make: Callable[[], Any], plan: Any = EVERYWHERE) -> Any:
    with torch.device("meta"):
        model = make()
    return shard_module(model, mesh(), plan)


class WithInitWeights(nn.Module):
    """As in Hugging Face and torchtitan: the model knows how to initialise its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.position = nn.Parameter(torch.empty(4, 6))
        self.register_buffer("angles", torch.empty(5), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        for part in (self.up, self.down):
            nn.init.trunc_normal_(part.weight, std=0.02)
            part.bias.data.zero_()
        self.position.data.normal_()
        with torch.no_grad():
            self.angles.copy_(torch.arange(5.0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt, tied": lambda: transformer.GPT(layers=2),
    "llama": lambda: transformer.Llama(layers=1),
    "lstm": others.LSTM,
    "resnet with buffers": vision.ResNet,
    "layer of pytorch": lambda: nn.TransformerDecoderLayer(8, 2, 16),
    "init_weights": WithInitWeights,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_values_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(3)
    plain = MODELS[name]()
    model = on_meta(MODELS[name])
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    held = list(model.parameters())
    torch.manual_seed(3)
    assert materialize(model) is model
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    want = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    have = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert have.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(have[key].full_tensor(), value), key
        assert have[key].requires_grad == value.requires_grad


def test_ranks_hold_memory_for_their_shards_alone() -> None:
    model = materialize(on_meta(lambda: nn.Linear(8, 6, bias=False)))
    assert [tuple(part.shape) for part in model.weight.to_local().parts] == [(3, 4)] * 4
    assert not model.weight.to_local().parts[0].is_meta


def test_an_optimizer_made_on_meta_trains() -> None:
    torch.manual_seed(0)
    plain = transformer.GPT(layers=1)
    with torch.device("meta"):
        model = transformer.GPT(layers=1)
    made = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    shard_module(model, mesh(), {"embed.weight": {"tp": S0}, "*.qkv.*": {"tp": S0}})
    torch.manual_seed(0)
    materialize(model)
    assert model.head.weight is model.embed.weight
    losses = []
    for each, optimizer in zip((plain, model), made, strict=True):
        torch.manual_seed(1)
        for step in range(2):
            optimizer.zero_grad()
            loss = each(ints(2, 5, high=9, seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-5)


def test_a_function_that_initialises() -> None:
    def init(part: nn.Module) -> None:
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor.fill_(2)

    model = materialize(on_meta(vision.ViT), init)
    assert all((p.full_tensor() == 2).all() for p in model.parameters())


class WithoutInit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4, 4).tril())


def test_what_nobody_initialises_is_an_error_and_no_memory() -> None:
    model = on_meta(WithoutInit)
    with pytest.raises(LayoutError) as caught:
        materialize(model)
    assert str(caught.value) == (
        "materialize: nobody initialised scale, mask: no reset_parameters() or init_weights() "
        "wrote there. Give materialize(model, init), where init(submodule) does it, or make these "
        "tensors outside of torch.device('meta'). They are on the meta device still."
    )
    assert model.scale.is_meta and model.mask.is_meta and not model.linear.weight.is_meta


def test_an_error_while_initialising_leaves_no_memory_behind() -> None:
    def init(part: nn.Module) -> None:
        raise RuntimeError("not today")

    model = on_meta(WithoutInit)
    with pytest.raises(RuntimeError, match="not today"):
        materialize(model, init)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_what_has_values_keeps_them() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1] = nn.Linear(4, 4)
    model[1].register_buffer("mask", torch.ones(4))
    values = model[1].weight.detach().clone()
    shard_module(model, mesh(), EVERYWHERE)
    materialize(model)
    assert torch.equal(model[1].weight.full_tensor(), values)
    assert not model[0].weight.is_meta


def test_what_a_file_lacks_is_initialised_after_loading(tmp_path: Path) -> None:
    plain = WithInitWeights()
    save_safetensors(plain, tmp_path)
    model = on_meta(WithInitWeights)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    load_safetensors(model, tmp_path)
    assert model.angles.is_meta  # a buffer that is in no file
    view, parameters = model.up.weight.detach(), list(model.parameters())
    materialize(model)
    assert torch.equal(model.angles.full_tensor(), torch.arange(5.0))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), value)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(parameter.requires_grad for parameter in parameters)
    model.up(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert torch.equal(view.full_tensor(), model.up.weight.full_tensor())  # the same memory


def test_a_model_that_is_not_sharded() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(LayoutError) as caught:
        materialize(model)
    assert str(caught.value) == (
        "materialize: weight is a plain tensor on the meta device. Call shard_module first, which "
        "says which rank holds what; with the plan {} all ranks hold all."
    )


@pytest.mark.parametrize("make", [transformer.GPT, others.LSTM], ids=["gpt", "lstm"])
def test_to_empty_and_loading(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    saved = make().state_dict()
    model = on_meta(make)
    weight = model.embed.weight
    places = [p.placements for p in model.parameters()]
    model.to_empty(device="cpu")
    model.load_state_dict(saved)
    assert model.embed.weight is weight and isinstance(weight, nn.Parameter)
    assert [p.placements for p in model.parameters()] == places
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor) and torch.equal(value.full_tensor(), saved[name])
    again = on_meta(make)
    again.load_state_dict(saved, assign=True)
    for name, value in again.state_dict().items():
        assert value.placements == model.state_dict()[name].placements
    assert torch.equal(again.embed.weight.full_tensor(), saved["embed.weight"])


def test_shapes_are_known_before_there_are_values() -> None:
    model = on_meta(lambda: transformer.Llama(layers=1))
    logits = model(torch.zeros(2, 5, dtype=torch.long, device="meta"))
    assert logits.is_meta and logits.shape == (2, 5, transformer.VOCAB)
