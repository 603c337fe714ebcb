"""PyTorch's `get_model_state_dict` and its like: what they do with a sharded model, and what can be
done with what they return."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import shardwise as sw
from shardwise import DTensor, Shard
from shardwise.errors import LayoutError, MeshError
from shardwise.tensor import saving

from ..compare import ints
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
PLAN = {
    "embedding.weight": {"tp": Shard(0)},  # of size 7: uneven
    "inner.weight": {"tp": Shard(1)},
    "frozen.weight": {"tp": Shard(0)},
}


class Model(nn.Module):
    """With a tied and a frozen weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([1.0, -2.0, 0.5, 3.0, 1.5, -1.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(self.embedding(tokens))) * self.scale
        found: torch.Tensor = self.head(self.frozen(hidden))
        return found


def train(model: nn.Module, optimizer: Any, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        tokens = ints(4, 3, high=7, seed=seed)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(sharded: bool, seed: int = 0, steps: int = 2) -> tuple[nn.Module, Any]:
    warnings.filterwarnings("ignore", module="torch")
    torch.manual_seed(seed)
    model = Model()
    if sharded:
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sw.shard_module(model, mesh, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, range(steps))
    return model, optimizer


def compare(found: Any, expected: Any) -> None:
    """A nested state with DTensors, and one without."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            compare(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    else:
        assert found == expected


# --- get -----------------------------------------------------------------------------------------


def got() -> None:
    (model, optimizer), (plain, of_plain) = made(True), made(False)
    for options in (
        StateDictOptions(),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(ignore_frozen_params=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(full_state_dict=True),
    ):
        ours = get_state_dict(model, optimizer, options=options)
        theirs = get_state_dict(plain, of_plain, options=options)
        compare(ours[0], theirs[0])
        compare(ours[1], theirs[1])
    compare(
        get_model_state_dict(model, submodules={model.inner}),
        get_model_state_dict(plain, submodules={plain.inner}),
    )
    model.embedding.weight.data.zero_()  # the state is that of the model, not a copy
    assert not get_model_state_dict(model)["head.weight"].full_tensor().any()


def test_states_are_those_of_one_device(processes: Pools) -> None:
    processes(2).run(got)


# --- set -----------------------------------------------------------------------------------------

WHOLE = StateDictOptions(full_state_dict=True)
OF_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def sharded_state() -> Any:
    return get_state_dict(*made(True))


def flat_state() -> Any:
    return get_state_dict(*made(True), options=FLAT)


def whole_state() -> Any:
    return sw.full_state_dict(*sharded_state())


def plain_state() -> Any:
    return get_state_dict(*made(False))


def state_of_rank_0() -> Any:
    return sw.full_state_dict(*sharded_state(), first_rank_only=True)


SOURCES = [
    (sharded_state, StateDictOptions()),
    (sharded_state, StateDictOptions(strict=False)),
    (sharded_state, StateDictOptions(cpu_offload=True)),
    (sharded_state, WHOLE),
    (flat_state, FLAT),
    (whole_state, StateDictOptions()),
    (whole_state, WHOLE),
    (whole_state, OF_RANK_0),
    (plain_state, WHOLE),
    (state_of_rank_0, OF_RANK_0),
]


def put(steps: int) -> None:
    """Every state into a model with other values, which then trains as one device does."""
    plain, of_plain = made(False)
    expected, expected_state = sw.full_state_dict(plain, of_plain)
    losses = train(plain, of_plain, range(5, 8))
    for source, options in SOURCES:
        model, optimizer = made(True, seed=1, steps=steps)
        weights, state = source()
        if source is state_of_rank_0:
            # set_state_dict would wait forever: PyTorch skips the model where its dict is empty.
            set_model_state_dict(model, weights, options=options)
            set_optimizer_state_dict(model, optimizer, state, options=options)
        else:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=weights,
                optim_state_dict=state,
                options=options,
            )
        sw.follow_layouts(model, optimizers=[optimizer])
        compare(model.state_dict(), expected)
        compare(optimizer.state_dict()["state"], expected_state["state"])
        assert model.head.weight is model.embedding.weight and not model.frozen.weight.requires_grad
        assert [model.get_parameter(name).placements for name in PLAN] == [
            (place["tp"],) for place in PLAN.values()
        ]
        for parameter, held in optimizer.state.items():
            assert isinstance(parameter, DTensor)
            assert held["exp_avg"].placements == parameter.placements
        assert train(model, optimizer, range(5, 8)) == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("steps", [0, 1])
def test_states_are_loaded(processes: Pools, steps: int) -> None:
    processes(2).run(put, steps, timeout=120)


# --- what was asked for whole is sharded: what follows is right, or an error that says so --------


def used_as_whole(folder: str) -> list[str]:
    model, _ = made(True)
    expected = made(False)[0].state_dict()
    state = get_model_state_dict(model, options=WHOLE)
    other = made(False, seed=1)[0]
    other.load_state_dict(state)
    compare(other.state_dict(), expected)
    assert all(type(value) is torch.Tensor for value in other.state_dict().values())
    texts = []
    mine = f"{folder}/{dist.get_rank()}"
    for write in (
        lambda: save_file(state, mine),
        lambda: save_model(model, mine),
        lambda: load_model(model, mine),
    ):
        save_file({"x": torch.ones(1)}, mine)
        with pytest.raises(LayoutError) as error:
            write()
        texts.append(str(error.value))
    # What the first rank alone has is sharded, too.
    of_first = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert bool(of_first) == sw.is_first_rank()
    if sw.is_first_rank():
        saving._warn_of_parts.cache_clear()
        with pytest.warns(UserWarning, match="full_state_dict") as caught:
            torch.save(of_first, f"{folder}/state.pt")
        assert len(caught) == 1 and caught[0].filename == __file__
    dist.barrier()
    if not sw.is_first_rank():
        with pytest.raises(LayoutError, match="full_state_dict"):
            torch.load(f"{folder}/state.pt")
    return texts


def test_sharded_values_are_not_taken_for_whole_ones(processes: Pools, tmp_path: Path) -> None:
    for save, save_whole, load in processes(2).run(used_as_whole, str(tmp_path)):
        assert "full_state_dict" in save and "save_safetensors" in save_whole
        assert "load_safetensors" in load
    with pytest.raises(MeshError, match="full_state_dict"):
        torch.load(tmp_path / "state.pt")  # in one process


def replicated(folder: str) -> None:
    """A rank that holds the whole value saves it without a word."""
    mesh = sw.init_device_mesh("cpu", (2,))
    saving._warn_of_parts.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(sw.distribute_tensor(torch.ones(3), mesh), f"{folder}/{dist.get_rank()}")


def test_whole_values_are_saved_without_a_warning(processes: Pools, tmp_path: Path) -> None:
    processes(2).run(replicated, str(tmp_path))
