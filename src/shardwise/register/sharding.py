"""`register_sharding`: rules as rows of placements, as `torch.distributed.tensor.experimental` has
them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .._torch import OpOverload
from ..errors import RuleError, public
from ..layout.mesh import AnyMesh
from ..layout.placement import Placement
from .adapters import register_op_strategy
from .helpers import expand_to_full_mesh_op_strategy
from .operators import overloads
from .schema import OpSchema, OpStrategy, TupleStrategy

F = TypeVar("F", bound=Callable[..., Any])


@public
def register_sharding(op: Any) -> Callable[[F], F]:
    """Give an operator, or each of a list, the layouts that it may run in on one mesh axis.

    The function gets the arguments of the call, with a spec in place of each tensor. It returns
    pairs: the placements of the results, and those of the arguments, None for an argument that is
    no tensor. On each axis of a mesh the operator runs in one of these ways. The cheapest to reach
    is taken. A later registration replaces an earlier one, and the rule that the operator had.

    >>> import torch
    >>> from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh
    >>> @torch.library.custom_op("shardwise_docs::row_sums", mutates_args=())
    ... def row_sums(x: torch.Tensor, scale: float) -> torch.Tensor:
    ...     return x.sum(1) * scale
    >>> @row_sums.register_fake
    ... def _(x, scale):
    ...     return x.new_empty(x.shape[0])
    >>> @register_sharding(torch.ops.shardwise_docs.row_sums.default)
    ... def sharding(x, scale):
    ...     return [([Replicate()], [Replicate(), None]), ([Shard(0)], [Shard(0), None])]
    >>> x = distribute_tensor(torch.ones(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    >>> row_sums(x, 2.0)
    DTensor([6., 6., 6., 6., 6.], float32[5@0] on (2))
    """
    given = op if isinstance(op, (list, tuple)) else [op]
    overloads("register_sharding", op)

    def register(function: F) -> F:
        for each in given:
            # The rule of an out= form serves the form without: it has no specs for these arguments.
            schema = each._schema if isinstance(each, OpOverload) else None
            outs = [a.name for a in schema.arguments if a.is_out] if schema else []
            register_op_strategy(each)(_strategy(function, outs))
        return function

    return register


def _strategy(function: Callable[..., Any], outs: list[str]) -> Callable[..., OpStrategy]:
    """The function as one that lists the ways for all axes at once."""

    def strategy(mesh: AnyMesh, schema: OpSchema) -> OpStrategy:
        args, kwargs = _arguments(function, schema, outs)
        pairs = function(*args, **kwargs)
        rows = [_row(schema, pair, len(outs)) for pair in pairs]
        if not rows or len({count for count, _ in rows}) > 1:
            raise RuleError(
                f"{schema.op}: the sharding function returned {pairs!r}. Return at least one pair, "
                "all with placements for the same number of results."
            )
        places = [row for _, row in rows]
        return expand_to_full_mesh_op_strategy(mesh, schema, places, input_index=rows[0][0])

    return strategy


def _arguments(
    function: Callable[..., Any], schema: OpSchema, outs: list[str]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the call with specs; defaults where the function asks for them."""
    declared = schema.op._schema.arguments
    parameters = inspect.signature(function).parameters
    args = [_spec(value) for value in schema.args_schema]
    positional = [argument for argument in declared if not argument.kwarg_only]
    args += [a.default_value for a in positional[len(args) :][: len(parameters) - len(args)]]
    kwargs = {name: _spec(value) for name, value in schema.kwargs_schema.items()}
    for argument in declared:
        if argument.kwarg_only and argument.name in parameters:
            kwargs.setdefault(argument.name, argument.default_value)
    return args, kwargs | dict.fromkeys(outs)


def _spec(value: Any) -> Any:
    if isinstance(value, OpStrategy):
        return value.strategies[0].output_spec
    if isinstance(value, TupleStrategy):
        return [_spec(child) for child in value.children]
    return value


def _row(schema: OpSchema, pair: Any, outs: int) -> tuple[int, list[Placement | None]]:
    """The number of results, and a row with the placements of results, then of arguments."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise RuleError(
            f"{schema.op}: the sharding function returned {pair!r} among its pairs. Write "
            "([placement of each result], [placement or None of each argument])."
        )
    results, inputs = ([side] if isinstance(side, Placement) else list(side) for side in pair)
    for place in (*results, *inputs):
        if place is not None and not isinstance(place, Placement):
            raise RuleError(f"{schema.op}: {place!r} in {pair!r} is neither a placement nor None.")
    return len(results), [*results, *inputs[: len(inputs) - outs]]
