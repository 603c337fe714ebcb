"""Rules in the two forms of PyTorch's DTensor, run on the same engine as the native form.

Such a rule decides for all axes at once. What it says of shards means shards as `torch.chunk` makes
them: an operand with other cuts is moved first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, TypeVar

from .._torch import OpOverload
from ..dispatch.decide import Decision
from ..errors import LayoutError, RuleError
from ..layout.mesh import Topology
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..rules import Call, Local, Operand, Registered, Site
from .helpers import ExpandedStrategy, redistribute_cost
from .operators import check_shapes, overloads, put
from .schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    OutputSharding,
    OutputSpecs,
    RuntimeSchemaInfo,
    TupleStrategy,
)

__all__ = ["register_op_strategy", "register_prop_rule"]

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
        takes_mesh = _takes_mesh(rule)

        def decide(call: Call, structure: Any, written: int | None) -> Decided:
            schema = _schema(call, schema_info, _operand_strategy, TupleStrategy)
            mesh = call.specs[0].mesh
            made = rule(mesh, schema) if takes_mesh else rule(schema)
            return _chosen(call, made, structure, written), None

        _put("register_op_strategy", op, schema_info, decide)
        return rule

    return register


def _put(what: str, op: Any, info: RuntimeSchemaInfo | None, decide: Callable[..., Any]) -> None:
    if info is not None and not isinstance(info, RuntimeSchemaInfo):
        raise RuleError(f"{what}: schema_info must be a RuntimeSchemaInfo, but got {info!r}.")
    for each in overloads(what, op):
        put([each], Registered(decide=decide, by_value=_numbers_read(each, info)))


def _numbers_read(op: OpOverload, info: RuntimeSchemaInfo | None) -> frozenset[str] | None:
    if info is None:
        return None
    names = [argument.name for argument in op._schema.arguments]
    return frozenset([*names[info.static_argnum :], *(info.static_kwargkey or ())])


def _takes_mesh(rule: Callable[..., Any]) -> bool:
    required = [
        parameter
        for parameter in inspect.signature(rule).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    if len(required) not in (1, 2):
        raise RuleError(
            f"register_op_strategy: {rule!r} takes {len(required)} arguments. "
            "Write fn(mesh, schema) or fn(schema)."
        )
    return len(required) == 2


# --- from a call to a schema -------------------------------------------------------------------


def _schema(
    call: Call,
    info: RuntimeSchemaInfo | None,
    one: Callable[[DTensorSpec], Any],
    several: Callable[[list[Any]], Any],
) -> OpSchema:
    def fill(value: Any) -> Any:
        if isinstance(value, Operand):
            return one(call.specs[value])
        if isinstance(value, (list, tuple)) and any(isinstance(v, Operand) for v in value):
            return several([fill(each) for each in value])
        return value

    args = tuple(fill(value) for value in call.args)
    return OpSchema(call.op, args, {k: fill(v) for k, v in call.kwargs.items()}, info)


def _operand_strategy(spec: DTensorSpec) -> OpStrategy:
    return OpStrategy([OpSpec(spec)])


def _named_operands(call: Call) -> list[int]:
    """The operands among the keyword arguments."""
    return list(_operands_in(list(call.kwargs.values())))


def _operands_in(value: Any) -> Iterator[int]:
    if isinstance(value, Operand):
        yield int(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _operands_in(each)


# --- from an answer to a decision ----------------------------------------------------------------


def _propagated(
    rule: Callable[[OpSchema], Any],
    call: Call,
    info: RuntimeSchemaInfo | None,
    structure: Any,
    written: int | None,
) -> Decided:
    """Ask the rule, again with the layouts that it asks for, until it says those of the results."""
    given = schema = _schema(call, info, lambda spec: spec, list)
    seen = [_layouts(schema)]
    while True:
        answer = rule(schema)
        if not isinstance(answer, OutputSharding):
            raise RuleError(f"{call.name}: the rule returned {answer!r}, not an OutputSharding.")
        wanted = answer.redistribute_schema
        if wanted is not None:
            schema = _completed(call, given, wanted)
        if answer.output_spec is not None or (wanted is None and structure is None):
            break
        if wanted is None:
            raise RuleError(
                f"{call.name}: the rule returned neither an output_spec nor a redistribute_schema "
                f"for {_inputs_text(call.specs)}."
            )
        if _layouts(schema) in seen:
            if structure is None:
                break
            raise RuleError(
                f"{call.name}: the rule asks for {_inputs_text(_layouts(schema))} again and again, "
                "and gives no output_spec for it."
            )
        seen.append(_layouts(schema))
    decision = _decision(call, _layouts(schema), answer.output_spec, structure, written)
    if decision is None:
        raise RuleError(_not_where_it_was(call, written))
    local = _other_values(given, schema)
    check_shapes(call, decision, structure, local)
    return decision, local


def _layouts(schema: OpSchema) -> tuple[DTensorSpec, ...]:
    return (*schema.args_spec, *schema.kwargs_spec)


def _completed(call: Call, given: OpSchema, wanted: OpSchema) -> OpSchema:
    """The layouts that a rule asks for, with what it left out taken from the call."""
    if not isinstance(wanted, OpSchema):
        raise RuleError(f"{call.name}: redistribute_schema is {wanted!r}, not an OpSchema.")
    if len(wanted.args_spec) != len(given.args_spec):
        raise RuleError(
            f"{call.name}: redistribute_schema has {len(wanted.args_spec)} specs, but the call has "
            f"{len(given.args_spec)} operands: {_inputs_text(given.args_spec)}."
        )
    named = {**given.kwargs_schema, **wanted.kwargs_schema}
    same_places = [type(v) for v in _shape_of(wanted)] == [type(v) for v in _shape_of(given)]
    whole = wanted if same_places else given.with_specs(wanted.args_spec)
    metas = [
        _placed(call, f"operand {index}", new, old.meta)
        for index, (new, old) in enumerate(zip(wanted.args_spec, given.args_spec, strict=True))
    ]
    return OpSchema(call.op, whole.with_specs(metas).args_schema, named, given.schema_info)


def _shape_of(schema: OpSchema) -> list[Any]:
    """Where specs stand among the arguments: rules often give the specs alone."""
    return [v if isinstance(v, (DTensorSpec, list, tuple)) else None for v in schema.args_schema]


def _other_values(given: OpSchema, wanted: OpSchema) -> Local | None:
    """A local call with the numbers and shapes of `wanted`, where they differ from the call's."""
    new = {
        place: value
        for place, (value, old) in enumerate(
            zip(wanted.args_schema, given.args_schema, strict=True)
        )
        if not any(True for _ in OpSchema(given.op, (old,), {}).args_spec) and value != old
    }
    if not new:
        return None

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        return op(*[new.get(place, value) for place, value in enumerate(args)], **kwargs)

    return local


