"""States of models, optimizers and nested dicts: their tensors by name, and whole values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, public
from ...tensor.dtensor import DTensor
from ...tensor.per_rank import is_first_rank


@public
def full_state_dict(*states: Any, first_rank_only: bool = False) -> Any:
    """The state of a model, an optimizer or a nested dict with whole plain tensors, on the CPU.

    Give several and get a tuple. The tensors are gathered one at a time, and all ranks must call
    it. With `first_rank_only` the other ranks get empty dicts, and need memory for one whole tensor
    at a time.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    >>> model = torch.nn.Linear(2, 4)
    >>> model = shardwise.shard_module(model, mesh, {"*": {"tp": shardwise.Shard(0)}})
    >>> {name: type(value) for name, value in full_state_dict(model).items()}
    {'weight': <class 'torch.Tensor'>, 'bias': <class 'torch.Tensor'>}
    """
    keep = is_first_rank() or not first_rank_only
    done: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    made = tuple([_whole(_values(state), keep, done) for state in states])
    made = made if keep else ({},) * len(made)
    return made[0] if len(made) == 1 else made


def _values(state: Any) -> Any:
    """The state of an object. That of a module has the parameters themselves, so that one that has
    several names is known."""
    if isinstance(state, nn.Module):
        return state.state_dict(keep_vars=True)
    has_state = hasattr(state, "state_dict") and not isinstance(state, type)
    return state.state_dict() if has_state else state


def _whole(
    value: Any, keep: bool, done: dict[int, tuple[torch.Tensor, torch.Tensor | None]]
) -> Any:
    """A state with whole tensors. `done` has each tensor, so that no other one gets its id, and its
    whole value."""
    if isinstance(value, dict):
        return {key: _whole(_values(each), keep, done) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [_whole(_values(each), keep, done) for each in value]
        return tuple(items) if isinstance(value, tuple) else items
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in done:
        with torch.no_grad():
            full = value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
        done[id(value)] = value, full.cpu() if keep else None
    return done[id(value)][1]


def flatten(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of a nested state by their names, and the state with None in their places."""
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _flatten(_values(state), "", tensors)


def _flatten(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {
            key: _flatten(_values(each), f"{path}.{key}" if path else str(key), tensors)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        items = [
            _flatten(_values(each), f"{path}.{index}", tensors) for index, each in enumerate(value)
        ]
        return tuple(items) if isinstance(value, tuple) else items
    if not isinstance(value, torch.Tensor):
        return value
    if path in tensors:
        raise CheckpointError(f"two tensors of the state have the name {path!r}. Rename one.")
    if not isinstance(value, DTensor) and type(value) not in (torch.Tensor, nn.Parameter):
        raise CheckpointError(
            f"{path} is a {type(value).__module__}.{type(value).__name__}: only DTensors of "
            "Shardwise and plain tensors can be saved and loaded here."
        )
    tensors[path] = value
    return None


def unique_names(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """For each name the first one of the same tensor: tied parameters are in a file once."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(each), name) for name, each in tensors.items()}
