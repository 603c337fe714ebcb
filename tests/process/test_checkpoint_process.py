"""`torch.distributed.checkpoint`: written by some processes, read by others on other meshes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as theirs
from torch import nn

from shardwise import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)

from ..compare import ints, layouts, numbers, spread
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


VALUES = {
    "even": numbers(8, 6),
    "uneven": numbers(7, 5, seed=1),
    "few": numbers(3, 4, seed=2),
    "blocks": numbers(12, 5, seed=3, dtype=torch.float32),
    "none": numbers(0, 3),
    "number": numbers(),
    "ints": ints(9, low=-4) - 2,
    "flags": ints(10, high=2).bool(),
}
CUTS = [(0, 7, 0, 5), (3, 3, 6, 0)]


def quietly() -> None:
    """DCP warns of its own code."""
    warnings.filterwarnings("ignore", module="torch")


def saved(mesh: Any) -> dict[str, Any]:
    """Every value in every layout on a mesh of 2 x 2, and in ragged ones."""
    state: dict[str, Any] = {}
    for name, value in VALUES.items():
        for number, places in enumerate(layouts(value, 2)):
            state[f"{name}.{number}"] = spread(value, mesh, places)
    for number, cuts in enumerate(CUTS):
        places = [Shard(0), Shard(0)]
        state[f"blocks.cut{number}"] = spread(VALUES["blocks"], mesh, places, [cuts, None])
    return state


def is_same(name: str, found: torch.Tensor) -> bool:
    """Whether a value was loaded to the last bit; one that was pending, but for rounding."""
    name, number = name.split(".")
    value = VALUES[name]
    if number.isdigit() and any(place.is_partial() for place in layouts(value, 2)[int(number)]):
        return torch.allclose(found, value, rtol=1e-5)
    return torch.equal(found, value)


def save(folder: str) -> int:
    quietly()
    state = saved(init_device_mesh("cpu", (2, 2)))
    dcp.save({"tensors": state, "step": 7}, checkpoint_id=folder)
    return len(state)


def load(folder: str) -> int:
    """All that was saved, in every layout of another mesh."""
    quietly()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = {
        key.removeprefix("tensors.")
        for key in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        if key.startswith("tensors.")
    }
    for turn in range(4):
        state: dict[str, Any] = {}
        for number, name in enumerate(sorted(names)):
            value = VALUES[name.split(".")[0]]
            whole = [place for place in layouts(value, 1) if not place[0].is_partial()]
            places = whole[(number + turn) % len(whole)]
            empty = value.new_full(value.shape, 1)
            state[name] = distribute_tensor(empty, mesh, places, src_data_rank=None)
            if turn == 3 and value.ndim and places[0] == Shard(0):
                cuts = [(value.shape[0], *[0] * (mesh.size() - 1)), *[None] * (value.ndim - 1)]
                state[name] = distribute_tensor(empty, mesh, places, cuts=cuts)
        dcp.load({"tensors": state}, checkpoint_id=folder)
        for name, found in state.items():
            assert is_same(name, found.full_tensor()), (name, found)
    return len(names)


def load_plain(folder: str) -> None:
    quietly()
    state = {f"{name}.0": torch.ones_like(value) for name, value in VALUES.items()}
    state |= {f"blocks.cut{n}": torch.ones_like(VALUES["blocks"]) for n in range(len(CUTS))}
    dcp.load({"tensors": state}, checkpoint_id=folder)
    for name, found in state.items():
        assert is_same(name, found), name


def load_theirs(folder: str) -> None:
    """What is written here can be read into PyTorch's own DTensors, and the other way."""
    quietly()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    kinds = [theirs.Shard(0), theirs.Replicate(), theirs.Shard(-1)]
    for kind in kinds:
        state: dict[str, Any] = {}
        for name in ("even.9", "uneven.4", "few.6", "blocks.14", "blocks.cut1", "ints.3"):
            whole = torch.ones_like(VALUES[name.split(".")[0]])
            state[name] = theirs.distribute_tensor(whole, mesh, [kind])
        dcp.load({"tensors": state}, checkpoint_id=folder)
        for name, found in state.items():
            assert is_same(name, found.full_tensor()), name
    back = f"{folder}/theirs{world}"
    dcp.save(state, checkpoint_id=back)
    ours: dict[str, Any] = {
        name: spread(torch.zeros_like(VALUES[name.split(".")[0]]), mesh, [Shard(0)])
        for name in state
    }
    dcp.load(ours, checkpoint_id=back)
    for name, found in ours.items():
        assert is_same(name, found.full_tensor()), name


