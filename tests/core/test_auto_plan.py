"""`plan="auto"`: plans that models bring, and pairs of linear layers in models that bring none."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.models import transformer, vision
from torch import nn

from shardwise import Replicate, Shard, make_plan, shard_module
from shardwise.errors import LayoutError
from shardwise.parallel.auto import STYLES

from ..compare import virtual

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def rules(model: nn.Module, *axes: str) -> Any:
    names = axes or ("dp", "tp")
    return make_plan(model, virtual(*[2] * len(names), names=names), "auto").rules


# --- plans that a model brings ------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(4, 16, 8))
        self.down_proj = nn.Parameter(torch.ones(4, 8, 8))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.q_norm = nn.LayerNorm(8)
        self.experts = Experts()
        self.sinks = nn.Parameter(torch.ones(8))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))


STYLES_OF_LAYERS = {
    "layers.*.q_proj": "colwise",
    "layers.*.o_proj": "rowwise",
    "layers.*.q_norm": "replicated_with_grad_allreduce",
    "layers.*.experts.gate_up_proj": "packed_colwise",
    "layers.*.experts.down_proj": "rowwise",
    "layers.*.experts": "moe_tp_experts",
    "layers.*.sinks": "colwise",
    "embed_tokens": "embedding_rowwise",
}


class CausalLM(nn.Module):
    """As in Hugging Face: `tp_plan` has the plan of the base model, with its name before it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.tp_plan = {f"model.{key}": style for key, style in STYLES_OF_LAYERS.items()}
        self.tp_plan["lm_head"] = "colwise_gather_output"
        self.ep_plan = {"model.layers.*.experts.gate_up_proj": "grouped_gemm"}


EXPECTED = {
    "embed_tokens.weight": {"tp": S0},
    "layers.*.sinks": {"tp": S0},
    "layers.*.q_proj.weight": {"tp": S0},
    "layers.*.q_proj.bias": {"tp": S0},
    "layers.*.o_proj.weight": {"tp": S1},
    "layers.*.experts.gate_up_proj": {"tp": Shard(1, split=2)},
    "layers.*.experts.down_proj": {"tp": Shard(2)},
}


def under(name: str, placed: Any) -> Any:
    return {f"{name}.{key}": value for key, value in placed.items()}


def test_the_plan_of_the_model() -> None:
    expected = under("model", EXPECTED) | {"lm_head.weight": {"tp": S0}}
    assert rules(CausalLM()) == expected


def test_the_plan_of_a_model_inside_another() -> None:
    wrapped = nn.ModuleDict({"policy": CausalLM(), "value": nn.Linear(8, 1)})
    expected = under("policy", under("model", EXPECTED) | {"lm_head.weight": {"tp": S0}})
    assert rules(wrapped) == expected


def test_the_plan_of_a_configuration() -> None:
    model: Any = CausalLM()
    del model.tp_plan
    model.base_model_prefix = "model"
    model.config = SimpleNamespace(base_model_tp_plan=STYLES_OF_LAYERS)
    assert rules(model) == under("model", EXPECTED) | {"lm_head.weight": {"tp": S0}}


def test_a_plan_is_completed_where_it_is_silent() -> None:
    model = CausalLM()
    model.model.layers.extend([nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})])
    for key in ("embed_tokens", "layers.*.o_proj"):
        del model.tp_plan[f"model.{key}"]
    found = rules(model)
    assert found["model.embed_tokens.weight"] == {"tp": S0}
    assert found["model.layers.*.up.weight"] == {"tp": S0}
    assert found["model.layers.*.down.weight"] == {"tp": S1}
    assert "model.layers.*.o_proj.weight" not in found, "its authors want it so"


def test_names_of_a_tied_parameter_that_differ() -> None:
    model = CausalLM()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.tp_plan["model.embed_tokens"] = "embedding_colwise"
    found = rules(model)
    assert found["model.embed_tokens.weight"] == {"tp": S1} and "lm_head.weight" not in found


def test_experts_over_an_axis_of_their_own() -> None:
    found = rules(CausalLM(), "ep", "tp")
    places = {"ep": S0, "tp": Shard(1, split=2)}
    assert found["model.layers.*.experts.gate_up_proj"] == places
    assert found["model.layers.*.q_proj.weight"] == {"tp": S0}
    assert rules(CausalLM(), "ep") == {"model.layers.*.experts.gate_up_proj": {"ep": S0}}


