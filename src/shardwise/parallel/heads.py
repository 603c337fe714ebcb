"""The number of attention heads that a dim of a projection holds."""

from __future__ import annotations

from torch import nn

_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "d_kv")
_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
_KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_KEYS = ("k", "v", "key", "value", "wk", "wv")


def heads_of(model: nn.Module, name: str, dim: int, size: int) -> int | None:
    """How many heads `size` elements of a dim of a parameter are; None if it has none.

    The module that holds the projections is asked for the size of a head, or their number.
    """
    *path, layer, kind = ["", *name.split(".")]
    if kind not in ("weight", "bias") or len(path) < 1:
        return None
    owner = model.get_submodule(".".join(path[1:]))
    is_input = layer in ("o_proj", "out_proj", "c_proj", "o", "out", "proj", "wo", "dense")
    projection = is_input or layer.removesuffix("_proj").removesuffix("_lin") in (
        *("q", "k", "v", "query", "key", "value", "wq", "wk", "wv"),
        *("qkv", "c_attn", "query_key_value", "Wqkv"),
    )
    if not projection:
        return None
    for each in _SIZES:
        found = getattr(owner, each, None)
        if isinstance(found, int) and found and size % found == 0:
            return size // found
    stem = layer.removesuffix("_proj")
    for each in (*(_KV_COUNTS if stem in _KEYS else ()), *_COUNTS):
        found = getattr(owner, each, None)
        if isinstance(found, int) and found and size % found == 0:
            return found
    return None
