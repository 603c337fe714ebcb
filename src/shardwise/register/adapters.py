"""Rules in the two forms of PyTorch's DTensor, run on the same engine as the native form.

Such a rule decides for all axes at once. Its shards are those of `torch.chunk`: an operand with
other cuts is moved first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

from ..dispatch.decide import Decision
from ..errors import LayoutError, RuleError, public
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..rules import Call, Local, Registered, Site
from .helpers import redistribute_cost
from .operators import check_shapes, overloads, put, with_operands
from .schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    OutputSharding,
    OutputSpecs,
    RuntimeSchemaInfo,
    TupleStrategy,
    all_of,
)

F = TypeVar("F", bound=Callable[..., Any])
Decided = tuple[Decision, Local | None]


@public
def register_prop_rule(op: Any, schema_info: RuntimeSchemaInfo | None = None) -> Callable[[F], F]:
    """Give operators a rule from the operands' specs to the results'.

    >>> import torch
    >>> from shardwise import Shard, distribute_tensor, init_device_mesh
    >>> from shardwise.register import OpSchema, OutputSharding, pointwise_rule
    >>> @torch.library.custom_op("shardwise_docs::twice", mutates_args=())
    ... def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return x * 2
    >>> @twice.register_fake
    ... def _(x):
    ...     return torch.empty_like(x)
    >>> @register_prop_rule(torch.ops.shardwise_docs.twice.default)
    ... def rule(schema: OpSchema) -> OutputSharding:
    ...     return pointwise_rule(schema, linearity=True)
    >>> x = distribute_tensor(torch.ones(5), init_device_mesh("cpu", (2,)), [Shard(0)])
    >>> twice(x).placements
    (S(0),)
    """

    def register(rule: F) -> F:
        def decide(call: Call, written: int | None) -> Decided:
            return _propagated(rule, call, schema_info, written)

        _put("register_prop_rule", op, schema_info, decide)
        return rule

    return register


@public
def register_op_strategy(op: Any, schema_info: RuntimeSchemaInfo | None = None) -> Callable[[F], F]:
    """Give operators a function that lists the layouts they may run in, for all axes at once.

    The function takes the schema, or the mesh and the schema. The strategy that is cheapest to
    reach is taken, the first of equals.

    >>> import torch
    >>> from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh
    >>> from shardwise.register import expand_to_full_mesh_op_strategy
    >>> @torch.library.custom_op("shardwise_docs::total", mutates_args=())
    ... def total(x: torch.Tensor) -> torch.Tensor:
    ...     return x.sum(1)
    >>> @total.register_fake
    ... def _(x):
    ...     return x.new_empty(x.shape[0])
    >>> @register_op_strategy(torch.ops.shardwise_docs.total.default)
    ... def strategy(mesh, schema):
    ...     rows = [[Shard(0), Shard(0)], [Replicate(), Replicate()]]
    ...     return expand_to_full_mesh_op_strategy(mesh, schema, rows)
    >>> x = distribute_tensor(torch.ones(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    >>> total(x).placements
    (S(0),)
    """

    def register(rule: F) -> F:
        parameters = inspect.signature(rule).parameters.values()
        positional = [p for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        takes_mesh = sum(p.default is p.empty for p in positional) == 2

        def decide(call: Call, written: int | None) -> Decided:
            args = with_operands(call, lambda i: OpStrategy([OpSpec(call.specs[i])]), TupleStrategy)
            schema = OpSchema(call.op, *args, schema_info)
            made = rule(call.specs[0].mesh, schema) if takes_mesh else rule(schema)
            return _cheapest(call, made, written), None

        _put("register_op_strategy", op, schema_info, decide)
        return rule

    return register


def _put(what: str, op: Any, info: RuntimeSchemaInfo | None, decide: Callable[..., Any]) -> None:
    for each in overloads(what, op):
        read = None
        if info is not None:
            names = [argument.name for argument in each._schema.arguments]
            read = frozenset([*names[info.static_argnum :], *(info.static_kwargkey or ())])
        put(each, Registered(decide=decide, by_value=read))


# --- propagation rules -------------------------------------------------------------------------


def _propagated(
    rule: Callable[[OpSchema], Any],
    call: Call,
    info: RuntimeSchemaInfo | None,
    written: int | None,
) -> Decided:
    """Ask the rule, and once more with the layouts that it asks for."""
    given = schema = OpSchema(call.op, *with_operands(call, call.specs.__getitem__), info)
    outputs: OutputSpecs = None
    for _ in range(2):
        answer = rule(schema)
        if not isinstance(answer, OutputSharding):
            raise RuleError(f"{call.name}: the rule returned {answer!r}, not an OutputSharding.")
        outputs = answer.output_spec
        if answer.redistribute_schema is not None:
            schema = _completed(call, given, answer.redistribute_schema)
        if outputs is not None or answer.redistribute_schema is None:
            break
    inputs = tuple(all_of(DTensorSpec, (schema.args_schema, [*schema.kwargs_schema.values()])))
    if outputs is None and call.structure is not None:
        asked = ", ".join(spec.layout_text() for spec in inputs)
        raise RuleError(f"{call.name}: the rule gives no output_spec for {asked}.")
    decision = _decision(call, inputs, outputs, written)
    if decision is None:
        raise RuleError(_moves_the_written(call, written))
    local = _other_values(given, schema)
    check_shapes(call, decision, local)
    return decision, local


def _completed(call: Call, given: OpSchema, wanted: OpSchema) -> OpSchema:
    """The call that a rule asks for; arguments that the rule left out are those of the call."""
    pairs = enumerate(zip(wanted.args_spec, given.args_spec, strict=False))
    specs = [_placed(call, f"operand {i}", new, old.meta) for i, (new, old) in pairs]
    # Rules often give the specs alone, without the other arguments.
    complete = len(wanted.args_schema) == len(given.args_schema)
    made = (wanted if complete else given).with_specs(specs)
    return replace(made, kwargs_schema={**given.kwargs_schema, **wanted.kwargs_schema})


def _other_values(given: OpSchema, wanted: OpSchema) -> Local | None:
    """A local call with the numbers and shapes of `wanted`, where they differ from the call's."""
    pairs = enumerate(zip(given.args_schema, wanted.args_schema, strict=True))
    new = {i: b for i, (a, b) in pairs if a != b and not any(all_of(DTensorSpec, b))}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        return op(*[new.get(place, value) for place, value in enumerate(args)], **kwargs)

    return local if new else None


# --- strategies --------------------------------------------------------------------------------


def _cheapest(call: Call, made: Any, written: int | None) -> Decision:
    """The strategy with the lowest price; of equals one that moves nothing, then the first."""
    if not isinstance(made, OpStrategy) or not made.strategies:
        raise RuleError(
            f"{call.name}: the rule returned {made!s}, which is no OpStrategy with a way to run."
        )
    # Prices that the rule gives count if it gives all: one row per operand, of one number each.
    rows = [strategy.redistribute_cost or [[]] for strategy in made.strategies]
    priced = all(len(row) == 1 for each in rows for row in each)
    found = []
    for strategy, costs in zip(made.strategies, rows, strict=True):
        inputs = strategy.input_specs
        if inputs is None:  # the operands take the layout of the result
            inputs = [strategy.output_spec] * len(call.specs)
        decision = _decision(call, inputs, strategy.output_specs, written)
        if decision is not None:
            price = sum(map(sum, costs)) if priced else _price(call, decision, written)
            found.append((price, not decision.fits(call.specs), decision))
    if not found:
        raise RuleError(_moves_the_written(call, written))
    best = min(found, key=lambda each: each[:2])[2]
    check_shapes(call, best)
    return best


def _price(call: Call, decision: Decision, written: int | None) -> float:
    """The price of moving the operands, and a written one back."""
    moves = list(zip(call.specs, decision.inputs, strict=True))
    if written is not None:
        moves.append((decision.inputs[written], call.specs[written]))
    try:
        return sum(redistribute_cost(src, dst) for src, dst in moves)
    except LayoutError:  # there is no such value, as a pending maximum of complex numbers
        return inf


# --- from specs that a rule wrote to a decision --------------------------------------------------


def _decision(
    call: Call, inputs: Sequence[DTensorSpec], outputs: OutputSpecs, written: int | None
) -> Decision | None:
    """The layouts with the tensors' metas; None if a written operand would change its layout."""
    if len(inputs) != len(call.specs):
        raise RuleError(
            f"{call.name}: the rule gives {len(inputs)} input specs, but the call has "
            f"{len(call.specs)} operands."
        )
    pairs = enumerate(zip(inputs, call.specs, strict=True))
    ins = tuple(_placed(call, f"operand {i}", spec, own.meta) for i, (spec, own) in pairs)
    if written is not None and outputs is None:
        outputs = ins[written]
    outs = _output_specs(call, outputs)
    if written is not None and outs[0].placements != ins[written].placements:
        return None
    return Decision(ins, outs if written is None else (ins[written],))


def _output_specs(call: Call, outputs: OutputSpecs) -> tuple[DTensorSpec, ...]:
    """One spec per result, from one for all, or one per place with None where nothing comes."""
    if outputs is None or isinstance(outputs, DTensorSpec):
        outputs = [outputs] * len(call.results)
    elif isinstance(call.structure, tuple) and len(outputs) == len(call.structure):
        pairs = zip(outputs, call.structure, strict=True)
        outputs = [spec for spec, place in pairs if place is not None]
    if len(outputs) != len(call.results):
        raise RuleError(
            f"{call.name}: the rule gives {len(outputs)} output specs, but the operator returns "
            f"{len(call.results)} results."
        )
    each = enumerate(zip(outputs, call.results, strict=True))
    return tuple(_placed(call, f"result {i}", spec, meta) for i, (spec, meta) in each)


def _placed(call: Call, what: str, spec: Any, meta: TensorMeta) -> DTensorSpec:
    """The tensor `meta` in the placements of a spec that a rule wrote."""
    mesh = call.specs[0].topology
    if spec is None and 0 in meta.shape:  # a result that was not asked for
        return DTensorSpec(mesh, default_placements(mesh), meta)
    if not isinstance(spec, DTensorSpec) or spec.topology is not mesh:
        raise RuleError(
            f"{call.name}: the rule gives {what} {spec!r}, which is no DTensorSpec on mesh {mesh}."
        )
    try:
        return DTensorSpec(mesh, spec.placements, meta)
    except LayoutError as error:
        raise RuleError(f"{call.name}: the rule's layout of {what}: {error}") from error


def _moves_the_written(call: Call, written: int | None) -> str:
    return (
        f"{call.name}: the operator writes into operand {written}, so that the result is in its "
        "layout, but the rule gives the result another one."
    )
