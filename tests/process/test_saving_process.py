"""Files that several ranks write and read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh, is_first_rank
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import make_mesh
from shardwise.layout import mesh as meshes

from ..compare import numbers
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def quietly() -> None:
    """It is known here that a file has the part of a rank; see test_state_dict_process."""
    warnings.filterwarnings("ignore", "torch.save and pickle write the part")


def one_file_for_all(file: str, place: Any) -> str:
    quietly()
    x = distribute_tensor(numbers(4, 3), init_device_mesh("cpu", (2,)), [place])
    if dist.get_rank() == 0:
        torch.save({"x": x}, file)
    dist.barrier()
    try:
        y = torch.load(file)["x"]
    except LayoutError as error:
        return str(error)
    assert y._spec is x._spec and torch.equal(y.to_local(), x.to_local())
    return ""


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Partial()], ids=str)
def test_a_file_of_one_rank_is_not_the_tensor_of_another(
    processes: Pools, tmp_path: Path, place: Any
) -> None:
    first, second = processes(2).run(one_file_for_all, str(tmp_path / "x.pt"), place)
    assert first == ""
    if place is Replicate():
        assert second == ""
    else:
        assert "saved at mesh coordinate (0,)" in second and "full_state_dict" in second


def sub_meshes(folder: str) -> None:
    quietly()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(numbers(4, 3), mesh["tp"], [Shard(0)])
    file = f"{folder}/{dist.get_rank()}.pt"
    torch.save(x, file)
    y = torch.load(file)
    assert y._spec is x._spec and torch.equal(y.full_tensor(), numbers(4, 3))
    key = meshes._key(mesh["tp"])
    known = meshes.topologies.pop(key)  # as in a new process, which made the whole mesh only
    y = torch.load(file)
    assert y._spec is not x._spec and torch.equal(y.full_tensor(), numbers(4, 3))
    meshes.topologies[key] = known
    description = list(make_mesh.described(known))
    description[2:5] = (1,), (0,), ("unknown",)  # of one rank: to make it needs the other too
    with pytest.raises(MeshError, match="Make it with shardwise"):
        make_mesh.described_mesh(*description)


def test_a_file_of_each_rank(processes: Pools, tmp_path: Path) -> None:
    processes(2).run(sub_meshes, str(tmp_path))


def whole_values(file: str) -> None:
    def layer(places: Any, mesh: Any) -> nn.Linear:
        made = nn.Linear(3, 5)
        for name, value in list(made.named_parameters()):
            setattr(made, name, nn.Parameter(distribute_tensor(value.detach(), mesh, places)))
        return made

    first = layer([Shard(0)], init_device_mesh("cpu", (2,)))
    whole = {name: value.full_tensor() for name, value in first.state_dict().items()}
    if is_first_rank():
        torch.save(whole, file)
    dist.barrier()
    second = layer([Replicate(), Shard(-1)], init_device_mesh("cpu", (1, 2)))
    second.load_state_dict(torch.load(file))
    for name, value in second.state_dict().items():
        assert value.placements[1].is_shard() and torch.equal(value.full_tensor(), whole[name])


def test_whole_values_are_loaded_on_another_mesh(processes: Pools, tmp_path: Path) -> None:
    processes(2).run(whole_values, str(tmp_path / "whole.pt"))