@pytest.mark.parametrize(
    "style, weight, bias",
    [
        ("colwise", S0, S0),
        ("colwise_rep", S0, S0),
        ("rowwise", S1, None),
        ("rowwise_split_input", S1, None),
        ("packed_colwise", Shard(0, split=2), Shard(0, split=2)),
        ("packed_rowwise", Shard(1, split=2), None),
        ("embedding_colwise", S1, S1),
        ("sequence_parallel", None, None),
        ("all_reduce", None, None),
    ],
)
def test_styles(style: str, weight: Any, bias: Any) -> None:
    layer = nn.Linear(8, 8)
    assert STYLES[style](layer.weight) == weight
    if style != "embedding_colwise":
        assert STYLES[style](layer.bias) == bias


def test_a_style_that_is_not_known_is_told() -> None:
    model = CausalLM()
    model.tp_plan["model.layers.*.o_proj"] = "by_magic"
    with pytest.warns(UserWarning, match="the styles {'model.layers.*.o_proj': 'by_magic'}"):
        assert "model.layers.*.o_proj.weight" not in rules(model)


class Wrapped(nn.Module):
    """As peft wraps a model: its plan is to be had here too, but its names begin with `inside`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model
        self.tp_plan = STYLES_OF_LAYERS


def test_the_plan_of_a_model_in_a_wrapper_names_the_layers_that_adapters_wrap() -> None:
    model = Inner()
    model.tp_plan = STYLES_OF_LAYERS
    for layer in model.layers:
        adapted = nn.Module()
        adapted.base_layer, adapted.lora_A = layer.q_proj, nn.Linear(8, 2, bias=False)
        layer.q_proj = adapted
    plan = make_plan(Wrapped(model), virtual(2, 2, names=("dp", "tp")), "auto")
    assert plan["inside.layers.0.q_proj.base_layer.weight"] == (R, S0)
    assert plan["inside.layers.1.q_proj.lora_A.weight"] == (R, R)
    assert plan["inside.layers.1.o_proj.weight"] == (R, S1)


# --- models that bring none ---------------------------------------------------------------------


def test_attention_mlp_and_vocabulary() -> None:
    assert rules(transformer.Llama()) == {
        "embed.weight": {"tp": S0},
        "blocks.*.attention.q.weight": {"tp": S0},
        "blocks.*.attention.k.weight": {"tp": S0},
        "blocks.*.attention.v.weight": {"tp": S0},
        "blocks.*.attention.o.weight": {"tp": S1},
        "blocks.*.mlp.gate.weight": {"tp": S0},
        "blocks.*.mlp.up.weight": {"tp": S0},
        "blocks.*.mlp.down.weight": {"tp": S1},
        "head.weight": {"tp": S0},
    }


def test_queries_keys_and_values_in_one() -> None:
    found = rules(vision.ViT())
    in_three = {"tp": Shard(0, split=3)}
    assert (
        found["blocks.*.attention.qkv.weight"] == found["blocks.*.attention.qkv.bias"] == in_three
    )
    assert found["blocks.*.attention.proj.weight"] == {"tp": S1}
    assert not any("patches" in key or "head" in key for key in found)


def test_attention_and_mlps_are_paired_by_name_where_widths_are_equal() -> None:
    sizes = {"qkv": (8, 24), "out": (8, 8), "gate": (8, 24), "up": (8, 24), "down": (24, 8)}
    block = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
    assert rules(nn.ModuleDict({"blocks": nn.ModuleList([block])})) == {
        "blocks.*.qkv.weight": {"tp": Shard(0, split=3)},
        "blocks.*.out.weight": {"tp": S1},
        "blocks.*.gate.weight": {"tp": S0},
        "blocks.*.up.weight": {"tp": S0},
        "blocks.*.down.weight": {"tp": S1},
    }


class Conv1D(nn.Module):
    """The linear layer of GPT-2: its weight is (inputs, outputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


def test_transposed_weights() -> None:
    block = nn.ModuleDict(
        {
            "attn": nn.ModuleDict({"c_attn": Conv1D(24, 8), "c_proj": Conv1D(8, 8)}),
            "mlp": nn.ModuleDict({"c_fc": Conv1D(32, 8), "c_proj": Conv1D(8, 32)}),
        }
    )
    assert rules(nn.ModuleDict({"h": nn.ModuleList([block])})) == {
        "h.*.attn.c_attn.weight": {"tp": Shard(1, split=3)},
        "h.*.attn.c_attn.bias": {"tp": Shard(0, split=3)},
        "h.*.attn.c_proj.weight": {"tp": S0},
        "h.*.mlp.c_fc.weight": {"tp": S1},
        "h.*.mlp.c_fc.bias": {"tp": S0},
        "h.*.mlp.c_proj.weight": {"tp": S0},
    }


def test_layers_of_pytorch() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
    )
    assert rules(model) == {
        "layers.*.self_attn.in_proj_weight": {"tp": Shard(0, split=3)},
        "layers.*.self_attn.in_proj_bias": {"tp": Shard(0, split=3)},
        "layers.*.self_attn.out_proj.weight": {"tp": S1},
        "layers.*.linear1.weight": {"tp": S0},
        "layers.*.linear1.bias": {"tp": S0},
        "layers.*.linear2.weight": {"tp": S1},
    }


