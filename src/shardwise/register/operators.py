"""Which operators a registration is for, and the check that a rule keeps its word about shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .._torch import OpOverload, OpOverloadPacket
from ..dispatch import dispatch
from ..dispatch.decide import Decision
from ..dispatch.out_variants import functional_of
from ..dispatch.random_ops import is_random, is_without_dropout
from ..errors import RuleError
from ..layout.geometry import all_coords, memory_order, stride_like
from ..layout.mesh import Coord
from ..layout.spec import DTensorSpec
from ..rules import REGISTERED, Call, Local, Operand, Registered, Site, key_of

__all__ = ["check_shapes", "overloads", "put"]


def overloads(what: str, given: Any) -> list[OpOverload]:
    """The operators that `given` names, each fit to have a rule; out= forms follow the others."""
    many = given if isinstance(given, (list, tuple)) else [given]
    if not many:
        raise RuleError(f"{what}: the list of operators is empty.")
    found: dict[OpOverload, None] = {}
    for each in many:
        for op in _overloads(what, each):
            found[_checked(what, op)] = None
    return list(found)


def _overloads(what: str, given: Any) -> Iterator[OpOverload]:
    if isinstance(given, OpOverload):
        yield given
    elif isinstance(given, OpOverloadPacket):
        for name in given.overloads():
            op = getattr(given, name)
            if not any(argument.is_out for argument in op._schema.arguments):
                yield op
    elif isinstance(given, torch.library.CustomOpDef):  # type: ignore[attr-defined]
        yield given._opoverload
    else:
        raise RuleError(
            f"{what}: {given!r} is not an operator. Give torch.ops.<namespace>.<name>, one of its "
            "overloads, or what torch.library.custom_op returned."
        )


def _checked(what: str, op: OpOverload) -> OpOverload:
    """The operator that the rule serves, or an error if a rule cannot serve it."""
    if any(argument.is_out for argument in op._schema.arguments):
        functional = functional_of(op)
        if functional is None:
            raise RuleError(
                f"{what}: {op} has no form without out=, which is the one that gets a rule."
            )
        op = functional
    if is_random(op) and not is_without_dropout(op, (), {}):
        raise RuleError(
            f"{what}: {op} draws random numbers. Shardwise draws them itself, so that they do not "
            "depend on the layout; a rule for it would never run."
        )
    written = [a for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
    fresh = [r for r in op._schema.returns if not (r.alias_info and r.alias_info.is_write)]
    if len(written) > 1 or (written and fresh):
        raise RuleError(
            f"{what}: {op} writes into {', '.join(a.name for a in written)} and returns "
            f"{len(fresh)} new results. A rule is for an operator that returns new results, or "
            "writes into one tensor: split it into such operators."
        )
    return op


def put(ops: list[OpOverload], rule: Registered) -> None:
    """Make `rule` the rule of the operators, and forget the plans that were made without it."""
    for op in ops:
        REGISTERED[key_of(op)] = rule
    dispatch.clear()


def check_shapes(call: Call, decision: Decision, structure: Any, local: Local | None) -> None:
    """An error if a local call does not give the shapes that the decision promises.

    A rule that is right for even shards and wrong for uneven ones would else give a wrong answer,
    or an error on one rank alone. The calls run on meta tensors, for each kind of rank once.
    """
    specs = (*decision.inputs, *decision.outputs)
    sharded = [any(spec.placements[a].is_shard() for spec in specs) for a in _axes(specs[0])]
    mesh = specs[0].topology.shape
    seen: set[object] = set()
    for coord in all_coords(tuple(n if on else 1 for n, on in zip(mesh, sharded, strict=True))):
        shapes = tuple(spec.local_shape(coord) for spec in specs)
        if shapes not in seen:
            seen.add(shapes)
            _check_at(call, decision, structure, local, coord)


def _axes(spec: DTensorSpec) -> range:
    return range(spec.topology.ndim)


def _check_at(
    call: Call, decision: Decision, structure: Any, local: Local | None, coord: Coord
) -> None:
    metas = [_local_meta(spec, coord) for spec in decision.inputs]
    given, named = _with_operands(call, metas)
    if named.get("device") is not None:
        named["device"] = torch.device("meta")
    try:
        if local is None:
            made = call.op(*given, **named)
        else:
            site = Site(coord, decision.inputs, decision.outputs)
            made = local(call.op, tuple(given), named, site)
    except (RuntimeError, ValueError, IndexError) as error:
        raise RuleError(
            f"{call.name}: the rule says {_promise(decision)}, but the operator fails at "
            f"coordinate {_at(coord)}: {error}"
        ) from error
    if structure is None:  # what was written is what came out
        return
    results = [made] if isinstance(structure, int) else list(made)
    places = [structure] if isinstance(structure, int) else structure
    for place, value in zip(places, results, strict=True):
        want = None if place is None else decision.outputs[place].local_shape(coord)
        got = None if value is None else tuple(value.shape)
        if got != want:
            raise RuleError(_broken_promise(call, decision, place, coord, want, got))


def _broken_promise(
    call: Call, decision: Decision, place: int | None, coord: Coord, want: object, got: object
) -> str:
    return (
        f"{call.name}: the rule says {_promise(decision)}, so result {place} has the local shape "
        f"{_text(want)} at coordinate {_at(coord)}, but the operator gives {_text(got)} there. "
        "Leave this layout out of the rule where the shards do not fit."
    )


def _promise(decision: Decision) -> str:
    ins = ", ".join(spec.layout_text() for spec in decision.inputs)
    outs = ", ".join(spec.layout_text() for spec in decision.outputs)
    return f"{ins} -> {outs}"


def _at(coord: Coord) -> str:
    return "(" + ", ".join(map(str, coord)) + ")"


def _text(shape: Any) -> str:
    return "None" if shape is None else str(list(shape))


def _local_meta(spec: DTensorSpec, coord: Coord) -> torch.Tensor:
    shape = spec.local_shape(coord)
    order = memory_order(spec.stride)
    return torch.empty_strided(shape, stride_like(shape, order), dtype=spec.dtype, device="meta")


def _with_operands(call: Call, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with its operands replaced by `values`."""

    def fill(value: Any) -> Any:
        if isinstance(value, Operand):
            return values[value]
        if isinstance(value, (list, tuple)):
            return [fill(each) for each in value]
        return value

    return [fill(value) for value in call.args], {k: fill(v) for k, v in call.kwargs.items()}
