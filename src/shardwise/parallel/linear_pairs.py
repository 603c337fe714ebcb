"""Pairs of linear layers in models that bring no plan: attention, MLPs, vocabularies.

The first layer of a pair is sharded by its output features, the second by its input features, so
that what lies between is sharded and one sum at the end is all that is communicated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..layout.placement import Placement, Shard

ATTENTION_IN = {
    *("q", "k", "v", "query", "key", "value", "q_proj", "k_proj", "v_proj", "q_lin", "k_lin"),
    *("v_lin", "wq", "wk", "wv", "Wq", "Wk", "Wv", "to_q", "to_k", "to_v", "query_key_value"),
    *("query_proj", "key_proj", "value_proj"),
    *("qkv", "qkv_proj", "c_attn", "Wqkv", "to_qkv", "in_proj"),
}
ATTENTION_OUT = {
    *("o", "out", "proj", "o_proj", "out_proj", "c_proj", "wo", "Wo", "out_lin", "to_out.0"),
    *("attention.output.dense", "attention.dense", "self_attention.dense", "self_attn.dense"),
    "multi_head_attention.dense",
}
_FIRST = ATTENTION_IN | {
    *("up", "gate", "up_proj", "gate_proj", "gate_up_proj", "fc1", "c_fc", "fc_in", "w1", "w3"),
    *("wi", "Wi", "wi_0", "wi_1", "lin1", "linear1", "dense_h_to_4h", "intermediate.dense"),
    *("ff1", "net.0.proj"),
}
_SECOND = ATTENTION_OUT | {
    *("down", "down_proj", "fc2", "fc_out", "w2", "lin2", "linear2", "dense_4h_to_h", "ff2"),
    *("output.dense", "net.2"),
}
_HEAD = {"lm_head", "embed_out", "output_projection"}
_VOCABULARY = {
    *("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "token_embedding", "shared"),
    *("token_embeddings", "embed", "embedding", "embeddings", "tokens_embed"),
}
_PLAIN = (
    *(nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU),
    *(nn.ELU, nn.Mish, nn.Hardswish, nn.Softplus, nn.ReLU6, nn.SELU),
)


def is_called(module: str, names: set[str]) -> bool:
    """True if the last one, two or three parts of a module's name are among these names."""
    path = module.split(".")
    return any(".".join(path[-count:]) in names for count in (1, 2, 3))


def block_of(module: str) -> str:
    """The name of a module up to the index of the block that it is in; empty if it is in none."""
    path = module.split(".")[:-1]
    while path and not path[-1].isdigit():
        path.pop()
    return ".".join(path)


@dataclass(frozen=True)
class _Layer:
    """A linear layer; `transposed` if its weight is (inputs, outputs), as in GPT-2's Conv1D."""

    name: str
    inputs: int
    outputs: int
    transposed: bool
    biased: bool

    @property
    def block(self) -> str:
        return block_of(self.name)

    def first(self, split: int) -> dict[str, Placement]:
        """Sharded by output features."""
        places: dict[str, Placement] = {f"{self.name}.weight": Shard(int(self.transposed), split)}
        return places | ({f"{self.name}.bias": Shard(0, split)} if self.biased else {})

    def second(self) -> dict[str, Placement]:
        """Sharded by input features; the bias is whole."""
        return {f"{self.name}.weight": Shard(int(not self.transposed))}


def pair_placements(model: nn.Module) -> dict[str, Placement]:
    """The placements of the parameters of all pairs, embeddings and heads that are recognised."""
    layers = dict(_layers(model))
    places: dict[str, Placement] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.Sequential):
            places |= _sequential(name, part, layers)
        elif isinstance(part, nn.MultiheadAttention):
            places |= _multihead(name, part)
    blocks: dict[str, list[_Layer]] = {}
    for layer in layers.values():
        if f"{layer.name}.weight" not in places:
            blocks.setdefault(layer.block, []).append(layer)
    for block in blocks.values():
        places |= _pairs(block)
    return places | _vocabulary(model, layers)


