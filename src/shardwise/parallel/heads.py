"""The number of attention heads that a dim of a projection holds."""

from __future__ import annotations

from torch import nn

from .linear_pairs import ATTENTION_IN, ATTENTION_OUT, is_called

_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "d_kv")
_KEYS = {"k", "v", "key", "value", "k_proj", "v_proj", "k_lin", "v_lin", "wk", "wv"}
_COUNTS_OF_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")


def heads_of(model: nn.Module, name: str, dim: int, size: int) -> int | None:
    """How many heads `size` elements of a dim of a parameter are; None if they are no heads.

    The module that holds the projection is asked for the size of a head, or for their number.
    """
    layer, _, kind = name.rpartition(".")
    outputs = is_called(layer, ATTENTION_IN)
    if kind not in ("weight", "bias") or not (outputs or is_called(layer, ATTENTION_OUT)):
        return None
    transposed = kind == "weight" and type(model.get_submodule(layer)).__name__ == "Conv1D"
    if dim != int(transposed if outputs else not transposed):
        return None
    owner = model.get_submodule(layer.rpartition(".")[0])
    for each in _SIZES:
        found = getattr(owner, each, None)
        if isinstance(found, int) and found and size % found == 0:
            return size // found
    named = (*_COUNTS_OF_KEYS, *_COUNTS) if is_called(layer, _KEYS) else _COUNTS
    counts = [getattr(owner, each, None) for each in named]
    return next((n for n in counts if isinstance(n, int) and n and size % n == 0), None)