def test_linear_layers_in_a_row() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 2)
    )
    assert rules(model) == {"0.weight": {"tp": S0}, "0.bias": {"tp": S0}, "3.weight": {"tp": S1}}


def test_linear_layers_in_a_row_of_every_block_are_one_pattern() -> None:
    blocks = nn.ModuleList(
        nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))})
        for _ in range(3)
    )
    assert rules(blocks) == {
        "*.mlp.0.weight": {"tp": S0},
        "*.mlp.2.weight": {"tp": S1},
        "*.mlp.0.bias": {"tp": S0},
    }


def test_a_glob_that_would_match_too_much_is_a_regex() -> None:
    """As in BERT: `layer.*.output.dense` is also `layer.0.attention.output.dense`."""

    def dense(inputs: int, outputs: int) -> nn.Module:
        return nn.ModuleDict({"dense": nn.Linear(inputs, outputs, bias=False)})

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.output = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    block = nn.ModuleDict(
        {"attention": Attention(), "intermediate": dense(8, 16), "output": dense(16, 8)}
    )
    block["attention"].output = dense(8, 8)
    found = rules(nn.ModuleDict({"layer": nn.ModuleList([block])}))
    assert found == {
        "layer.*.attention.query.weight": {"tp": S0},
        "layer.*.attention.output.dense.weight": {"tp": S1},
        "layer.*.intermediate.dense.weight": {"tp": S0},
        re.compile(r"layer\.\d+\.output\.dense\.weight"): {"tp": S1},
    }


def test_layers_without_a_partner_are_left() -> None:
    model = nn.ModuleDict({"up": nn.Linear(4, 6), "proj": nn.Linear(5, 4), "k": nn.Linear(4, 3)})
    with pytest.raises(LayoutError) as caught:
        rules(model)
    assert str(caught.value) == (
        'shard_module: plan="auto" knows no layer of ModuleDict: it has no tp_plan, and no '
        "attention, MLP or vocabulary by a name that is known. Write the plan as a dict: "
        '{"*.up.weight": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}.'
    )


def test_a_mesh_without_the_axis() -> None:
    with pytest.raises(LayoutError) as caught:
        rules(transformer.Llama(), "data", "model")
    assert str(caught.value) == (
        'shard_module: plan="auto" shards on an axis named "tp" (and experts on "ep"), but mesh '
        "(data=2, model=2) has none. Name one so, or write the plan as a dict; with {} all "
        "parameters are replicated."
    )


def test_the_plan_is_printed_ready_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = virtual(2, names=("tp",))
    model = shard_module(transformer.Llama(layers=1), mesh, "auto")
    printed = capsys.readouterr().out
    pasted = eval(printed, {"Shard": Shard})
    other = shard_module(transformer.Llama(layers=1), mesh, pasted)
    assert capsys.readouterr().out == ""
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.placements == b.placements