def _chosen(call: Call, made: Any, structure: Any, written: int | None) -> Decision:
    if isinstance(made, TupleStrategy):
        made = _joined(call, made)
    if isinstance(made, ExpandedStrategy):
        made = made.choose()
    if not isinstance(made, OpStrategy) or not made.strategies:
        raise RuleError(f"{call.name}: the rule returned {made!s}, which is no strategy.")
    decisions: list[Decision] = []
    strategies: list[OpSpec] = []
    for strategy in made.strategies:
        inputs = _strategy_inputs(call, strategy)
        decision = _decision(call, inputs, strategy.output_specs, structure, written)
        if decision is not None:
            decisions.append(decision)
            strategies.append(strategy)
    if not decisions:
        raise RuleError(_not_where_it_was(call, written))
    prices = _given_prices(call, strategies) or [_price(call, d, written) for d in decisions]
    # Of equally cheap ways the one that leaves all operands as they are, then the first.
    order = [(price, not d.fits(call.specs)) for price, d in zip(prices, decisions, strict=True)]
    best = decisions[order.index(min(order))]
    check_shapes(call, best, structure, None)
    return best


def _joined(call: Call, made: TupleStrategy) -> OpStrategy:
    """Strategies of the elements of a list result, as one strategy of the whole call.

    Each element's input specs are one per argument: a list argument takes its element's, any other
    the first's.
    """
    picked: list[OpSpec] = []
    for child in made.children:
        if not isinstance(child, OpStrategy) or not child.strategies:
            raise RuleError(f"{call.name}: {child!s} is no strategy for an element of a list.")
        picked.append(_cheapest_element(call, child, len(picked)))
    inputs: list[DTensorSpec] = []
    outputs = [strategy.output_specs for strategy in picked]
    for argument, operands in enumerate(_arguments(call)):
        for element, _ in enumerate(operands):
            strategy = picked[element] if len(operands) > 1 else picked[0]
            inputs.append(_element_input(strategy, argument))
    return OpStrategy([OpSpec(tuple(outputs), inputs)])  # type: ignore[arg-type]


def _arguments(call: Call) -> list[list[int]]:
    """The operands of each argument that has any."""
    found = [list(_operands_in(value)) for value in (*call.args, *call.kwargs.values())]
    return [operands for operands in found if operands]


def _element_input(strategy: OpSpec, argument: int) -> DTensorSpec:
    if strategy.input_specs is None:
        return strategy.output_spec
    return strategy.input_spec(argument)


def _cheapest_element(call: Call, child: OpStrategy, element: int) -> OpSpec:
    prices: list[float] = []
    for strategy in child.strategies:
        price = 0.0
        for argument, operands in enumerate(_arguments(call)):
            operand = operands[element] if len(operands) > 1 else operands[0]
            src = call.specs[operand]
            dst = _placed(call, f"operand {operand}", _element_input(strategy, argument), src.meta)
            price += _move_price(src, dst)
        prices.append(price)
    return child.strategies[prices.index(min(prices))]