def test_saved_on_four_ranks_and_loaded_on_two(processes: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path)
    (count,) = set(processes(4).run(save, folder))
    assert count > 100
    assert processes(2).run(load, folder, timeout=120) == [count] * 2
    assert processes(4).run(load, folder, timeout=120) == [count] * 4
    processes(2).run(load_plain, folder)
    load_plain(folder)  # in one process
    processes(2).run(load_theirs, folder)


def test_every_element_is_written_once(processes: Pools, tmp_path: Path) -> None:
    processes(4).run(save, str(tmp_path))
    metadata = dcp.FileSystemReader(str(tmp_path)).read_metadata()
    found = {key: item for key, item in metadata.state_dict_metadata.items() if key != "step"}
    assert len(found) > 100
    for name, item in found.items():
        value = VALUES[name.split(".")[1]]
        assert item.size == value.shape and item.properties.dtype is value.dtype
        assert sum(prod(chunk.sizes) for chunk in item.chunks) == value.numel()
        number = name.split(".")[2]
        places = layouts(value, 2)[int(number)] if number.isdigit() else ()
        if "even" in name and places == (Shard(0), Shard(1)):
            assert len(item.chunks) == 4
        if "number" in name or name == "tensors.even.0":  # replicated on all four ranks
            assert len(item.chunks) == 1


# --- errors --------------------------------------------------------------------------------------


def refused(folder: str) -> list[str]:
    quietly()
    mesh = init_device_mesh("cpu", (2, 2))
    dcp.save(
        {"x": distribute_tensor(VALUES["even"], mesh, [Shard(0), Shard(1)])}, checkpoint_id=folder
    )
    base = distribute_tensor(numbers(8, 8, 6), mesh, [Shard(0), Shard(1)])
    wrong = [
        distribute_tensor(numbers(7, 6), mesh, [Shard(0), Shard(1)]),
        distribute_tensor(numbers(8, 6), mesh, [Partial(), Shard(1)]),
        base[3],
    ]
    texts = []
    for each in wrong:
        before = each.full_tensor()
        with pytest.raises(dcp.api.CheckpointException) as error:
            dcp.load({"x": each}, checkpoint_id=folder)
        assert torch.equal(each.full_tensor(), before)
        texts.append(str(error.value))
    return texts


def test_what_cannot_be_loaded_is_an_error_on_all_ranks(processes: Pools, tmp_path: Path) -> None:
    for texts in processes(4).run(refused, str(tmp_path)):
        shape, partial, view = texts
        assert "Size mismatch" in shape and "[7, 6]" in shape
        assert "a checkpoint has whole values" in partial
        assert "is a view whose elements other ranks hold" in view


# --- saved in the background ---------------------------------------------------------------------


def save_later(folder: str) -> list[str]:
    quietly()
    mesh = init_device_mesh("cpu", (2, 2))
    group = dist.new_group()
    state = {key: value for key, value in saved(mesh).items() if not value._spec.sums}
    parameter = nn.Parameter(distribute_tensor(VALUES["even"], mesh, [Shard(0), Replicate()]))
    state["even.parameter"] = parameter
    for number, stager in enumerate([None, dcp.staging.BlockingAsyncStager()]):
        here = f"{folder}/{number}"
        saving = dcp.async_save(
            {"tensors": state}, checkpoint_id=here, process_group=group, async_stager=stager
        )
        for value in state.values():
            value.detach().zero_()  # what is saved was copied before
        saving.result()
        for name, value in state.items():
            value.detach().copy_(VALUES[name.split(".")[0]])
    texts = []
    base = distribute_tensor(VALUES["even"], mesh, [Shard(0), Shard(0)])
    for value in (spread(VALUES["even"], mesh, [Partial(), Shard(0)]), base[3]):
        with pytest.raises(dcp.api.CheckpointException) as error:
            dcp.async_save({"x": value}, checkpoint_id=f"{folder}/x", process_group=group).result()
        texts.append(str(error.value))
    return texts


