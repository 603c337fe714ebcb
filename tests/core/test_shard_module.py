"""`shard_module`: a plan is checked as a whole, then the parameters become DTensors in place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, make_plan, shard_module
from shardwise.errors import LayoutError

from ..compare import ints, numbers, virtual

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mesh() -> Any:
    return virtual(2, 2, names=("dp", "tp"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.norm = nn.BatchNorm1d(width)


class Model(nn.Module):
    """Tied ends, blocks that are alike, a single number, buffers."""

    def __init__(self, width: int = 8, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer.q_proj(layer.norm(x.flatten(0, 1)).view(x.shape)).relu()
        logits: torch.Tensor = self.head(x) * self.scale
        return logits


def error(rules: Any, model: nn.Module | None = None, where: Any = None) -> str:
    """The text of the error, after which the model is as it was."""
    model = model or Model()
    with pytest.raises(LayoutError) as caught:
        shard_module(model, where or mesh(), rules)
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(isinstance(tensor, DTensor) for tensor in tensors)
    return str(caught.value)


# --- patterns -----------------------------------------------------------------------------------


def test_patterns_merge_by_axis() -> None:
    plan = make_plan(
        Model(),
        mesh(),
        {
            "layers.*.q_proj.*": {"tp": S0},
            "*.weight": {"dp": Shard(-1)},
            re.compile(r"layers\.[01]\.k_proj\.weight"): {"tp": S0},
            "*.bias": [R, S0],
        },
    )
    assert plan["layers.0.q_proj.weight"] == (S1, S0)
    assert plan["layers.2.q_proj.bias"] == (R, S0)
    assert plan["layers.1.k_proj.weight"] == (S1, S0)
    assert plan["layers.2.k_proj.weight"] == (S1, R)
    assert plan["layers.2.norm.weight"] == (S0, R)
    assert plan["layers.0.norm.running_mean"] == (R, R), "a pattern of parameters leaves buffers"
    assert plan.unnamed == ("scale",)


def test_the_star_counts_where_no_other_pattern_does() -> None:
    rules = {"*": {"dp": S0, "tp": S0}, "*.q_proj.weight": {"tp": S1}, "*.norm.*": {"dp": R}}
    for each in (rules, dict(reversed(rules.items()))):
        plan = make_plan(Model(), mesh(), each)
        assert plan["layers.0.q_proj.weight"] == (S0, S1)
        assert plan["layers.0.k_proj.weight"] == (S0, S0)
        assert plan["layers.0.norm.weight"] == (R, S0)
        assert plan["scale"] == (R, R), "a single number has no dim to shard"
        assert plan["layers.0.norm.num_batches_tracked"] == (R, R)
        assert plan.unnamed == ()


def test_all_names_of_a_tied_parameter_count() -> None:
    for rules in ({"embed.weight": {"tp": S0}}, {"head.weight": {"tp": S0}}):
        model = shard_module(Model(), mesh(), rules)
        assert model.head.weight is model.embed.weight
        assert model.head.weight.placements == (R, S0)
    both = {"embed.weight": {"tp": S0}, "head.weight": {"dp": S1}}
    assert make_plan(Model(), mesh(), both)["head.weight"] == (S1, S0)


def test_patterns_that_only_buffers_match() -> None:
    rules = {"*.norm.running_*": {"tp": S0}, "*.norm.weight": {"tp": S0}}
    model = shard_module(Model(), mesh(), rules)
    assert model.layers[0].norm.running_var.placements == (R, S0)
    assert model.layers[0].norm.num_batches_tracked.placements == (R, R)


# --- errors, word for word ----------------------------------------------------------------------


def test_a_bad_plan_is_told_in_one_error() -> None:
    assert error(
        {
            "layers.*.v_proj.weight": {"tp": S0},
            re.compile(r"layers\.\d"): {"tp": S0},
            "layers.*.norm": {"tp": S0},
            "*.q_proj.*": {"tp": S0},
            "layers.1.q_proj.bias": {"tp": R},
            "layers.0.norm.bias": {"dp": S1},
            "scale": {"dp": S0},
            "head.weight": {"tp": S0},
            "embed.weight": {"tp": S1},
            "layers.0.norm.weight": {"pp": S0},
            "v_proj.weight": {"tp": Partial()},
        }
    ) == (
        "shard_module: the plan does not fit; nothing was changed.\n"
        "- \"layers.0.norm.weight\": mesh (dp=2, tp=2) has no axis 'pp'. Its axes are 'dp', 'tp'.\n"
        "- \"v_proj.weight\": {'tp': P(sum)} is a pending sum, but a parameter has a value. Use "
        "Shard(dim) or Replicate().\n"
        '- "layers.*.v_proj.weight" matches no parameter and no buffer. The model has '
        "'layers.0.q_proj.weight'.\n"
        '- re.compile(r"layers\\.\\d") matches no parameter and no buffer. The model has '
        "'layers.0.norm.bias'. A regex must match the whole name.\n"
        '- "layers.*.norm" matches no parameter and no buffer. It names a module: write '
        '"layers.*.norm.*" for its parameters.\n'
        '- "v_proj.weight" matches no parameter and no buffer. The model has '
        "'layers.0.q_proj.weight'.\n"
        '- scale: "scale" says S(0), but it is a single number.\n'
        "- embed.weight = head.weight: axis 'tp' is S(0) by \"head.weight\" and S(1) by "
        '"embed.weight". Let one of them name fewer parameters.\n'
        '- layers.0.norm.bias: "layers.0.norm.bias" says S(1), but its shape is [8].\n'
        "- layers.1.q_proj.bias: axis 'tp' is S(0) by \"*.q_proj.*\" and R by "
        '"layers.1.q_proj.bias". Let one of them name fewer parameters.'
    )


NOT_FITTING = "shard_module: the plan does not fit; nothing was changed.\n- "
BAD_RULES: list[tuple[Any, str]] = [
    (
        [("*", {"tp": S0})],
        'shard_module: the plan is a dict from parameter names to placements, or "auto", but got '
        "[('*', {'tp': S(0)})]. Write {\"*.q_proj.weight\": {\"tp\": Shard(0)}}.",
    ),
    (
        "automatic",
        'shard_module: the plan is a dict from parameter names to placements, or "auto", but got '
        '\'automatic\'. Write {"*.q_proj.weight": {"tp": Shard(0)}}.',
    ),
    (
        {3: {"tp": S0}},
        f"{NOT_FITTING}3 is not a pattern. Give a glob of parameter names, such as "
        '"*.q_proj.weight", or a compiled regex.',
    ),
    (
        {"*": {"pp": S0}},
        f"{NOT_FITTING}\"*\": mesh (dp=2, tp=2) has no axis 'pp'. Its axes are 'dp', 'tp'.",
    ),
    (
        {"*": {"tp": Partial()}},
        f"{NOT_FITTING}\"*\": {{'tp': P(sum)}} is a pending sum, but a parameter has a value. Use "
        "Shard(dim) or Replicate().",
    ),
    (
        {"*": {"tp": 0}},
        f'{NOT_FITTING}"*": 0 is not a placement. Use Replicate(), Shard(dim) or Partial(op).',
    ),
    (
        {"*": None},
        f'{NOT_FITTING}"*": None is no placement. Write {{}} for what is replicated.',
    ),
]


@pytest.mark.parametrize("rules, text", BAD_RULES, ids=[str(i) for i in range(len(BAD_RULES))])
def test_what_is_no_plan(rules: Any, text: str) -> None:
    assert error(rules) == text


def test_what_is_no_model_and_no_parameter() -> None:
    with pytest.raises(LayoutError, match="shard_module: a module is needed, but got dict"):
        shard_module({}, mesh(), {})  # type: ignore[type-var]
    with pytest.raises(LayoutError) as caught:
        make_plan(Model(), mesh(), {})["embed.wieght"]
    text = "the plan has no parameter 'embed.wieght'. The model has 'embed.weight'."
    assert str(caught.value) == text


def test_blocks_that_do_not_divide_the_dim() -> None:
    text = error({"embed.weight": {"tp": Shard(0, split=3)}})
    assert "- embed.weight = head.weight: " in text and "cannot be seen as 3 equal blocks" in text


def test_parameters_that_have_no_shape_yet() -> None:
    assert error({"1.*": {"tp": S0}}, nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))) == (
        f"{NOT_FITTING}0.weight has no shape yet. Run the lazy module on an input first.\n"
        "- 0.bias has no shape yet. Run the lazy module on an input first."
    )


def test_an_attribute_that_was_computed_from_parameters() -> None:
    """`prune` and the older `weight_norm` keep the weight that forward computes."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    prune.l1_unstructured(plain[0], "weight", 0.4)
    x = numbers(4, 6, dtype=torch.float32)
    expected = plain(x).detach()
    rules: Any = {"0.weight_orig": {"tp": S0}}
    assert "0.weight is such a result: delete it." in error(rules, plain)
    del plain[0].weight
    ours = shard_module(plain, mesh(), rules)
    torch.testing.assert_close(ours(x).full_tensor(), expected)
    assert ours[0].weight_mask.placements == (R, R)


