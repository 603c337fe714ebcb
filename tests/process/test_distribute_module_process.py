"""Modules converted in place, plain data and files of other programs, on several processes."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from shardwise.errors import LayoutError, MeshError, PlainTensorError
from shardwise.layout import make_mesh
from shardwise.layout import mesh as meshes

from ..compare import ints, numbers
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.inner = nn.LSTM(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", numbers(6, dtype=torch.float32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.inner(self.embedding(tokens))[0] * self.scale)
        return found


def shard(name: str, part: nn.Module, mesh: Any) -> None:
    for key, value in list(part.named_parameters(recurse=False)):
        places = [Shard(0), Shard(value.ndim - 1)]
        part.register_parameter(key, nn.Parameter(distribute_tensor(value, mesh, places)))


def step(model: nn.Module, optimizer: Any, seed: int) -> float:
    tokens = ints(4, 3, high=7, seed=seed)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def train(mesh_shape: tuple[int, ...] | None, named: bool) -> list[float]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = [step(model, optimizer, 0)]
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape)
        distribute_module(model, mesh, shard, **({"optimizers": [optimizer]} if named else {}))
        assert model.head.weight is model.embedding.weight
        assert isinstance(model.head.weight, DTensor) and isinstance(model.scale, DTensor)
        assert model.head.weight.grad.placements == model.head.weight.placements
    return [*losses, *[step(model, optimizer, seed) for seed in range(1, 5)]]


@pytest.mark.parametrize("named", [False, True])
def test_training_goes_on_as_on_one_device(processes: Pools, named: bool) -> None:
    want = train(None, named)
    for losses in processes(4).run(train, (2, 2), named):
        assert losses == pytest.approx(want, rel=1e-5)


def different_modules() -> list[str]:
    mesh = init_device_mesh("cpu", (4,))
    texts = []
    for trouble in ("graph", "grad", "shape", "state"):
        model = nn.Linear(3, 4 + (trouble == "shape" and dist.get_rank() == 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        held = None
        if dist.get_rank() == 1 and trouble in ("graph", "grad", "state"):
            held = model(torch.ones(2, 3)).sum()
            if trouble != "graph":
                held.backward()
                held = None
            if trouble == "state":
                optimizer.step()
                optimizer.zero_grad()
        before = copy.deepcopy(model.state_dict())
        start = time.monotonic()
        with pytest.raises(LayoutError) as error:
            distribute_module(model, mesh, optimizers=[optimizer])
        assert time.monotonic() - start < 10
        del held
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
        texts.append(str(error.value))
    return texts


def test_ranks_that_cannot_convert_alike_raise_together(processes: Pools) -> None:
    every = processes(4).run(different_modules)
    for rank, texts in enumerate(every):
        for trouble, text in zip(("graph", "grad", "shape", "state"), texts, strict=True):
            if trouble == "graph" and rank == 1:
                assert "held by an autograd graph or a view" in text
            else:
                assert "another rank cannot convert its module" in text
            assert "Nothing was changed" in text


def assign() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(dist.get_rank())

    def rows(name: str, part: nn.Module, mesh: Any) -> None:
        part.weight = nn.Parameter(distribute_tensor(part.weight, mesh, [Shard(0)]))

    model = distribute_module(nn.Linear(3, 5, bias=False), mesh, rows)
    model.load_state_dict({"weight": numbers(5, 3)}, assign=True)
    assert isinstance(model.weight, DTensor) and model.weight.placements == (Shard(0),)
    assert torch.equal(model.weight.full_tensor(), numbers(5, 3))
    weight = model.weight
    weight.data = numbers(7, 3, seed=1)
    assert weight.placements == (Shard(0),) and weight.shape == (7, 3)
    assert torch.equal(weight.full_tensor(), numbers(7, 3, seed=1))
    with pytest.raises(PlainTensorError, match="not equal on all ranks"):
        weight.data = torch.full((7, 3), float(dist.get_rank()))
    local = weight.to_local()
    assert isinstance(local, nn.Parameter) and not isinstance(weight._locals[0], nn.Parameter)


def test_what_is_assigned_takes_the_layout(processes: Pools) -> None:
    processes(2).run(assign)


# --- files of meshes that do not exist yet --------------------------------------------------------


def write(folder: str) -> None:
    x = distribute_tensor(numbers(7, 3), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
    warnings.filterwarnings("ignore", "torch.save and pickle write the part")
    torch.save({"x": x}, f"{folder}/{dist.get_rank()}.pt")
    some = DeviceMesh("cpu", [3, 1])
    torch.save(distribute_tensor(numbers(4), some, [Shard(0)]), f"{folder}/{dist.get_rank()}.some")


def forget() -> None:
    """As in a new process."""
    known = [key for key, where in meshes.topologies.items() if not where.virtual]
    for key in known:
        del meshes.topologies[key]


def read(folder: str) -> str:
    forget()
    x = torch.load(f"{folder}/{dist.get_rank()}.pt")["x"]
    assert x.device_mesh.shape == (2, 2) and x.placements == (Shard(0), Shard(1))
    assert torch.equal(x.full_tensor(), numbers(7, 3))
    assert torch.allclose((x + 1).sum(0).full_tensor(), (numbers(7, 3) + 1).sum(0))
    assert torch.load(f"{folder}/{dist.get_rank()}.pt")["x"]._spec is x._spec
    with pytest.raises(MeshError, match="before the file is loaded") as error:
        torch.load(f"{folder}/{dist.get_rank()}.some")  # to make this mesh needs others
    return str(error.value)


def read_on_one(folder: str) -> str:
    forget()
    text = ""
    if dist.get_rank() == 2:
        before, make_mesh._LOAD_SECONDS = make_mesh._LOAD_SECONDS, 1.0
        start = time.monotonic()
        with pytest.raises(MeshError) as error:
            torch.load(f"{folder}/2.pt")
        assert time.monotonic() - start < 10
        make_mesh._LOAD_SECONDS = before
        text = str(error.value)
    dist.barrier()
    forget()
    x = torch.load(f"{folder}/{dist.get_rank()}.pt")["x"]  # and now with all
    assert torch.equal(x.full_tensor(), numbers(7, 3))
    return text


def test_a_mesh_is_made_of_what_was_saved(processes: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path)
    processes(4).run(write, folder)
    processes(4).stop()  # others read than those who wrote
    for text in processes(4).run(read, folder):
        assert "ranks [3, 1]" in text
    processes(4).stop()
    texts = processes(4).run(read_on_one, folder)
    assert "ranks [0, 1, 3] did not" in texts[2] and texts[0] == ""


def test_a_file_of_processes_is_refused_where_there_are_none(
    processes: Pools, tmp_path: Path
) -> None:
    processes(4).run(write, str(tmp_path))
    with pytest.raises(MeshError, match="in as many processes"):
        torch.load(tmp_path / "0.pt")


def replicas() -> None:
    """The first rank's values, gradients and moments are taken."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(dist.get_rank())
    layer = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
    layer(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    distribute_module(layer, mesh, optimizers=[optimizer])
    torch.manual_seed(0)
    want = nn.Linear(3, 4)
    other = torch.optim.SGD(want.parameters(), lr=0.5, momentum=0.9)
    want(torch.randn(2, 3)).square().sum().backward()
    other.step()
    for _ in range(2):
        optimizer.step()
        other.step()
    for have, known in zip(layer.parameters(), want.parameters(), strict=True):
        assert have.placements == (Replicate(),)
        assert torch.allclose(have.to_local(grad_placements=[Replicate()]), known)


def test_ranks_that_trained_alone_go_on_from_the_first(processes: Pools) -> None:
    processes(2).run(replicas)
