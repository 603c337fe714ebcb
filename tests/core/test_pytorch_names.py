"""A script moves by its imports: PyTorch's names are here, and take PyTorch's arguments."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.debug
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel

import shardwise

NAMES = {
    "": torch.distributed.tensor.__all__,
    "parallel": torch.distributed.tensor.parallel.__all__,
    "experimental": ["implicit_replication", "local_map", "register_sharding"],
    "debug": ["CommDebugMode", "visualize_sharding"],
}
KEYWORD = inspect.Parameter.KEYWORD_ONLY
PAIRS = [(module, name) for module, names in NAMES.items() for name in names]
METHODS = [
    "generate_comm_debug_tracing_table",
    "generate_json_dump",
    "get_comm_counts",
    "get_parameter_info",
    "get_sharding_info",
    "get_total_counts",
    "log_comm_debug_tracing_table_to_file",
]


def found(package: str, module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{package}.{module}".rstrip(".")), name)


def parameters(function: Any) -> dict[str, Any]:
    """Names, defaults and kinds; a placement is told by its text."""
    return {
        name: (str(each.default), each.kind)
        for name, each in inspect.signature(function).parameters.items()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_names_and_arguments(module: str, name: str) -> None:
    theirs = found("torch.distributed.tensor", module, name)
    ours = found("shardwise", module, name)
    if inspect.isclass(theirs) and module == "":
        return  # DTensor and placements are classes of their own
    wanted, given = parameters(theirs), parameters(ours)
    wanted.pop("spmd_types", None)  # newer versions: it needs a package of that name
    if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(ours).parameters.values()):
        wanted = {key: value for key, value in wanted.items() if key in given}  # factories
    assert {key: given.get(key) for key in wanted} == wanted
    by_place = [key for key, (_, kind) in wanted.items() if kind is not KEYWORD]
    assert list(given)[: len(by_place)] == by_place


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_comm_debug_mode(name: str) -> None:
    theirs = getattr(torch.distributed.tensor.debug.CommDebugMode, name)
    assert parameters(getattr(shardwise.CommDebugMode, name)) == parameters(theirs)


def test_fully_shard_has_pytorchs_names() -> None:
    theirs, ours = torch.distributed.fsdp, shardwise.parallel
    wanted = inspect.signature(theirs.fully_shard).parameters
    assert set(inspect.signature(ours.fully_shard).parameters) <= set(wanted)
    assert set(inspect.signature(ours.replicate).parameters) <= set(wanted)
    for method in (name for name in vars(ours.FSDPModule) if not name.startswith("_")):
        assert hasattr(theirs.FSDPModule, method), method
    options = parameters(theirs.MixedPrecisionPolicy)
    options.pop("param_dtype_override_fn", None)  # newer versions: a dtype for each parameter
    assert parameters(ours.MixedPrecisionPolicy) == options
