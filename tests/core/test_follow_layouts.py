"""Adapters and optimizer state that join a sharded model later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import (
    DTensor,
    Replicate,
    Shard,
    follow_layouts,
    full_state_dict,
    save_safetensors,
    shard_module,
)
from shardwise.errors import LayoutError

from ..compare import numbers, virtual


class Lora(nn.Module):
    """A linear layer with an adapter, with the names that peft gives them."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base_layer(x)
        return found + self.lora_B["default"](self.lora_A["default"](self.lora_dropout(x))) * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 16), nn.Linear(16, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x + self.down(torch.relu(self.up(x))))
        return found


PLAN: Any = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}


def adapted(when: str) -> nn.Module:
    """A model with adapters: on one device, or added before or after it is sharded."""
    torch.manual_seed(0)
    model = Block()
    mesh = virtual(2, 2, names=("dp", "tp"))
    if when in ("after", "follow"):
        shard_module(model, mesh, PLAN)
    torch.manual_seed(1)
    for name in ("up", "down"):
        setattr(model, name, Lora(getattr(model, name)))
    if when == "before":
        plan = {
            "up.base_layer.*": {"tp": Shard(0)},
            "down.base_layer.weight": {"tp": Shard(1)},
            "up.lora_B.*": {"tp": Shard(0)},
            "down.lora_A.*": {"tp": Shard(1)},
        }
        shard_module(model, mesh, plan)
    if when == "follow":
        follow_layouts(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model


def trained(model: nn.Module, optimizer: Any, count: int = 4) -> list[float]:
    losses = []
    torch.manual_seed(5)
    for _ in range(count):
        optimizer.zero_grad()
        loss = (model(numbers(5, 6).float()) - numbers(5, 6, seed=1).float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def optimizer_of(model: nn.Module) -> Any:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)


@pytest.mark.parametrize("when", ["before", "after", "follow"])
def test_lora_trains_as_on_one_device(when: str) -> None:
    plain, model = adapted("plain"), adapted(when)
    expected = trained(plain, optimizer_of(plain))
    assert trained(model, optimizer_of(model)) == pytest.approx(expected, rel=1e-5)
    state = full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    frozen = [each for each in model.parameters() if not each.requires_grad]
    assert len(frozen) == 6 and all(each.grad is None for each in frozen)


def test_adapters_follow_their_layer(tmp_path: Any) -> None:
    model: Any = adapted("follow")
    places = {name: value.placements[1] for name, value in model.named_parameters()}
    assert places["up.lora_A.default.weight"] == places["down.lora_B.default.weight"] == Replicate()
    assert places["up.lora_B.default.weight"] == Shard(0)
    assert places["down.lora_A.default.weight"] == Shard(1)
    before = dict(model.named_parameters())
    follow_layouts(model)  # nothing is left to do
    assert all(before[name] is value for name, value in model.named_parameters())
    save_safetensors(model, tmp_path)


def test_whole_optimizer_state_follows_its_parameters() -> None:
    plain = adapted("plain")
    of_plain = optimizer_of(plain)
    trained(plain, of_plain, 2)
    model = adapted("follow")
    optimizer = optimizer_of(model)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(of_plain.state_dict()))  # they would share "step"
    follow_layouts(model, optimizers=[optimizer])
    for parameter, state in optimizer.state.items():
        assert isinstance(state["exp_avg"], DTensor) and not isinstance(state["step"], DTensor)
        assert state["exp_avg"].placements == parameter.placements
    assert trained(model, optimizer) == pytest.approx(trained(plain, of_plain), rel=1e-5)


def test_a_model_that_is_not_sharded() -> None:
    with pytest.raises(LayoutError, match="0 meshes"):
        follow_layouts(Block())


def test_memory_of_a_dtensor_is_refused_with_what_to_use() -> None:
    model: Any = adapted("follow")
    with pytest.raises(LayoutError, match="save_safetensors"):
        model.up.base_layer.weight.storage()
