"""Tiny forms of Hugging Face configurations: every field that is a size gets a small value."""

from __future__ import annotations

import inspect
import re
from typing import Any

LAYERS, VOCABULARY = 2, 96

# The first pattern that matches the whole name of a field decides.
_SIZES: list[tuple[str, Any]] = [
    (r"(.*_)?(vocab_size|vocab_size_per_layer_input|num_embeddings)", VOCABULARY),
    (r"(hidden|attn_|attention_|lightning_)?_?(n|num)_?(kv|key_value|query)_(heads|groups)", 2),
    (r"(index|linear|lightning|mamba|kda|swa)_(n|num)_(key|kv|key_value)_heads", 2),
    (r".*mamba_n_groups|mamba_ngroups|n_groups|n_group|topk_group|num_(block|attention)_groups", 1),
    (r"(.*_)?(n_?heads?|(num_)?(attention_)?heads|num_.*_heads|num_head)", 4),
    (r"mamba_(d_head|head_dim|headdim)", 16),
    (r"(.*_)?(head_dim|head_size|kv_channels|d_kv|d_head|v_dim_per_head)(_.*)?", 8),
    (r"qk_rope_head_dim|rotary_dim|rotary_ndims", 8),
    (r"(.*_)?(lora_rank|rank|dt_rank|time_step_rank)", 16),
    (r"(n|num)_(shared|null)_experts", 1),
    (r"(.*_)?(experts_per_tok(en)?|moe_k|top_k|topk|num_selected_experts|num_experts_per_.*)", 2),
    (r"(.*_)?(n|num)_?(local_|routed_|zero_)?experts|expert_num", 4),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_size|d_ff|n_inner|d_inner|ffn_hidden_size)(_.*)?", 64),
    (
        r"(.*_)?(hidden_size(_global)?|d_model|n_embd|d_embed|embed_dim|lru_width|dim_model|dim|emb_dim)",
        32,
    ),
    (r"(.*_)?(embedding_size|embed_size|input_embedding_size|output_embedding_size)", 32),
    (r"hidden_size_per_layer_input", 8),
    (r"num_kv_shared_layers", 0),
    (
        r"(.*_)?(n|num)_(hash_|pool_)?layers|n_?layers?|num_hidden_layers|(de|en)coder_layers",
        LAYERS,
    ),
    (r"(.*_)?(n_positions|max_position_embeddings|n_ctx|max_seq_len|max_target_positions)", 64),
    (r"max_sequence_length|seq_length|max_source_positions|original_max_.*", 64),
    (r"(.*_)?(sliding_window(_size)?|attention_window|local_window_size|window_size)", 8),
    (r"(.*_)?(state_size|d_state)", 8),
    (r"(.*_)?chunk_size", 8),
]


def tiny(made_by: Any, **given: Any) -> Any:
    """A tiny configuration of a class, with dropout on; `given` are fields that must be so."""
    usual = made_by()
    fields = _fields(usual) | given
    small = made_by(**fields)
    for name in ("layer_types", "layers_block_type"):
        kinds = list(dict.fromkeys(getattr(usual, name, None) or ()))
        if name not in given and not set(kinds) <= set(getattr(small, name, None) or ()):
            layers = max(LAYERS, len(kinds))  # one of each kind
            kinds = (kinds * layers)[:layers]
            if isinstance(getattr(made_by, name, None), property):
                return small  # which has them all by other fields
            return made_by(**fields | {"num_hidden_layers": layers, name: kinds} | given)
    return small


def _fields(config: Any) -> dict[str, Any]:
    """The fields of a configuration that get smaller."""
    takes = inspect.signature(type(config)).parameters
    layers = getattr(config, "num_hidden_layers", None)
    fields = {}
    for name, value in config.__dict__.items():
        if hasattr(value, "to_dict"):
            fields[name] = {"model_type": value.model_type} | _fields(value)
        elif name in takes and _small(name, value) is not value:
            fields[name] = _small(name, value)
        elif name in takes and isinstance(value, list) and len(value) == layers:
            fields[name] = value[:LAYERS]
    if "kv_lora_rank" in fields and "num_key_value_heads" in takes:
        fields["num_key_value_heads"] = fields["num_attention_heads"]  # all heads have keys
    return fields


def _small(name: str, value: Any) -> Any:
    if isinstance(value, float) and re.search("drop(out)?|layerdrop", name) and "layer" not in name:
        return 0.1
    if name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
        return VOCABULARY - 1
    if name.endswith("token_id") and isinstance(value, list):
        return [min(each, VOCABULARY - 1) for each in value]
    if type(value) is int:
        for pattern, size in _SIZES:
            if re.fullmatch(pattern, name):
                return min(value, size) if value > 0 else value
    return value
