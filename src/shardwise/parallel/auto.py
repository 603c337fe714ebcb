"""`plan="auto"`: the plan that a Hugging Face model brings, or the one its layers suggest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import nn

from ..errors import LayoutError
from ..layout.mesh import Topology
from ..layout.placement import Placement, Shard
from ..layout.user_line import warn_user
from .linear_pairs import block_of, pair_placements
from .names import common_names, generic_name

Found: TypeAlias = dict[str, Placement]
"""Placements of parameters by name, on one axis."""

ByAxis: TypeAlias = dict[str, Placement]
Rules: TypeAlias = dict[str | re.Pattern[str], ByAxis]

_TENSOR, _EXPERT = "tp", "ep"


def automatic_rules(model: nn.Module, mesh: Topology) -> Rules:
    """The plan of the model itself, and pairs of linear layers where it says nothing."""
    by_axis: dict[str, Found] = {}
    if _EXPERT in mesh.names:
        by_axis[_EXPERT] = dict(_own_plan(model, "ep_plan"))
    if _TENSOR in mesh.names:
        by_axis[_TENSOR] = _completed(dict(_own_plan(model, "tp_plan")), pair_placements(model))
    if not by_axis:
        raise LayoutError(
            f'shard_module: plan="auto" shards on an axis named "{_TENSOR}" (and experts on '
            f'"{_EXPERT}"), but mesh {mesh} has none. Name one so, or write the plan as a dict; '
            "with {} all parameters are replicated."
        )
    if not any(by_axis.values()):
        raise LayoutError(
            f'shard_module: plan="auto" knows no layer of {type(model).__name__}: it has no '
            "tp_plan, and no attention, MLP or vocabulary by a name that is known. Write the plan "
            'as a dict: {"*.up.weight": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}.'
        )
    return _as_rules(dict(model.named_parameters(remove_duplicate=False)), by_axis)


def _as_rules(parameters: dict[str, nn.Parameter], by_axis: dict[str, Found]) -> Rules:
    """Placements by name as rules, one for all layers that are alike. If the names of a tied
    parameter have several placements, the first counts."""
    groups: dict[str, dict[str, ByAxis]] = {}
    first: dict[nn.Parameter, ByAxis] = {}
    for name, parameter in parameters.items():
        places = {axis: found[name] for axis, found in by_axis.items() if name in found}
        if places and first.setdefault(parameter, places) == places:
            groups.setdefault(generic_name(name), {})[name] = places
    rules: Rules = {}
    for generic, placed in groups.items():
        for places in {str(each): each for each in placed.values()}.values():
            wanted = [name for name, each in placed.items() if each == places]
            rules.update(dict.fromkeys(_patterns(generic, wanted, list(parameters)), places))
    return rules


def _completed(own: Found, pairs: Found) -> Found:
    """The model's own plan, and pairs where it is silent: outside of blocks, and in blocks of which
    it names no parameter, such as those of a vision tower. Other blocks stay as it says."""
    named = {_block(name) for name in own} - {""}
    return {name: place for name, place in pairs.items() if _block(name) not in named} | own


def _block(parameter: str) -> str:
    return block_of(parameter.rpartition(".")[0])


def _patterns(generic: str, wanted: list[str], names: list[str]) -> list[str | re.Pattern[str]]:
    """A glob or regex of exactly the wanted names, else the names themselves."""
    for glob in (generic, *common_names(wanted)):
        if [name for name in names if fnmatchcase(name, glob)] == wanted:
            return [glob]
        regex = re.compile(re.escape(glob).replace(r"\*", r"\d+"))
        if [name for name in names if regex.fullmatch(name)] == wanted:
            return [regex]
    return list(wanted)


# --- plans of Hugging Face models ----------------------------------------------------------------


def _columns(tensor: torch.Tensor, split: int = 1) -> Placement:
    """Shards of the output features: dim 0 of a weight and a bias, dim 1 of stacked experts."""
    return _blocks(tensor, max(tensor.ndim - 2, 0), split)


def _rows(tensor: torch.Tensor, split: int = 1) -> Placement | None:
    """Shards of the input features; a bias is whole."""
    return None if tensor.ndim < 2 else _blocks(tensor, tensor.ndim - 1, split)


def _blocks(tensor: torch.Tensor, dim: int, split: int) -> Placement:
    size = tensor.shape[dim]
    return Shard(dim, split if size % split == 0 and size > split else 1)


Style: TypeAlias = Callable[[torch.Tensor], Placement | None]


def _whole(tensor: torch.Tensor) -> None:
    """No placement: the style says how local tensors communicate. Here layouts say that."""


STYLES: dict[str, Style] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "local_colwise"), _columns),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise"), _rows),
    **dict.fromkeys(("packed_colwise", "local_packed_colwise"), lambda t: _columns(t, 2)),
    **dict.fromkeys(("packed_rowwise", "local_packed_rowwise"), lambda t: _rows(t, 2)),
    **dict.fromkeys(("embedding_rowwise", "vocab_parallel_rowwise"), lambda t: Shard(0)),
    "embedding_colwise": lambda t: Shard(1),
    "grouped_gemm": lambda t: Shard(0),
    **dict.fromkeys(
        (
            *("sequence_parallel", "replicate", "replicated", "replicated_with_grad_allreduce"),
            *("all_reduce", "gather", "local", "local_params", "mla_kv_a_proj", "isolated"),
            *("moe_tp_experts", "moe_identity_expert", "ep_router", "ep_dispatch_experts"),
        ),
        _whole,
    ),
}
"""The placement of a parameter by each style of Hugging Face's plans."""


def _own_plan(model: nn.Module, kind: str) -> Iterator[tuple[str, Placement]]:
    """The placements that models inside this one bring with them."""
    done: list[str] = []
    for prefix, part in model.named_modules():
        if any(prefix.startswith(outer) for outer in done):
            continue
        plan = _styles(part, kind)
        named = [
            (name, tensor, style)
            for name, tensor in part.named_parameters(remove_duplicate=False)
            if (style := _style_of(plan, name)) is not None
        ]
        if named:  # else it is the plan of a model inside, as that of a model wrapped by peft
            start = f"{prefix}." if prefix else ""
            done.append(start)
            _warn_of_unknown(plan)
            for name, tensor, style in named:
                place = STYLES.get(style, _whole)(tensor)
                if place is not None:
                    yield start + name, place


def _styles(part: nn.Module, kind: str) -> dict[str, str]:
    """From module or parameter names, with `*` for indices, to styles."""
    plan = getattr(part, kind, None) or getattr(part, f"_{kind}", None)
    if plan:
        return dict(plan)
    plan = getattr(getattr(part, "config", None), f"base_model_{kind}", None) or {}
    prefix = getattr(part, "base_model_prefix", "")
    start = f"{prefix}." if prefix and hasattr(part, prefix) else ""
    return {start + key: style for key, style in plan.items()}


def _warn_of_unknown(plan: dict[str, str]) -> None:
    unknown = {key: style for key, style in plan.items() if style not in STYLES}
    if unknown:
        warn_user(
            f'shard_module: plan="auto" does not know the styles {unknown}: it leaves these '
            "parameters replicated."
        )


def _style_of(plan: dict[str, str], name: str) -> str | None:
    """The style of a parameter; the layers that peft wraps keep theirs."""
    generic = generic_name(name).replace(".base_layer.", ".")
    style = plan.get(generic) or plan.get(generic.rpartition(".")[0])
    if style == "colwise_gather_output" and ".gate_up_proj." in generic:
        return "packed_colwise"  # two layers in one; what is gathered there stays sharded here
    return style
