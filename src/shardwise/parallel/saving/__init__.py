"""Whole states in files: every rank writes and reads its own parts of ordinary safetensors."""

from .load import load_checkpoint, load_safetensors
from .save import save_checkpoint, save_safetensors
from .state import full_state_dict

__all__ = [
    "full_state_dict",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
    "save_safetensors",
]