def test_saved_in_the_background(processes: Pools, tmp_path: Path) -> None:
    for texts in processes(4).run(save_later, str(tmp_path), timeout=120):
        assert all("cannot be done in the background" in text for text in texts)
    processes(2).run(load, str(tmp_path / "0"), timeout=120)
    processes(2).run(load, str(tmp_path / "1"), timeout=120)


# --- some ranks only -----------------------------------------------------------------------------


def on_some_ranks(folder: str) -> None:
    quietly()
    some = DeviceMesh("cpu", [2, 0])
    x = distribute_tensor(VALUES["uneven"], some, [Shard(0)])
    dcp.save({"x": x}, checkpoint_id=folder)
    others = DeviceMesh("cpu", [1, 2, 3])
    y = distribute_tensor(torch.zeros(7, 5, dtype=torch.float64), others, [Shard(1)])
    dcp.load({"x": y}, checkpoint_id=folder)
    if dist.get_rank() != 0:
        assert torch.equal(y.full_tensor(), VALUES["uneven"])


def test_ranks_outside_of_a_mesh_take_part(processes: Pools, tmp_path: Path) -> None:
    processes(4).run(on_some_ranks, str(tmp_path))


# --- training goes on ----------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([1.0, -2.0, 0.5, 3.0, 1.5, -1.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.inner(self.embedding(tokens))) * self.scale)
        return found


def steps(model: nn.Module, optimizer: Any, count: int) -> list[float]:
    losses = []
    for step in range(count):
        tokens = ints(4, 3, high=7, seed=step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def made(mesh: Any, places: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def shard(name: str, part: nn.Module, mesh: Any) -> None:
        for key, value in list(part.named_parameters(recurse=False)):
            if value.ndim == 2:
                part.register_parameter(key, nn.Parameter(distribute_tensor(value, mesh, places)))

    if mesh is not None:
        distribute_module(model, mesh, shard)
    return model, optimizer


def mesh_of_all(places: list[Any]) -> tuple[Any, list[Any]]:
    """A mesh of two axes over four processes, or of one over two, and the placements on it."""
    shape = (2, 2)[: dist.get_world_size() // 2]
    return init_device_mesh("cpu", shape), places[: len(shape)]


def train_and_save(folder: str) -> list[float]:
    quietly()
    model, optimizer = made(*mesh_of_all([Shard(0), Shard(1)]))
    losses = steps(model, optimizer, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    return losses


def load_and_train(folder: str) -> list[float]:
    quietly()
    mesh, places = mesh_of_all([Shard(1), Shard(0)])
    model, optimizer = made(mesh, places)
    steps(model, optimizer, 1)  # so that the optimizer has state to load into
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    weight = model.head.weight
    assert isinstance(weight, DTensor) and weight.placements == tuple(places)
    assert weight is model.embedding.weight
    return steps(model, optimizer, 4)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_training_goes_on_with_other_ranks(
    processes: Pools, tmp_path: Path, before: int, after: int
) -> None:
    model, optimizer = made(None, None)
    first, then = steps(model, optimizer, 3), steps(model, optimizer, 4)
    for losses in processes(before).run(train_and_save, str(tmp_path)):
        assert losses == pytest.approx(first, rel=1e-5)
    for losses in processes(after).run(load_and_train, str(tmp_path)):
        assert losses == pytest.approx(then, rel=1e-5)