def test_names_of_axes_that_have_none() -> None:
    assert error({"*": {"tp": S0}}, where=virtual(2, 2)) == (
        f"{NOT_FITTING}\"*\": the placements {{'tp': S(0)}} name axes, but those of mesh (2x2) "
        "have no names. Give init_device_mesh(..., mesh_dim_names=), or one placement per axis."
    )
    plan = make_plan(Model(), virtual(2, 2), {"*.weight": [R, S0]})
    assert plan["embed.weight"] == (R, S0)


# --- what is printed ----------------------------------------------------------------------------


def test_a_plan_is_a_table() -> None:
    plan = make_plan(
        Model(12, heads=3, kv_heads=3),
        mesh(),
        {"embed.weight": {"tp": S0}, "*.q_proj.weight": {"tp": S0, "dp": S1}},
    )
    expected = """
parameter                   shape         layout              bytes per rank
----------------------------------------------------------------------------
scale                       []            replicated                     4 B
embed.weight = head.weight  [10, 12]      tp: S(0)                     240 B
layers.*.q_proj.weight      3 x [12, 12]  dp: S(1), tp: S(0)           432 B
layers.*.q_proj.bias        3 x [12]      replicated                   144 B
layers.*.k_proj.weight      3 x [12, 12]  replicated                 1.7 KiB
layers.*.norm.weight        3 x [12]      replicated                   144 B
layers.*.norm.bias          3 x [12]      replicated                   144 B
17 parameters of 4.3 KiB, 2.8 KiB per rank on VirtualMesh('cpu', dp=2, tp=2); \
49.5 % of the elements are whole on every rank
replicated because no pattern names them: scale, layers.*.q_proj.bias, layers.*.k_proj.weight, \
layers.*.norm.weight, layers.*.norm.bias
note: layers.*.q_proj.weight: 3 heads on tp=2 do not divide, so that ranks hold parts of heads. \
It works; attention communicates more.
"""
    assert str(plan) == expected.strip("\n")


