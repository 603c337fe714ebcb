"""`distribute_module`: the parameters and buffers of a module made DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ..mesh import AnyMesh, topology
from ..tensor import DTensor, distribute_tensor

__all__ = ["distribute_module"]

M = TypeVar("M", bound=nn.Module)


def distribute_module(
    module: M,
    device_mesh: AnyMesh,
    partition_fn: Callable[[str, nn.Module, AnyMesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, AnyMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, AnyMesh], Any] | None = None,
) -> M:
    """Put a module on a mesh, in place.

    `partition_fn(name, submodule, mesh)` replaces the parameters of a submodule by DTensors as it
    likes; what it leaves is replicated. `input_fn` and `output_fn` get the inputs and outputs of
    the whole module with the mesh, and may return others.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> def by_rows(name, submodule, mesh):
    ...     for key, value in list(submodule.named_parameters(recurse=False)):
    ...         sharded = shardwise.distribute_tensor(value, mesh, [Shard(0)])
    ...         submodule.register_parameter(key, torch.nn.Parameter(sharded))
    >>> linear = shardwise.distribute_module(torch.nn.Linear(4, 6), mesh, by_rows)
    >>> linear(torch.ones(3, 4)).placements
    (S(1),)
    """
    topology(device_mesh)
    for name, part in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, part, device_mesh)
        _replicate_rest(part, device_mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(
            lambda mod, given: _as_tuple(input_fn(mod, given, device_mesh))
        )
    if output_fn is not None:
        module.register_forward_hook(lambda mod, given, out: output_fn(mod, out, device_mesh))
    return module


def _as_tuple(value: Any) -> Any:
    return value if value is None or isinstance(value, tuple) else (value,)


def _replicate_rest(part: nn.Module, mesh: AnyMesh) -> None:
    for name, parameter in list(part.named_parameters(recurse=False)):
        if not isinstance(parameter, DTensor):
            whole = nn.Parameter(distribute_tensor(parameter.data, mesh), parameter.requires_grad)
            part.register_parameter(name, whole)
    for name, buffer in list(part.named_buffers(recurse=False)):
        if not isinstance(buffer, DTensor):
            keep = name not in part._non_persistent_buffers_set
            part.register_buffer(name, distribute_tensor(buffer, mesh), persistent=keep)
