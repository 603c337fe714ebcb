"""The classes that DTensor rules take and return.

Names and signatures are those of `torch.distributed.tensor`, so that rules written for it need only
another import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import OpOverload
from ..errors import RuleError, public
from ..layout.mesh import AnyMesh
from ..layout.spec import DTensorSpec

OutputSpecs = DTensorSpec | Sequence[DTensorSpec | None] | None
"""One spec, one per result with None for those that are no tensors, or nothing."""


@dataclass
class RuntimeSchemaInfo:
    """Which numbers a rule reads: all positional ones from `static_argnum` on, and those named.

    Only these numbers tell two calls apart. Lists are always searched for tensors, with or without
    `needs_pytree`.
    """

    static_argnum: int = 100
    static_kwargkey: list[str] | None = None
    needs_pytree: bool = False


@public
@dataclass
class OpSpec:
    """One way to run an operator: the layouts of its results and of its operands."""

    output_specs: OutputSpecs
    input_specs: Sequence[DTensorSpec] | None = None
    redistribute_cost: list[list[float]] | None = None

    @property
    def output_spec(self) -> DTensorSpec:
        """The layout of the only result."""
        if isinstance(self.output_specs, DTensorSpec):
            return self.output_specs
        raise RuleError(f"output_spec: this strategy has the results {self.output_specs}, not one")

    def input_spec(self, index: int = 0) -> DTensorSpec:
        """The layout of an operand."""
        assert self.input_specs is not None
        return self.input_specs[index]

    def __str__(self) -> str:
        ins = "" if self.input_specs is None else f"{_text(self.input_specs)} -> "
        return ins + _text(self.output_specs)


PlacementStrategy = OpSpec
"""The name of `OpSpec` in earlier versions of PyTorch."""


class StrategyType:
    """The base class of what stands for a tensor, or a list of tensors, in a strategy's schema."""


@public
class OpStrategy(StrategyType):
    """The ways to run an operator; for an operand the one layout that it has."""

    def __init__(self, strategies: list[OpSpec]) -> None:
        self.strategies = strategies

    def max_num_shards(self) -> int:
        """The largest number of shards of any strategy's result."""
        return max(strategy.output_spec.num_shards for strategy in self.strategies)

    @property
    def mesh(self) -> AnyMesh:
        return self.strategies[0].output_spec.mesh

    @property
    def ndim(self) -> int:
        return self.strategies[0].output_spec.ndim

    @property
    def shape(self) -> torch.Size:
        return self.strategies[0].output_spec.shape

    def __str__(self) -> str:
        return f"OpStrategy[{', '.join(map(str, self.strategies))}]"


@public
class TupleStrategy(StrategyType):
    """The strategy of a list of tensors; `childs` is PyTorch's earlier name of `children`."""

    def __init__(self, children: Sequence[Any]) -> None:
        self.children = self.childs = children


@public
@dataclass
class OpSchema:
    """A call: its operator, and its arguments with tensors replaced by specs or strategies."""

    op: OpOverload
    args_schema: tuple[Any, ...]
    kwargs_schema: dict[str, Any]
    schema_info: RuntimeSchemaInfo | None = None

    @property
    def args_spec(self) -> tuple[DTensorSpec, ...]:
        """The specs among the positional arguments, including those in lists."""
        return tuple(all_of(DTensorSpec, self.args_schema))

    @property
    def args_strategy(self) -> tuple[OpStrategy, ...]:
        """The strategies among the positional arguments, including those in lists."""
        return tuple(all_of(OpStrategy, self.args_schema))

    @property
    def kwargs_strategy(self) -> tuple[OpStrategy, ...]:
        """The strategies among the keyword arguments."""
        return tuple(all_of(OpStrategy, [*self.kwargs_schema.values()]))

    def get_mesh_from_args(self, validate: bool = True) -> AnyMesh:
        """The mesh of the operands. They are all on one mesh."""
        everything = (self.args_schema, [*self.kwargs_schema.values()])
        mesh: AnyMesh = next(all_of((DTensorSpec, OpStrategy), everything)).mesh
        return mesh

    def is_inplace_op(self) -> bool:
        """True if the operator's name says that it writes into its first operand."""
        return self.op._schema.name.endswith("_")

    def is_out_variant_op(self) -> bool:
        """False: rules are asked for the form without out=."""
        return False

    def with_specs(self, specs: Sequence[DTensorSpec]) -> OpSchema:
        """The same call with other layouts for the operands among the positional arguments."""
        if len(specs) != len(self.args_spec):
            raise RuleError(
                f"{self.op}: {len(specs)} specs were given for {len(self.args_spec)} operands."
            )
        left = iter(specs)

        def fill(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(fill, value))
            return next(left) if isinstance(value, DTensorSpec) else value

        return OpSchema(self.op, fill(self.args_schema), self.kwargs_schema, self.schema_info)

    def _inplace_rewrap_schema_suggestion(self, origin_schema: OpSchema) -> None:
        """Take the arguments of `origin_schema` that are no tensors."""
        whole = origin_schema.with_specs(self.args_spec)
        self.args_schema, self.kwargs_schema = whole.args_schema, whole.kwargs_schema


@public
@dataclass
class OutputSharding:
    """The result of a propagation rule.

    With `redistribute_schema` the operands are first moved to its specs. Without an `output_spec`
    the rule is then asked again.
    """

    output_spec: OutputSpecs
    redistribute_schema: OpSchema | None = None
    needs_redistribute: bool = False
    use_val_from_redistribute_schema: bool = False


def all_of(kind: Any, value: Any) -> Iterator[Any]:
    """The values of a class among arguments, including those in lists."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple, TupleStrategy)):
        for each in value.children if isinstance(value, TupleStrategy) else value:
            yield from all_of(kind, each)


def _text(specs: object) -> str:
    if isinstance(specs, (list, tuple)):
        return "(" + ", ".join(map(_text, specs)) + ")"
    return specs.layout_text() if isinstance(specs, DTensorSpec) else str(specs)
