"""The traceback of an error about a call ends at the line of the call."""

from __future__ import annotations

import doctest
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor
from shardwise.errors import LayoutError, MeshError
from shardwise.parallel import ColwiseParallel, local_map

from ..compare import spread, virtual


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.linear(x, torch.ones(3, 5)),
        lambda x: x + spread(torch.ones(4), virtual(3), [Shard(0)]),
        lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", "0"),
    ],
)
def test_a_traceback_ends_at_the_line_of_the_call(call: Callable[[Any], Any]) -> None:
    x = spread(torch.ones(6, 4), virtual(2), [Shard(0)])
    with pytest.raises((RuntimeError, LayoutError, MeshError)) as caught:
        call(x)
    inside = [entry for entry in caught.traceback if "shardwise" in str(entry.path)]
    assert [entry.name for entry in inside if "tests" not in str(entry.path)] == []


def error_of(call: Callable[[], Any]) -> tuple[BaseException, list[str]]:
    """The error of a call, and the names of the functions in its traceback below `call`."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.value, [entry.name for entry in caught.traceback[2:]]


def wrong_calls() -> dict[str, Callable[[], Any]]:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = spread(torch.ones(6, 4), mesh, [Shard(0), Replicate()])
    model, places = torch.nn.Linear(4, 4), [Shard(5), Replicate()]
    some: Any = 3
    captured, mapped = sw.capture(lambda x: x + 1), local_map(lambda x: x, [Shard(0)], (None,))

    def mixed() -> Any:
        with sw.plain_tensors("error"):
            x + torch.ones(6, 4)

    return {
        "init_device_mesh": lambda: sw.init_device_mesh("cpu", (0,)),
        "DeviceMesh": lambda: sw.DeviceMesh("cpu", []),
        "mesh[]": lambda: mesh["pp"],
        "Shard": lambda: Shard(some / 2),
        "Partial": lambda: Partial("mean"),
        "DTensorSpec": lambda: sw.DTensorSpec(mesh, [Shard(0)]),
        "distribute_tensor": lambda: distribute_tensor(torch.ones(2), mesh, places),
        "distribute_tensor()": lambda: distribute_tensor(),  # type: ignore[call-arg]
        "from_local": lambda: DTensor.from_local(x.to_local(), mesh, places),
        "from_local()": lambda: DTensor.from_local(x.to_local(), mesh, places, some),
        "to_local": lambda: x.to_local(grad_placements=places),
        "full_tensor": lambda: x.full_tensor(grad_placements=places),
        "x.redistribute": lambda: x.redistribute(placements=places),
        "redistribute": lambda: sw.redistribute(some, placements=places),
        "redistribute_all": lambda: sw.redistribute_all([x], [places]),
        "explain_redistribute": lambda: sw.explain_redistribute(x, x[0]),
        "DTensor": lambda: DTensor(),
        "storage": lambda: x.storage(),
        "data": lambda: setattr(x, "data", 3),
        "plain_tensors": mixed,
        "x + x.to_local()": lambda: x + x.to_local(),
        "x.to_local() + x": lambda: x.to_local() + x,
        "PerRank.at": lambda: x.to_local().at((9,)),
        "per_rank": lambda: sw.per_rank(some, lambda coord: coord),
        "zeros": lambda: sw.zeros(4, device_mesh=mesh, placements=places),
        "ones": lambda: sw.ones(4, device_mesh=mesh, place=places),
        "shard_module": lambda: sw.shard_module(model, mesh, {"x": {"tp": Shard(0)}}),
        "parallelize_module": lambda: sw.parallelize_module(model, mesh["tp"], some),
        "distribute_module": lambda: sw.distribute_module(model, some),
        "fully_shard": lambda: sw.fully_shard(model, mesh=some),
        "replicate": lambda: sw.replicate(model, some),
        "make_plan": lambda: sw.make_plan(model, mesh, some),
        "context_parallel": lambda: sw.context_parallel(mesh),
        "local_map": lambda: local_map(torch.relu, some),
        "local_map()": lambda: mapped(x),
        "ColwiseParallel": lambda: ColwiseParallel(input_layouts=some),
        "load_safetensors": lambda: sw.load_safetensors(model, "nowhere"),
        "load_checkpoint": lambda: sw.load_checkpoint({}, "nowhere"),
        "capture": lambda: sw.capture(some),
        "captured.code": lambda: captured.code(),
        "explain": lambda: sw.explain(some),
        "assert_layout": lambda: sw.assert_layout(x, {"tp": Shard(0)}),
        "picture": lambda: sw.picture(some),
        "verify": lambda: sw.verify(some),
        "register_rule": lambda: sw.register_rule(torch.ops.aten.mm.default, "?"),
        "register.normalize_dim": lambda: sw.register.normalize_dim(some / 2, 2),
        "register.normalize_dim()": lambda: sw.register.normalize_dim(),  # type: ignore[call-arg]
        "communication": lambda: sw.communication(some),
        "random.mode": lambda: sw.random.mode(some),
        "manual_seed": lambda: sw.manual_seed(some / 2),
        "CommDebugMode": lambda: sw.CommDebugMode().table(some),
    }


WRONG = wrong_calls()


@pytest.mark.parametrize("name", WRONG)
def test_tracebacks_of_public_functions_end_at_the_line_of_the_call(name: str) -> None:
    error, below = error_of(WRONG[name])
    assert isinstance(error, sw.errors.ShardwiseError) or name.endswith("()"), error
    assert below == []


def test_all_lines_of_a_traceback_are_kept_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_FULL_TRACEBACKS", "1")
    _, below = error_of(WRONG["x.redistribute"])
    assert below[:2] == ["redistribute", "redistribute"] and len(below) > 3


def test_a_traceback_keeps_the_lines_of_our_own_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.tensor.dtensor._target", lambda *_: {}["mistake"])
    x = spread(torch.ones(6, 4), virtual(2), [Shard(0)])
    error, below = error_of(lambda: x.redistribute(placements=[Shard(1)]))
    assert isinstance(error, KeyError) and "redistribute" in below


def test_a_traceback_keeps_the_lines_of_users_functions() -> None:
    def fail(x: Any, *_: Any) -> Any:
        return x.redistribute(placements=[Shard(5)]) if isinstance(x, DTensor) else 1 // 0

    x = spread(torch.ones(6, 4), virtual(2), [Shard(0)])
    model = torch.nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda *_: fail(x))
    for call in (
        lambda: local_map(fail, [Shard(0)])(x),
        lambda: sw.capture(fail)(x),
        lambda: sw.explain(fail, x),
        lambda: sw.per_rank(virtual(2), fail),
        lambda: sw.shard_module(model, virtual(2), {})(x),
    ):
        _, below = error_of(call)
        assert below[-1] == "fail" and len(below) > 1


def test_public_functions_are_what_they_were() -> None:
    for function in (distribute_tensor, DTensor.from_local, sw.capture, sw.shard_module, sw.zeros):
        assert pickle.loads(pickle.dumps(function)) is function
        assert function.__doc__ and list(inspect.signature(function).parameters)
    assert inspect.signature(Shard).parameters["split"].default == 1
    assert DTensor.redistribute.__qualname__ == "DTensor.redistribute"
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {test.name for test in finder.find(sys.modules["shardwise.tensor.dtensor"])}
    assert {"shardwise.tensor.dtensor.DTensor.redistribute"} <= found


def test_a_traceback_keeps_the_lines_of_a_users_kernel() -> None:
    @torch.library.custom_op("test_errors::picky", mutates_args=())
    def picky(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not today")

    @picky.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    with pytest.raises(RuntimeError, match="not today") as caught:
        picky(spread(torch.ones(4), virtual(2), [Shard(0)]))
    assert caught.traceback[-1].name == "picky"