def test_uneven_shards_are_told() -> None:
    plan = make_plan(Model(), virtual(3, names=("tp",)), {"embed.weight": {"tp": S0}})
    assert plan.notes == (
        "embed.weight: 10 elements of dim 0 on tp=3 do not divide. It works; the shards are "
        "uneven.",
    )


def test_the_rules_of_a_plan_are_code() -> None:
    rules = {
        "*.weight": {"tp": Shard(0, split=2), "dp": R},
        re.compile(r"layers\.\d+\.q_proj\.bias"): [R, S0],
    }
    code = make_plan(Model(), mesh(), rules).as_code()
    assert code == (
        '{\n    "*.weight": {"tp": Shard(0, split=2), "dp": Replicate()},\n'
        '    re.compile(r"layers\\.\\d+\\.q_proj\\.bias"): [Replicate(), Shard(0)],\n}'
    )
    names = {"re": re, "Shard": Shard, "Replicate": Replicate}
    assert eval(code, names) == rules


# --- what stays ---------------------------------------------------------------------------------

RULES = {"embed.weight": {"tp": S0}, "*.q_proj.weight": {"tp": S0}, "*.norm.*": {"dp": S0}}


def test_parameters_stay_what_they_were() -> None:
    model = Model()
    model.layers[0].requires_grad_(False)
    model.scale.note = "kept"  # type: ignore[attr-defined]
    seen: list[torch.Tensor] = []
    model.embed.weight.register_hook(seen.append)
    held = dict(model.named_parameters())
    values = {name: value.detach().clone() for name, value in held.items()}
    assert shard_module(model, mesh(), RULES) is model
    for name, value in model.named_parameters():
        assert value is held[name] and isinstance(value, nn.Parameter)
        assert value.requires_grad == (not name.startswith("layers.0."))
        assert torch.equal(value.full_tensor(), values[name])
    assert model.scale.note == "kept"  # type: ignore[attr-defined]
    model(ints(4, 3, high=10)).sum().backward()
    assert len(seen) == 1