def _layers(model: nn.Module) -> Iterator[tuple[str, _Layer]]:
    for name, part in model.named_modules():
        transposed = type(part).__name__ == "Conv1D"
        if isinstance(part, nn.Linear) or transposed:
            sizes: Any = getattr(part.weight, "shape", ())
            outputs, inputs = reversed(sizes) if transposed else sizes
            biased = getattr(part, "bias", None) is not None
            yield name, _Layer(name, inputs, outputs, transposed, biased)


def _pairs(block: list[_Layer]) -> dict[str, Placement]:
    """The layers of a block whose names are known and that have a partner."""
    firsts = [layer for layer in block if is_called(layer.name, _FIRST)]
    seconds = [layer for layer in block if is_called(layer.name, _SECOND) and layer not in firsts]
    places: dict[str, Placement] = {}
    for first in firsts:
        partners = _partners(first, seconds)
        widths = [pair for other in partners for pair in enumerate(_widths(other), 1)]
        counts = [count for count, width in widths if width == first.outputs]
        shared = any(other.inputs % first.outputs == 0 for other in partners)  # few heads of keys
        if counts or shared:
            together = counts and not is_called(first.name, {"query_key_value"})
            places |= first.first(min(counts) if together else 1)
        for second in partners:
            if first.outputs in _widths(second):
                places |= second.second()
    return places


def _partners(first: _Layer, seconds: list[_Layer]) -> list[_Layer]:
    """The second layers that a first one may belong to: of attention, or of an MLP, by name."""
    is_attention = is_called(first.name, ATTENTION_IN)
    own = [each for each in seconds if is_called(each.name, ATTENTION_OUT) is is_attention]
    return own or seconds


def _widths(second: _Layer) -> tuple[int, int, int]:
    """The output features that a first layer may have: for gate and up, and q, k and v, in one."""
    return second.inputs, 2 * second.inputs, 3 * second.inputs


def _sequential(name: str, part: nn.Sequential, layers: dict[str, _Layer]) -> dict[str, Placement]:
    """Neighbouring linear layers with nothing but activations and dropout between them."""
    places: dict[str, Placement] = {}
    before: _Layer | None = None
    for key, each in part.named_children():
        layer = layers.get(f"{name}.{key}" if name else key)
        if layer is None:
            before = before if isinstance(each, _PLAIN) else None
        elif before is not None and before.outputs == layer.inputs:
            places |= before.first(1) | layer.second()
            before = None
        else:
            before = layer
    return places


def _multihead(name: str, part: nn.MultiheadAttention) -> dict[str, Placement]:
    start = f"{name}." if name else ""
    places: dict[str, Placement] = {f"{start}out_proj.weight": Shard(1)}
    for key, _ in part.named_parameters(recurse=False):
        if key.startswith("in_proj"):
            places[start + key] = Shard(0, 3)
        elif key.endswith("_proj_weight"):
            places[start + key] = Shard(0)
    return places


def _vocabulary(model: nn.Module, layers: dict[str, _Layer]) -> dict[str, Placement]:
    """Token embeddings by vocabulary, and the heads that have a score for each token."""
    embeddings = [(n, part) for n, part in model.named_modules() if isinstance(part, nn.Embedding)]
    outer = [layer for layer in layers.values() if not layer.block]
    scores = {layer.outputs for layer in outer if layer.outputs > layer.inputs}
    places: dict[str, Placement] = {}
    sizes = set()
    for name, part in embeddings:
        if is_called(name, _VOCABULARY) or part.num_embeddings in scores:
            sizes.add(part.num_embeddings)
            places[f"{name}.weight"] = Shard(0)
    for layer in outer:
        if layer.outputs in sizes or is_called(layer.name, _HEAD):
            places |= layer.first(1)
    return places
