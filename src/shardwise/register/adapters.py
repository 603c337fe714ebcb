"""Rules in the two forms of PyTorch's DTensor, run on the same engine as the native form.

Such a rule decides for all axes at once. Its shards are those of `torch.chunk`: an operand with
other cuts is moved first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeVar

from ..dispatch.decide import Decision
from ..errors import LayoutError, RuleError
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..rules import Call, Local, Operand, Registered, Site
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
)

F = TypeVar("F", bound=Callable[..., Any])
Decided = tuple[Decision, Local | None]


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
        def decide(call: Call, structure: Any, written: int | None) -> Decided:
            return _propagated(rule, call, schema_info, structure, written)

        _put("register_prop_rule", op, schema_info, decide)
        return rule

    return register


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

        def decide(call: Call, structure: Any, written: int | None) -> Decided:
            args = with_operands(call, lambda i: OpStrategy([OpSpec(call.specs[i])]), TupleStrategy)
            schema = OpSchema(call.op, *args, schema_info)
            made = rule(call.specs[0].mesh, schema) if takes_mesh else rule(schema)
            return _cheapest(call, made, structure, written), None

        _put("register_op_strategy", op, schema_info, decide)
        return rule

    return register


def _put(what: str, op: Any, info: RuntimeSchemaInfo | None, decide: Callable[..., Any]) -> None:
    for each in overloads(what, op):
        read = None
        if info is not None:
            names = [argument.name for argument in each._schema.arguments]
            read = frozenset([*names[info.static_argnum :], *(info.static_kwargkey or ())])
        put([each], Registered(decide=decide, by_value=read))


# --- propagation rules -------------------------------------------------------------------------


def _propagated(
    rule: Callable[[OpSchema], Any],
    call: Call,
    info: RuntimeSchemaInfo | None,
    structure: Any,
    written: int | None,
) -> Decided:
    """Ask the rule, again with the layouts that it asks for, until it gives those of results."""
    given = schema = OpSchema(call.op, *with_operands(call, call.specs.__getitem__), info)
    seen: list[tuple[DTensorSpec, ...]] = []
    outputs: OutputSpecs = None
    while outputs is None and _layouts(schema) not in seen:
        seen.append(_layouts(schema))
        answer = rule(schema)
        if not isinstance(answer, OutputSharding):
            raise RuleError(f"{call.name}: the rule returned {answer!r}, not an OutputSharding.")
        outputs = answer.output_spec
        if answer.redistribute_schema is not None:
            schema = _completed(call, given, answer.redistribute_schema)
    if outputs is None and structure is not None:
        raise RuleError(
            f"{call.name}: the rule gives no output_spec for {_inputs_text(_layouts(schema))}."
        )
    decision = _decision(call, _layouts(schema), outputs, structure, written)
    if decision is None:
        raise RuleError(_moves_the_written(call, written))
    local = _other_values(given, schema)
    check_shapes(call, decision, structure, local)
    return decision, local


def _layouts(schema: OpSchema) -> tuple[DTensorSpec, ...]:
    return (*schema.args_spec, *schema.kwargs_spec)


def _completed(call: Call, given: OpSchema, wanted: OpSchema) -> OpSchema:
    """The call that a rule asks for; arguments that the rule left out are those of the call."""
    if len(wanted.args_spec) != len(given.args_spec):
        raise RuleError(
            f"{call.name}: redistribute_schema has {len(wanted.args_spec)} specs, but the call has "
            f"{len(given.args_spec)} operands: {_inputs_text(given.args_spec)}."
        )
    specs = [
        _placed(call, f"operand {index}", new, old.meta)
        for index, (new, old) in enumerate(zip(wanted.args_spec, given.args_spec, strict=True))
    ]
    # Rules often give the specs alone, without the other arguments.
    complete = len(wanted.args_schema) == len(given.args_schema)
    made = (wanted if complete else given).with_specs(specs)
    kwargs = {**given.kwargs_schema, **wanted.kwargs_schema}
    return OpSchema(call.op, made.args_schema, kwargs, given.schema_info)


def _other_values(given: OpSchema, wanted: OpSchema) -> Local | None:
    """A local call with the numbers and shapes of `wanted`, where they differ from the call's."""
    pairs = enumerate(zip(given.args_schema, wanted.args_schema, strict=True))
    new = {
        place: value
        for place, (old, value) in pairs
        if not OpSchema(given.op, (old,), {}).args_spec and value != old
    }
    if not new:
        return None

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        return op(*[new.get(place, value) for place, value in enumerate(args)], **kwargs)

    return local


# --- strategies --------------------------------------------------------------------------------


def _cheapest(call: Call, made: Any, structure: Any, written: int | None) -> Decision:
    """The strategy with the lowest price; of equals one that moves nothing, then the first."""
    if isinstance(made, TupleStrategy):
        made = _joined(call, made)
    if not isinstance(made, OpStrategy) or not made.strategies:
        raise RuleError(f"{call.name}: the rule returned {made!s}, which is no strategy.")
    # Prices that the rule gives count if it gives all: one row per operand, of one number each.
    rows = [strategy.redistribute_cost or [[]] for strategy in made.strategies]
    priced = all(len(row) == 1 for each in rows for row in each)
    found = []
    for strategy, costs in zip(made.strategies, rows, strict=True):
        decision = _strategy_decision(call, strategy, structure, written)
        if decision is not None:
            price = sum(map(sum, costs)) if priced else _price(call, decision, written)
            found.append((price, not decision.fits(call.specs), decision))
    if not found:
        raise RuleError(_moves_the_written(call, written))
    best = min(found, key=lambda each: each[:2])[2]
    check_shapes(call, best, structure, None)
    return best


