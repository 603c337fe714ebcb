"""Which operators a registration is for, and the check that rules promise the right shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._torch import OpOverload, OpOverloadPacket
from ..dispatch import dispatch
from ..dispatch.decide import Decision
from ..dispatch.out_variants import functional_of
from ..dispatch.plans import tensors_in
from ..dispatch.random_ops import is_random, is_without_dropout
from ..errors import RuleError
from ..layout.geometry import all_coords, memory_order, stride_like
from ..layout.mesh import Coord
from ..layout.spec import DTensorSpec
from ..rules import REGISTERED, Call, Local, Operand, Registered, Site, key_of


def overloads(what: str, given: Any) -> list[OpOverload]:
    """The operators that `given` names; an error if one of them cannot have a rule."""
    many = given if isinstance(given, (list, tuple)) else [given]
    if not many:
        raise RuleError(f"{what}: the list of operators is empty.")
    return list(dict.fromkeys(_checked(what, op) for each in many for op in _named(what, each)))


def _named(what: str, given: Any) -> Iterator[OpOverload]:
    if isinstance(given, OpOverload):
        yield given
    elif isinstance(given, OpOverloadPacket):
        found = [getattr(given, name) for name in given.overloads()]
        yield from (op for op in found if not _has_out(op))
    elif isinstance(given, torch.library.CustomOpDef):  # type: ignore[attr-defined]
        yield given._opoverload
    else:
        raise RuleError(
            f"{what}: {given!r} is not an operator. Give torch.ops.<namespace>.<name>, one of its "
            "overloads, or what torch.library.custom_op returned."
        )


def _has_out(op: OpOverload) -> bool:
    return any(argument.is_out for argument in op._schema.arguments)


def _checked(what: str, op: OpOverload) -> OpOverload:
    """The operator that the rule serves, which for an out= form is the one without."""
    functional = functional_of(op) if _has_out(op) else op
    if functional is None:
        raise RuleError(f"{what}: {op} has no form without out=, which would get the rule.")
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


def put(op: OpOverload, rule: Registered) -> None:
    """Make `rule` the rule of an operator, and forget the plans that were made without it."""
    REGISTERED[key_of(op)] = rule
    dispatch.clear()


def with_operands(
    call: Call, one: Callable[[Operand], Any], several: Callable[[list[Any]], Any] = list
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with `one(operand)` in place of each operand, lists of them by `several`."""

    def fill(value: Any) -> Any:
        if isinstance(value, Operand):
            return one(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, Operand) for v in value):
            return several([fill(each) for each in value])
        return value

    return tuple(map(fill, call.args)), {name: fill(v) for name, v in call.kwargs.items()}


def check_shapes(call: Call, decision: Decision, local: Local | None = None) -> None:
    """Raise if a local call does not give the shapes that the decision promises.

    A rule may be right for even shards and wrong for uneven ones: without this check the answer
    would be wrong, or one rank alone would fail. Local calls run on meta tensors, once for each
    combination of local shapes.
    """
    specs = (*decision.inputs, *decision.outputs)
    first: dict[object, Coord] = {}
    for coord in all_coords(specs[0].topology.shape):
        first.setdefault(tuple(spec.local_shape(coord) for spec in specs), coord)
    for coord in first.values():
        _check_at(call, decision, local, coord)


def _check_at(call: Call, decision: Decision, local: Local | None, coord: Coord) -> None:
    args, kwargs = with_operands(call, lambda i: _local_meta(decision.inputs[i], coord))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    ins = ", ".join(spec.layout_text() for spec in decision.inputs)
    outs = ", ".join(spec.layout_text() for spec in decision.outputs)
    says = f"{call.name}: the rule says {ins} -> {outs}"
    at = f"at coordinate ({', '.join(map(str, coord))})"
    site = Site(coord, decision.inputs, decision.outputs)
    try:
        made = local(call.op, args, kwargs, site) if local else call.op(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError) as error:
        raise RuleError(f"{says}, but the operator fails {at}: {error}") from error
    if call.structure is None:  # the operator returns nothing, it only writes
        return
    got = [list(tensor.shape) for tensor in tensors_in([made], {})]
    want = [list(shape) for shape in site.out_shapes]
    if got != want:
        raise RuleError(
            f"{says}, so the results have the local shapes {want} {at}, but the operator gives "
            f"{got} there. Leave this layout out of the rule where the shards do not fit."
        )


def _local_meta(spec: DTensorSpec, coord: Coord) -> torch.Tensor:
    shape = spec.local_shape(coord)
    stride = stride_like(shape, memory_order(spec.stride))
    return torch.empty_strided(shape, stride, dtype=spec.dtype, device="meta")
