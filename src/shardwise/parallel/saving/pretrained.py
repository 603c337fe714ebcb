"""`save_pretrained` of Hugging Face models that are on a mesh: whole tensors, in ordinary files."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...storage.wrapper import share_cell
from ...tensor.dtensor import DTensor
from .state import full_state_dict

_METHOD = "gather_sharded_state_dict_for_save"
"""The method in which models of transformers gather what is sharded, before they write it."""


def gather_in_save_pretrained(module: nn.Module) -> None:
    """Let the Hugging Face models in a module gather their DTensors when they are saved."""
    for part in module.modules():
        if hasattr(part, _METHOD):
            setattr(part, _METHOD, _gather)


def _gather(
    model: Any, state: dict[str, Any], *_: Any, save_on_this_rank: bool, **__: Any
) -> dict[str, Any]:
    """The state with whole tensors on the first rank, which writes them; the other ranks get an
    empty dict. A state without DTensors was given to `save_pretrained`, and is written as it is."""
    if not any(isinstance(value, DTensor) for value in state.values()):
        return state
    if getattr(model, "_hf_peft_config_loaded", False) and not save_on_this_rank:
        state = model.get_adapter_state_dict(state_dict=state)  # all that the first rank has
    own = model.state_dict(keep_vars=True)  # a tied parameter is one tensor here
    for name, value in state.items():
        if not _is_alias(value, own.get(name)):
            own[name] = value
    return full_state_dict({name: own[name] for name in state}, first_rank_only=True)  # type: ignore[no-any-return]


def _is_alias(value: Any, parameter: Any) -> bool:
    """True for the entry of a parameter in `state_dict()`, which shares its memory."""
    if isinstance(value, DTensor) and isinstance(parameter, DTensor):
        return value._spec is parameter._spec and share_cell(value) is share_cell(parameter)
    plain = type(value) is torch.Tensor and type(parameter) is nn.Parameter
    return plain and value.is_set_to(parameter)
