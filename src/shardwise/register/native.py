"""`register_rule`: the native form of a rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain
from types import NoneType
from typing import Any

from .._torch import OpOverload
from ..dispatch.decide import Decision
from ..errors import RuleError, need, public
from ..layout.placement import Partial
from ..rules import Call, Dims, Family, Local, Registered, Rule, Scaled, notation, parse
from .operators import check_shapes, overloads, put


@public
def register_rule(
    op: Any,
    rule: str | Family,
    *,
    linear: Sequence[Sequence[int]] = (),
    added: Sequence[int] = (),
    reduce: str | None = "sum",
    local: Local | None = None,
    reads: Sequence[str] | None = None,
) -> None:
    """Give an operator, or each of a list, a rule: index notation, or a function of the call.

    - `linear`: sets of operands that may be Partial together.
    - `added`: operands that are added to the result, so that only one rank of an axis on which the
      result is Partial may add them.
    - `reduce`: the reduction of results that lack a sharded factor; None if they must not lack one.
    - `local(op, args, kwargs, site)` replaces the local call.
    - `reads`: the numbers that a function `fn(call) -> Rule` reads (all, if not given). They tell
      two calls apart.

    In-place forms follow their base operator. A later rule replaces an earlier one.

    >>> import torch
    >>> from shardwise import Shard, distribute_tensor, init_device_mesh
    >>> @torch.library.custom_op("shardwise_docs::scaled_mm", mutates_args=())
    ... def scaled_mm(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    ...     return a @ b * scale
    >>> @scaled_mm.register_fake
    ... def _(a, b, scale):
    ...     return a.new_empty(a.shape[0], b.shape[1])
    >>> register_rule(scaled_mm, "m k, k n -> m n", linear=[[0], [1]])
    >>> mesh = init_device_mesh("cpu", (2,))
    >>> a = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    >>> b = distribute_tensor(torch.ones(6, 3), mesh, [Shard(0)])
    >>> scaled_mm(a, b, 0.5).placements
    (P(sum),)
    """
    ops = overloads("register_rule", op)
    if reduce is not None:
        Partial(reduce)  # raises if there is no such reduction
    sets = [linear, *linear] if isinstance(linear, (list, tuple)) else [linear]
    for given in (*sets, added):
        need("register_rule", given, list | tuple, "lists of operands", RuleError)
    if isinstance(rule, str):
        _check_notation(ops, rule, [*chain(*linear), *added])
        family = notation(rule, linear=linear, added=added, reduce=reduce)
        reads = ()
    elif callable(rule):
        if linear or added or reduce != "sum":
            raise RuleError(
                "register_rule: linear, added and reduce belong to a rule in index notation. "
                "A function says them in the Rule that it returns."
            )
        family = rule
    else:
        raise RuleError(
            f"register_rule: {rule!r} is neither index notation, like 'm k, k n -> m n', nor a "
            "function from a Call to a Rule."
        )
    by_value = None if reads is None else frozenset(reads)
    for each in ops:
        _check_names(each, by_value)
        put(each, Registered(_whole(family, local), by_value=by_value, check=_check))


def _whole(family: Family, local: Local | None) -> Family:
    """The family with its local call; each rule that it returns is checked."""

    def checked(call: Call) -> Rule:
        rule = family(call)
        if not isinstance(rule, Rule):
            raise RuleError(f"{call.name}: the rule's function returned {rule!r}, not a Rule.")
        if (len(rule.inputs), len(rule.outputs)) == (len(call.specs), len(call.results)):
            operands = [spec.meta.shape for spec in call.specs]
            _check_sizes(call, rule, "operand", rule.inputs, operands)
            _check_sizes(call, rule, "result", rule.outputs, [r.shape for r in call.results])
        return rule if local is None else dataclasses.replace(rule, local=local)

    return checked


def _check_sizes(
    call: Call, rule: Rule, kind: str, patterns: Sequence[Dims], shapes: Sequence[Sequence[int]]
) -> None:
    """Raise if a dim is not as large as the factor that it walks along."""
    for place, (dims, shape) in enumerate(zip(patterns, shapes, strict=True)):
        wanted = [
            rule.sizes.get(at.factor, size) * (at.link.block if at.link else 1)
            if at is not None and isinstance(at.link, (Scaled, NoneType))
            else size
            for at, size in zip(dims, shape, strict=False)
        ]
        if wanted != list(shape):
            raise RuleError(
                f"{call.name}: by the rule {rule} {kind} {place} has shape {wanted}, but it has "
                f"shape {list(shape)}."
            )


def _check(call: Call, rule: Rule, decision: Decision) -> None:
    """Check the shapes of local results, if the local call is the operator's own."""
    if rule.local is None and rule.shape_arg is None and rule.tail is None and not rule.ignores:
        check_shapes(call, decision)


def _check_notation(ops: Sequence[OpOverload], rule: str, named: Sequence[int]) -> None:
    """Check the number of results and the operands named in traits; calls check their operands."""
    inputs, outputs = parse(rule)
    for op in ops:
        count = len(op._schema.returns) or 1  # without results, what is written is the result
        if len(outputs) != count:
            raise RuleError(
                f"register_rule: rule {rule!r} is for {len(outputs)} results, but {op} returns "
                f"{count}: {op._schema}."
            )
    for index in named:
        if not 0 <= index < len(inputs):
            raise RuleError(
                f"register_rule: operand {index} is named in linear or added, but rule {rule!r} "
                f"has operands 0 to {len(inputs) - 1}."
            )


def _check_names(op: OpOverload, names: frozenset[str] | None) -> None:
    known = [argument.name for argument in op._schema.arguments]
    for name in sorted(names or ()):
        if name not in known:
            raise RuleError(
                f"register_rule: reads names {name!r}, but {op} has the arguments "
                f"{', '.join(known)}."
            )