def _strategy_inputs(call: Call, strategy: OpSpec) -> list[DTensorSpec]:
    """One spec per operand: the result's if none are given; a named operand may be left out."""
    if not isinstance(strategy, OpSpec):
        raise RuleError(f"{call.name}: {strategy!r} is not a PlacementStrategy.")
    named = _named_operands(call)
    if strategy.input_specs is None:
        if not isinstance(strategy.output_specs, DTensorSpec):
            raise RuleError(
                f"{call.name}: the strategy {strategy} has no input_specs, so that the result's "
                "are meant, but there is not one result."
            )
        return [strategy.output_specs] * len(call.specs)
    given = [spec for spec in strategy.input_specs if spec is not None]
    if len(given) + len(named) == len(call.specs):
        given += [call.specs[operand] for operand in named]
    if len(given) != len(call.specs):
        raise RuleError(
            f"{call.name}: the strategy {strategy} has {len(given)} input_specs, but the call has "
            f"{len(call.specs)} operands: {_inputs_text(call.specs)}."
        )
    return given


def _given_prices(call: Call, strategies: Sequence[OpSpec]) -> list[float] | None:
    """The prices that the rule gave, if it gave all: one row per operand, of one number each."""
    counts = (len(call.specs), len(call.specs) - len(_named_operands(call)))
    prices: list[float] = []
    for strategy in strategies:
        rows = strategy.redistribute_cost
        if not rows or len(rows) not in counts or any(len(row) != 1 for row in rows):
            return None
        prices.append(float(sum(row[0] for row in rows)))
    return prices


def _price(call: Call, decision: Decision, written: int | None) -> float:
    total = sum(map(_move_price, call.specs, decision.inputs))
    if written is not None:
        total += _move_price(decision.inputs[written], call.specs[written])
    return total


def _move_price(src: DTensorSpec, dst: DTensorSpec) -> float:
    try:
        return redistribute_cost(src, dst)
    except LayoutError:  # there is no such value, as a pending maximum of complex numbers
        return inf


def _decision(
    call: Call,
    inputs: Sequence[DTensorSpec],
    outputs: OutputSpecs,
    structure: Any,
    written: int | None,
) -> Decision | None:
    """The layouts with the tensors' metas; None if a written operand would not stay in place."""
    ins = tuple(
        _placed(call, f"operand {index}", spec, operand.meta)
        for index, (spec, operand) in enumerate(zip(inputs, call.specs, strict=True))
    )
    if written is not None:
        result = ins[written] if outputs is None else _output_specs(call, outputs, structure)[0]
        if result.placements != ins[written].placements:
            return None
        return Decision(ins, (ins[written],))
    return Decision(ins, _output_specs(call, outputs, structure))


def _output_specs(call: Call, outputs: OutputSpecs, structure: Any) -> tuple[DTensorSpec, ...]:
    """One spec per result, from one for all, or one per place with None where nothing comes."""
    places = structure if isinstance(structure, tuple) else (0,) * len(call.results)
    if isinstance(outputs, DTensorSpec) or outputs is None:
        given: list[DTensorSpec | None] = [outputs] * len(places)
    else:
        given = list(outputs)
    if len(given) == len(call.results) != len(places):
        places = tuple(place for place in places if place is not None)
    if len(given) != len(places):
        raise RuleError(
            f"{call.name}: the rule gives {len(given)} output specs, but the operator returns "
            f"{len(places)} results."
        )
    found: list[DTensorSpec] = []
    for spec, place in zip(given, places, strict=True):
        if place is not None:
            meta = call.results[len(found)]
            found.append(_output(call, len(found), spec, meta))
    return tuple(found)


def _output(call: Call, place: int, spec: DTensorSpec | None, meta: TensorMeta) -> DTensorSpec:
    if spec is not None:
        return _placed(call, f"result {place}", spec, meta)
    mesh: Topology = call.specs[0].topology
    if 0 in meta.shape:  # nothing to lay out
        return DTensorSpec(mesh, default_placements(mesh), meta)
    raise RuleError(
        f"{call.name}: the rule gives no spec for result {place}, but the operator returns a "
        f"tensor of shape {list(meta.shape)} there."
    )


def _placed(call: Call, what: str, spec: Any, meta: TensorMeta) -> DTensorSpec:
    """The tensor `meta` in the placements of a spec that a rule wrote."""
    mesh = call.specs[0].topology
    if not isinstance(spec, DTensorSpec):
        raise RuleError(f"{call.name}: the rule gives {what} {spec!r}, which is no DTensorSpec.")
    if spec.topology is not mesh:
        raise RuleError(
            f"{call.name}: the rule gives {what} a spec on mesh {spec.topology}, but the operands "
            f"are on {mesh}."
        )
    try:
        return DTensorSpec(mesh, spec.placements, meta)
    except LayoutError as error:
        raise RuleError(
            f"{call.name}: the rule gives {what} of shape {list(meta.shape)} the layout "
            f"{list(spec.placements)}: {error}"
        ) from error


def _inputs_text(specs: Sequence[DTensorSpec]) -> str:
    return ", ".join(spec.layout_text() for spec in specs)


def _not_where_it_was(call: Call, written: int | None) -> str:
    return (
        f"{call.name}: the operator writes into operand {written}, so that the result is in its "
        "layout, but the rule gives the result another one."
    )
