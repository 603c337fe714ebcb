"""Attention with sharded keys: each rank attends to its own keys, and the logsumexp of each query
is reduced.

The result is the sum of the results of the shards, each weighted by its share in the sum of
exponentials. So two numbers per query are reduced, and the result is Partial; keys and values do
not move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import Any

import torch

from ..dispatch.decide import decide
from ..dispatch.infer import infer
from ..dispatch.operator import register_form
from ..dispatch.plans import Fixed, filled, tensors_in
from ..layout.geometry import contiguous_stride
from ..layout.placement import Partial, Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..redistribute import steps_between
from ..rules import Call, Operand, named
from ..rules.attention import attended, attention, of_own_shape
from ..storage.ragged import as_dtensor, move_to
from ..storage.wrapper import Wrapper, wrap
from .decomposed import reduced

aten = torch.ops.aten
_KERNELS = [
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
]


@dataclass(frozen=True)
class _Plan:
    """The layouts of a call whose keys are sharded over `axes`."""

    axes: tuple[int, ...]
    inputs: tuple[DTensorSpec, ...]
    out: DTensorSpec
    names: tuple[str, ...]
    metas: tuple[TensorMeta, ...]
    structure: tuple[int | Fixed | None, ...]

    def statistic(self, kind: str, dtype: torch.dtype) -> DTensorSpec:
        """The layout of a number for each query that is Partial over the shards of keys."""
        shape = self.out.shape[:3]
        places = [Partial(kind) if p.is_partial() else p for p in self.out.placements]
        cuts = None if self.out.cuts is None else self.out.cuts[:3]
        meta = TensorMeta(shape, contiguous_stride(shape), dtype)
        return DTensorSpec(self.out.topology, places, meta, cuts=cuts)


def _plan(call: Call) -> _Plan:
    """Keys and values stay on the axes that shard them; the rule decides the other axes."""
    specs = dict(zip(_names(call), call.specs, strict=True))
    topology = call.specs[0].topology
    held = [specs[name] for name in ("key", "value")]
    axes = tuple(
        a for a in range(topology.ndim) if any(spec.placements[a].is_shard(2) for spec in held)
    )
    rest = [_without(spec, axes) for spec in call.specs]
    decision = decide(attention(call), _with_specs(call, rest))
    cuts = next((spec.dim_cuts[2] for spec in held if spec.dim_axes[2] == axes), None)
    count = held[0].shape[2]
    inputs = []
    for name, spec in zip(specs, decision.inputs, strict=True):
        dim = {"key": 2, "value": 2, "query": None}.get(name, spec.ndim - 1)
        if dim is None or spec.shape[dim] != count:
            inputs.append(spec)
            continue
        own = [*(spec.cuts or [None] * spec.ndim)]
        own[dim] = cuts
        inputs.append(_placed(spec, axes, Shard(dim), own))
    out = decision.outputs[0]
    return _Plan(
        axes,
        tuple(inputs),
        _placed(out, axes, Partial(), out.cuts),
        tuple(specs),
        call.results,
        call.structure,
    )


def _names(call: Call) -> list[str]:
    return [name for name, value in call.values.items() if isinstance(value, Operand)]


def _with_specs(call: Call, specs: list[DTensorSpec]) -> Call:
    return Call(call.op, call.args, call.kwargs, specs, call.results, call.structure)


def _without(spec: DTensorSpec, axes: tuple[int, ...]) -> DTensorSpec:
    """A layout without shards over `axes`."""
    places = [Replicate() if a in axes else p for a, p in enumerate(spec.placements)]
    kept = [
        None if set(spec.dim_axes[dim]) & set(axes) else cuts
        for dim, cuts in enumerate(spec.cuts or [None] * spec.ndim)
    ]
    return spec.with_placements(places, kept)


def _placed(spec: DTensorSpec, axes: tuple[int, ...], place: Placement, cuts: Any) -> DTensorSpec:
    return spec.with_placements(
        [place if a in axes else p for a, p in enumerate(spec.placements)], cuts
    )


def _cost(call: Call) -> tuple[int, ...] | None:
    """The bytes received to lay out the operands, to reduce two statistics of each query, and to
    reduce the Partial result; None if no key is sharded."""
    held = [call.specs[call.get(name)] for name in ("key", "value")]
    if not any(spec.dim_axes[2] for spec in held) or any(0 in s.shape for s in call.specs):
        return None
    plan = _plan(call)
    received = [
        step.elements_received * src.dtype.itemsize
        for src, dst in zip(call.specs, plan.inputs, strict=True)
        for step in steps_between(src, dst)
        if not step.is_local
    ]
    width, local = plan.out.dtype.itemsize, plan.out.largest_shape
    for axis in plan.axes:
        count = plan.out.topology.shape[axis]
        statistic = 2 * prod(local[:3]) * max(width, 4) * (count - 1) // count
        received += [statistic, statistic, prod(local) * width * (count - 1) // count]
    return tuple(received)


@lru_cache(maxsize=1024)
def _planned(
    op: Any, specs: tuple[DTensorSpec, ...], args: tuple[Any, ...], kwargs: tuple[Any, ...]
) -> _Plan:
    """As `_plan`, for arguments in which an `Operand` stands for each tensor."""
    metas, structure = infer(op, *_as_metas(args, dict(kwargs), specs), specs)
    return _plan(Call(op, args, dict(kwargs), specs, metas, structure))


def _as_metas(args: Any, kwargs: dict[str, Any], specs: Any) -> tuple[Any, Any]:
    def value(given: Any) -> Any:
        if not isinstance(given, Operand):
            return given
        meta = specs[given].meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")

    return [value(v) for v in args], {name: value(v) for name, v in kwargs.items()}


def _form(op: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_in(args, kwargs))
        mesh = next(t._spec.topology for t in tensors if isinstance(t, Wrapper))
        values = [as_dtensor(tensor, mesh) for tensor in tensors]
        specs = tuple(value._spec for value in values)
        symbols = iter([Operand(index) for index in range(len(specs))])
        own, more = filled(args, kwargs, symbols)
        plan = _planned(op, specs, tuple(own), tuple(more.items()))
        laid = [move_to(op, v, spec) for v, spec in zip(values, plan.inputs, strict=True)]
        return _attended(
            op, plan, dict(zip(plan.names, laid, strict=True)), named(op, args, kwargs)
        )

    return run


def _attended(op: Any, plan: _Plan, tensors: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    query, key = tensors["query"]._spec, tensors["key"]._spec
    parts = []
    for coord in plan.out.slots:
        local = {name: t._locals[t._spec.slot(coord)] for name, t in tensors.items()}
        parts.append(attended(op, {**given, **local}, query.box(coord)[2], key.box(coord)[2]))
    dtype = parts[0][1].dtype if parts else torch.float32
    own = wrap(plan.statistic("max", dtype), tuple(lse for _, lse in parts))
    top = reduced(own)
    shares = tuple(
        (lse - _at(top, coord)).exp().masked_fill(lse == -inf, 0)
        for coord, (_, lse) in zip(plan.out.slots, parts, strict=True)
    )
    total = reduced(wrap(plan.statistic("sum", dtype), shares))
    out = []
    for coord, (result, _), share in zip(plan.out.slots, parts, shares, strict=True):
        part = (share / _at(total, coord)).masked_fill(share == 0, 0).unsqueeze(-1)
        out.append(torch.where(part == 0, 0, result * part).to(plan.out.dtype))
    lse = torch.where(top == -inf, 0, top + total.log())
    return _returned(plan, wrap(plan.out, tuple(out)), lse)


def _at(statistic: Any, coord: Any) -> torch.Tensor:
    local: torch.Tensor = statistic._locals[statistic._spec.slot(coord)]
    return local


def _returned(plan: _Plan, out: Any, lse: Any) -> tuple[Any, ...]:
    """All that the operator returns; the seeds are zeros, as there is no dropout."""
    topology = plan.out.topology
    made: list[Any] = [out, _shaped(lse, plan.metas[1])]
    for meta in plan.metas[2:]:
        spec = DTensorSpec(topology, default_placements(topology), meta)
        empty = torch.zeros(meta.shape, dtype=meta.dtype, device=out.device)
        made.append(wrap(spec, (empty,) * len(spec.slots)))
    return tuple(
        made[at] if isinstance(at, int) else at.value if isinstance(at, Fixed) else None
        for at in plan.structure
    )


def _shaped(lse: Any, meta: TensorMeta) -> Any:
    """The logsumexp in the shape and dtype that the operator gives it."""
    spec = lse._spec
    places = [
        p if isinstance(p, Shard) and meta.shape[p.dim] == spec.shape[p.dim] else Replicate()
        for p in spec.placements
    ]
    cuts = None if spec.cuts is None else [*spec.cuts, *[None] * (len(meta.shape) - 3)]
    goal = DTensorSpec(spec.topology, places, meta, cuts=cuts)
    parts = [of_own_shape(_at(lse, c), goal.local_shape(c)).to(meta.dtype) for c in goal.slots]
    return wrap(goal, tuple(parts))


for _kernel in _KERNELS:
    register_form(_kernel._schema.name.removeprefix("aten::"), cost=_cost)(_form(_kernel))