def test_an_optimizer_that_has_state_goes_on() -> None:
    torch.manual_seed(0)
    models = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    losses = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 2 and model is models[1]:
                shard_module(model, mesh(), RULES, optimizers=[optimizer])
                state = optimizer.state[model.embed.weight]
                assert state["exp_avg"].placements == (R, S0)
            optimizer.zero_grad()
            loss = model(ints(4, 3, high=10, seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            del loss  # a parameter that a graph holds cannot become a DTensor
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-5)


def test_optimizers_are_any_iterable() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(ints(4, 3, high=10)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for wrong in (optimizer, [model]):
        with pytest.raises(LayoutError, match="shard_module: a list of optimizers is needed"):
            shard_module(model, mesh(), RULES, optimizers=wrong)  # type: ignore[arg-type]
    shard_module(model, mesh(), RULES, optimizers=(each for each in [optimizer]))
    for parameter, state in optimizer.state.items():
        if parameter.ndim:
            assert state["exp_avg"].placements == parameter.placements


def test_loading_keeps_layouts() -> None:
    saved = Model().state_dict()
    model = shard_module(Model(), mesh(), RULES)
    for assign in (False, True):
        model.load_state_dict(saved, assign=assign)
        assert model.embed.weight.placements == (R, S0)
        assert torch.equal(model.embed.weight.full_tensor(), saved["embed.weight"])


def test_what_is_sharded_already_stays_as_it_is() -> None:
    model = shard_module(Model(), mesh(), RULES)
    weight = model.embed.weight
    model.adapter = nn.Linear(8, 2)
    plan = make_plan(model, mesh(), {"adapter.weight": {"tp": S1}})
    assert plan["embed.weight"] == (R, S0) and plan.unnamed == ("adapter.bias",)
    shard_module(model, mesh(), plan)
    assert model.embed.weight is weight and weight.placements == (R, S0)
    assert model.adapter.weight.placements == (R, S1)
    shard_module(model, mesh(), RULES)  # the same again changes nothing
    with pytest.raises(LayoutError, match=r"embed.weight = head.weight is .* already, and cannot"):
        shard_module(model, mesh(), {"embed.weight": {"tp": S1}})


# --- placements by axis name --------------------------------------------------------------------


def test_placements_by_axis_name_wherever_a_list_is_taken() -> None:
    where = mesh()
    x = distribute_tensor(numbers(4, 6), where, {"tp": S1})
    assert x.placements == (R, S1)
    assert x.redistribute(placements={"dp": S0}).placements == (S0, R)
    both = sw.redistribute_all([x, x], {"dp": S0})
    assert [each.placements for each in both] == [(S0, R), (S0, R)]
    one, other = sw.redistribute_all([x, x], [{"dp": S0}, {"dp": S1}])
    assert (one.placements, other.placements) == ((S0, R), (S1, R))
    assert sw.zeros(4, device_mesh=where, placements={"dp": S0}).placements == (S0, R)
    assert DTensor.from_local(numbers(2), where, {"tp": S0}).shape == (4,)
    assert distribute_tensor(numbers(4), where, {}).placements == (R, R)
    with pytest.raises(LayoutError) as caught:
        x.redistribute(placements={"pp": S0})
    assert str(caught.value) == (
        "redistribute: mesh (dp=2, tp=2) has no axis 'pp'. Its axes are 'dp', 'tp'."
    )