def _joined(call: Call, made: TupleStrategy) -> OpStrategy:
    """One strategy for the whole call, from the cheapest of each element of a list result.

    Each element's input specs are one per argument: a list argument takes its element's, any other
    argument the first element's.
    """
    values = (*call.args, *call.kwargs.values())
    lists = [each if isinstance(each, (list, tuple)) else [each] for each in values]
    found = [[v for v in each if isinstance(v, Operand)] for each in lists]
    arguments = [operands for operands in found if operands]
    outputs: list[Any] = []
    inputs: list[Sequence[DTensorSpec]] = []
    for element, child in enumerate(made.children):
        own = [call.specs[each[element if len(each) > 1 else 0]] for each in arguments]
        ways = [s.input_specs or [s.output_spec] * len(own) for s in child.strategies]
        prices = [sum(map(_move_price, own, way)) for way in ways]
        best = prices.index(min(prices))
        inputs.append(ways[best])
        outputs.append(child.strategies[best].output_specs)
    flat = [
        inputs[element if len(operands) > 1 else 0][argument]
        for argument, operands in enumerate(arguments)
        for element in range(len(operands))
    ]
    return OpStrategy([OpSpec(tuple(outputs), flat)])


def _strategy_decision(
    call: Call, strategy: OpSpec, structure: Any, written: int | None
) -> Decision | None:
    """A strategy as a decision. Without input_specs the operands take the result's; an operand
    among the keyword arguments may be left out, and stays."""
    if strategy.input_specs is None:
        given = [strategy.output_spec] * len(call.specs)
    else:
        given = [spec for spec in strategy.input_specs if spec is not None]
    positional = OpSchema(call.op, *with_operands(call, call.specs.__getitem__)).args_spec
    if len(given) == len(positional):
        given += call.specs[len(given) :]
    if len(given) != len(call.specs):
        raise RuleError(
            f"{call.name}: the strategy {strategy} has {len(given)} input_specs, but the call has "
            f"{len(call.specs)} operands: {_inputs_text(call.specs)}."
        )
    return _decision(call, given, strategy.output_specs, structure, written)


def _price(call: Call, decision: Decision, written: int | None) -> float:
    """The price of moving the operands, and a written one back."""
    moves = list(zip(call.specs, decision.inputs, strict=True))
    if written is not None:
        moves.append((decision.inputs[written], call.specs[written]))
    return sum(_move_price(src, dst) for src, dst in moves)


def _move_price(src: DTensorSpec, dst: DTensorSpec) -> float:
    try:
        return redistribute_cost(src, dst)
    except LayoutError:  # there is no such value, as a pending maximum of complex numbers
        return inf


# --- from specs that a rule wrote to a decision --------------------------------------------------


def _decision(
    call: Call,
    inputs: Sequence[DTensorSpec],
    outputs: OutputSpecs,
    structure: Any,
    written: int | None,
) -> Decision | None:
    """The layouts with the tensors' metas; None if a written operand would change its layout."""
    ins = tuple(
        _placed(call, f"operand {index}", spec, operand.meta)
        for index, (spec, operand) in enumerate(zip(inputs, call.specs, strict=True))
    )
    if written is None:
        return Decision(ins, _output_specs(call, outputs, structure))
    own = ins[written]
    result = own if outputs is None else _output_specs(call, outputs, structure)[0]
    return Decision(ins, (own,)) if result.placements == own.placements else None


def _output_specs(call: Call, outputs: OutputSpecs, structure: Any) -> tuple[DTensorSpec, ...]:
    """One spec per result, from one for all, or one per place with None where nothing comes."""
    places = structure if isinstance(structure, tuple) else (0,) * len(call.results)
    shared = outputs is None or isinstance(outputs, DTensorSpec)
    given: list[Any] = [outputs] * len(places) if shared else [*outputs]  # type: ignore[misc]
    if len(given) == len(call.results) != len(places):
        places = call.results
    if len(given) != len(places):
        raise RuleError(
            f"{call.name}: the rule gives {len(given)} output specs, but the operator returns "
            f"{len(places)} results."
        )
    kept = [spec for spec, place in zip(given, places, strict=True) if place is not None]
    mesh = call.specs[0].topology
    made = []
    for index, (spec, meta) in enumerate(zip(kept, call.results, strict=True)):
        if spec is None and 0 in meta.shape:
            spec = DTensorSpec(mesh, default_placements(mesh))
        made.append(_placed(call, f"result {index}", spec, meta))
    return tuple(made)


def _placed(call: Call, what: str, spec: Any, meta: TensorMeta) -> DTensorSpec:
    """The tensor `meta` in the placements of a spec that a rule wrote."""
    mesh = call.specs[0].topology
    if not isinstance(spec, DTensorSpec) or spec.topology is not mesh:
        raise RuleError(
            f"{call.name}: the rule gives {what} {spec!r}, which is no DTensorSpec on mesh {mesh}."
        )
    try:
        return DTensorSpec(mesh, spec.placements, meta)
    except LayoutError as error:
        raise RuleError(f"{call.name}: the rule's layout of {what}: {error}") from error


def _inputs_text(specs: Sequence[DTensorSpec]) -> str:
    return ", ".join(spec.layout_text() for spec in specs)


def _moves_the_written(call: Call, written: int | None) -> str:
    return (
        f"{call.name}: the operator writes into operand {written}, so that the result is in its "
        "layout, but the rule gives the result another one."
    )
