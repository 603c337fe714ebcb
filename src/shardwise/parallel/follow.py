"""`follow_layouts`: what joined a sharded model later gets the layouts of what it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import LayoutError, need, public
from ..layout.placement import Placement, Replicate, Shard
from ..tensor.dtensor import DTensor
from .in_place import Layout, convert_module, distributed_like, listed_optimizers

M = TypeVar("M", bound=nn.Module)


@public
def follow_layouts(model: M, *, optimizers: Iterable[torch.optim.Optimizer] = ()) -> M:
    """Shard adapters that were added to a sharded model, and whole optimizer state that was loaded.

    A plain adapter parameter, such as those that peft puts beside a `base_layer`, is sharded as the
    weight of that layer in the dims that have the size of the weight's. Other plain parameters and
    buffers are replicated. State of an optimizer gets the layout of its parameter. Without this
    call everything works too: plain tensors count as replicated, and need the memory of whole ones.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    >>> layer = torch.nn.Module()
    >>> layer.base_layer = torch.nn.Linear(6, 8)
    >>> layer = shardwise.shard_module(layer, mesh, {"*.weight": {"tp": shardwise.Shard(0)}})
    >>> layer.lora_A, layer.lora_B = torch.nn.Linear(6, 2), torch.nn.Linear(2, 8)
    >>> layer = shardwise.follow_layouts(layer)
    >>> layer.lora_A.weight.placements, layer.lora_B.weight.placements
    ((R,), (S(0),))
    """
    need("follow_layouts", model, nn.Module, "a module")
    optimizers = listed_optimizers("follow_layouts", optimizers)
    meshes = {
        each._spec.topology: each.device_mesh
        for each in [*model.parameters(), *model.buffers()]
        if isinstance(each, DTensor)
    }
    if len(meshes) != 1:
        raise LayoutError(
            f"follow_layouts: the model is on {len(meshes)} meshes, but must be on one. Use "
            "shard_module first, or call this for the parts of the model."
        )
    (mesh,) = meshes.values()
    layouts: dict[int, Layout] = {id(each): like for each, like in _adapters(model)}
    convert_module(
        "follow_layouts", model, mesh, lambda _, tensor: layouts.get(id(tensor)), optimizers
    )
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                state[key] = _like_parameter(value, parameter)
    return model


def _adapters(model: nn.Module) -> Iterator[tuple[torch.Tensor, list[Placement]]]:
    """The parameters beside a sharded layer, and the placements that they take from it."""
    for part in model.modules():
        weight = getattr(getattr(part, "base_layer", None), "weight", None)
        if isinstance(weight, DTensor):
            for each in part.parameters():
                yield each, [_followed(place, weight, each) for place in weight.placements]


def _followed(place: Placement, weight: torch.Tensor, adapter: torch.Tensor) -> Placement:
    """The placement of a layer's weight, if the adapter has the dim that it shards."""
    if not isinstance(place, Shard) or place.dim >= adapter.ndim:
        return Replicate()
    return place if adapter.shape[place.dim] == weight.shape[place.dim] else Replicate()


def _like_parameter(value: Any, parameter: torch.Tensor) -> Any:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not plain or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distributed_like(value, parameter, None)
