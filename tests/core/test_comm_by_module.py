"""Communication counted by module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # makes torch.ops.c10d_functional
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import (
    CommDebugMode,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from shardwise.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        return self.net2(self.relu(self.net1(x)))


class Stacked(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(), MLP()])
        self.again = again

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


def on_mesh(model: nn.Module, prefix: str = "") -> nn.Module:
    plan: dict[str, ParallelStyle] = {
        f"{prefix}net1": ColwiseParallel(),
        f"{prefix}net2": RowwiseParallel(),
    }
    return parallelize_module(model, init_device_mesh("cpu", (4,)), plan)


INPUT = torch.randn(8, 10)
ONE, NONE = {"all_reduce": 1}, dict[str, int]()


def test_collectives_by_module() -> None:
    model = on_mesh(MLP())
    with CommDebugMode() as comm:
        model(INPUT.clone().requires_grad_()).sum().backward()
    assert comm.comm_module_counts == {
        "Global": {"forward": ONE, "backward": ONE},
        "MLP": {"forward": ONE, "backward": ONE},
        "MLP.net2": {"forward": ONE, "backward": NONE},
        "MLP.net1": {"forward": NONE, "backward": ONE},
    }


def test_keys_of_pytorch() -> None:
    """Scripts ask for the operators of `torch.ops.c10d_functional`."""
    ops: Any = torch.ops.c10d_functional
    x = distribute_tensor(torch.randn(8, 8), init_device_mesh("cpu", (4,)), [Shard(1)])
    with CommDebugMode() as comm:
        x.redistribute(placements=[Replicate()])
        x.redistribute(placements=[Shard(0)])
    counts = comm.get_comm_counts()
    assert counts[ops.all_gather_into_tensor] == counts["all_gather"] == 1
    assert counts[ops.all_to_all_single] == counts["exchange"] == 1
    assert counts[ops.all_reduce] == counts[ops.reduce_scatter_tensor] == counts["other"] == 0
    assert comm.comm_module_counts["Global"]["forward"][ops.all_gather_into_tensor] == 1


def test_parameters_and_placements_by_module() -> None:
    small, large, comm = on_mesh(MLP()), on_mesh(Stacked(), "layers.*."), CommDebugMode()
    with comm:
        small(INPUT)
    assert list(comm.get_parameter_info()) == ["MLP.net1", "MLP.net2"]
    assert comm.get_parameter_info()["MLP.net1"]["weight"] is small.get_parameter("net1.weight")
    assert comm.get_sharding_info() == {
        "MLP.net1.weight": (Shard(0),),
        "MLP.net1.bias": (Shard(0),),
        "MLP.net2.weight": (Shard(1),),
        "MLP.net2.bias": (Replicate(),),
    }
    with comm:  # starts anew
        assert comm.get_parameter_info() == comm.get_sharding_info() == {}
        assert comm.comm_module_counts == {"Global": {"forward": {}, "backward": {}}}
        large(INPUT)
    assert len(comm.get_sharding_info()) == 8
    assert "Stacked.layers.1.net2.weight" in comm.get_sharding_info()


@pytest.mark.parametrize("again", [False, True])
def test_nested_modules(again: bool) -> None:
    """A checkpoint computes again in the backward pass."""
    model = on_mesh(Stacked(again), "layers.*.")
    with CommDebugMode() as comm:
        model(INPUT.clone().requires_grad_()).sum().backward()
    found = comm.comm_module_counts
    assert found["Stacked"]["forward"] == {"all_reduce": 2}
    for layer in ("Stacked.layers.0", "Stacked.layers.1"):
        assert found[layer]["forward"] == found[f"{layer}.net2"]["forward"] == ONE
        assert found[f"{layer}.net1"]["backward"] == ONE
        assert found[layer]["backward"]["all_reduce"] >= 1
    assert sum(found["Stacked"]["backward"].values()) == comm.get_total_counts() - 2


def test_gradients_of_parameters_count_for_their_module() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = parallelize_module(nn.Sequential(MLP()), mesh, RootOnly())
    with CommDebugMode() as comm:
        model(distribute_tensor(INPUT, mesh, [Shard(0)])).square().sum().backward()
    backward = {name: counts["backward"] for name, counts in comm.comm_module_counts.items()}
    # The four gradients are reduced together, so they count for the module that has them all.
    assert backward == {"Global": ONE, "Sequential": ONE, "Sequential.0": ONE}
    assert [row["parameters"] for row in comm.table(by="module")] == [
        tuple(
            f"Sequential.0.{name}"
            for name in ("net2.bias", "net2.weight", "net1.bias", "net1.weight")
        )
    ]


class RootOnly(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        for name, value in list(module.named_parameters()):
            part = module.get_submodule(name.rpartition(".")[0])
            made: Any = distribute_tensor(value, device_mesh, [Replicate()])
            part.register_parameter(name.rpartition(".")[2], nn.Parameter(made))
        return module


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_no_hook_is_left_and_errors_are_passed_on() -> None:
    model = Stacked()
    with CommDebugMode() as comm:
        model(INPUT)
        model(INPUT)
        with pytest.raises(RuntimeError, match="shapes"):
            model(INPUT[:, :3])
        assert comm._causes.modules._calls == []
        model(INPUT)
    assert hooks(model) == 0
    assert not nn.modules.module._global_forward_pre_hooks
    model(INPUT)


def test_leaving_within_a_call() -> None:
    class Leaves(nn.Module):
        def forward(self, x: Any) -> Any:
            comm.__exit__()
            return x

    model = Leaves()
    comm = CommDebugMode()
    comm.__enter__()
    model(INPUT)
    assert hooks(model) == 0


def test_the_table_of_modules(tmp_path: Path) -> None:
    model = on_mesh(MLP())
    model.net2.extra = nn.Parameter(torch.ones(1))
    with CommDebugMode() as comm:
        model(INPUT.clone().requires_grad_()).sum().backward()
    table = comm.generate_comm_debug_tracing_table()
    assert table.splitlines() == [
        "module        parameters                            forward       backward",
        "Global                                              all_reduce 1  all_reduce 1",
        "  MLP                                               all_reduce 1  all_reduce 1",
        "    MLP.net1  weight [S(0)], bias [S(0)]                          all_reduce 1",
        "    MLP.relu",
        "    MLP.net2  weight [S(1)], bias [R], extra plain  all_reduce 1",
    ]
    assert comm.generate_comm_debug_tracing_table(0).splitlines()[3:5] == [
        "    MLP.net1                all_reduce 1",
        "    MLP.relu",
    ]
    text, data = tmp_path / "table.txt", tmp_path / "table.json"
    comm.log_comm_debug_tracing_table_to_file(str(text))
    assert text.read_text() == table + "\n"
    comm.generate_json_dump(str(data))
    assert json.loads(data.read_text())[2] == {
        "fqn": "MLP.net1",
        "depth": 2,
        "parameters": {"weight": "[S(0)]", "bias": "[S(0)]"},
        "forward": {},
        "backward": {"all_reduce": 1},
    }
    comm.generate_json_dump(str(data), noise_level=0)
    assert "parameters" not in json.loads(data.read_text())[0]


def test_a_module_of_plain_tensors_is_no_business_of_a_mesh() -> None:
    with CommDebugMode() as comm:
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert comm.get_total_counts() == 0 and comm.get_sharding_info() == {}
    assert not isinstance(comm.get_parameter_info()["Linear"]["weight"], DTensor)
