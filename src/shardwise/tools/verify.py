"""`verify`: check every row of a rule by brute force.

The inputs are laid out as a row says, the operator runs on every rank, and the result is compared
with the operator on whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import mul
from typing import Any

import torch

from .._torch import OpOverload, OpOverloadPacket, memory_of
from ..comm.dtypes import check_reducible
from ..dispatch.decide import spec_for
from ..dispatch.infer import infer
from ..dispatch.operator import Operator
from ..dispatch.plans import CallPlan, filled, tensors_in
from ..dispatch.random_ops import is_random, is_without_dropout
from ..errors import LayoutError, RuleError, need, public
from ..layout.geometry import Cuts, chunk_cuts
from ..layout.mesh import Topology, VirtualMesh, topology
from ..layout.placement import Partial, Placement
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..redistribute import redistribute_locals
from ..rules import Call, Operand, Row, Rule, has_fractions
from ..storage.plain import full_local
from ..storage.wrapper import Locals, wrap

_FAILURES = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError)


@dataclass(frozen=True)
class CheckedRow:
    """A row of a rule, the number of trials, and the first problem."""

    row: Row
    trials: int
    problem: str | None


@dataclass(frozen=True)
class Report:
    """The result of `verify`: one entry per row of the rule."""

    op: OpOverload
    rule: Rule
    rows: tuple[CheckedRow, ...]

    @property
    def ok(self) -> bool:
        """True if every row gives the answer of one device."""
        return all(checked.problem is None for checked in self.rows)

    @property
    def trials(self) -> int:
        """The number of sharded runs of the operator."""
        return sum(checked.trials for checked in self.rows)

    def raise_if_wrong(self) -> None:
        """Raise a `RuleError` with the problems, if there are any."""
        if not self.ok:
            raise RuleError(str(self))

    def __str__(self) -> str:
        width = max((len(repr(checked.row)) for checked in self.rows), default=0)
        lines = [f"{self.op}: {self.rule}"]
        for checked in self.rows:
            said = "ok" if checked.problem is None else f"WRONG: {checked.problem}"
            lines.append(f"  {checked.row!r:{width}}  {said}")
        return "\n".join(lines)


@public
def verify(op: Any, *args: Any, ranks: Sequence[int] = (2, 3), **kwargs: Any) -> Report:
    """Check every row of the rule of `op` for a call with plain tensors, on axes of `ranks` ranks.

    Dims are cut evenly and raggedly, with empty shards; Partial operands are split at random.

    >>> import torch
    >>> print(verify(torch.ops.aten.mm, torch.randn(5, 4), torch.randn(4, 3)))
    aten.mm.default: m k, k n -> m n  linear=0|1
      S(0), R -> S(0)         ok
      S(1), S(0) -> P(sum)    ok
      R, S(1) -> S(1)         ok
      R, R -> R               ok
      P(sum), R -> P(sum)     ok
      P(avg), R -> P(avg)     ok
      R, P(sum) -> P(sum)     ok
      R, P(avg) -> P(avg)     ok
    """
    entry = Operator(op if isinstance(op, OpOverload) else _default(op))
    draws = is_random(entry.op) and not is_without_dropout(entry.op, args, kwargs)
    if entry.family is None or entry.outs or entry.is_list or draws:
        raise RuleError(f"verify: calls of {entry.op} are not decided by a rule of its own.")
    trial = Trial(entry, args, kwargs)
    found: dict[Row, list[str | None]] = {}
    for count in ranks:
        rule = trial.rule(count)
        for row in trial.rows(rule):
            settings = list(_settings(rule, row, count))
            problems = [trial.problem(rule, row, count, cuts) for cuts in settings]
            found.setdefault(row, []).extend(problems)
    rows = (
        CheckedRow(row, len(problems), next(filter(None, problems), None))
        for row, problems in found.items()
    )
    return Report(entry.op, rule, tuple(rows))


def _default(given: Any) -> Any:
    """The overload of an operator that is named without one."""
    if isinstance(given, torch.library.CustomOpDef):  # type: ignore[attr-defined]
        return given._opoverload
    need("verify", given, OpOverloadPacket, "an operator of torch.ops", RuleError)
    if "default" not in given.overloads():
        raise RuleError(
            f"verify: {given} has the overloads {', '.join(given.overloads())}: give one."
        )
    return given.default


def _settings(rule: Rule, row: Row, count: int) -> Iterator[Cuts]:
    """The cuts of the row's factor to try: even, all on the last rank, and with empty shards."""
    if row.factor is None:
        yield from [()] * (3 if any(place.is_partial() for place in row.inputs) else 1)
        return
    size = rule.sizes[row.factor]
    few, none = min(1, size), [0] * (count - 2)
    yield from {chunk_cuts(size, (count,)): 0, (0, *none, size): 0, (few, *none, size - few): 0}


class Trial:
    """One call, tried in many layouts."""

    def __init__(self, entry: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.entry, self.args, self.kwargs = entry, args, kwargs
        self.draw = torch.Generator().manual_seed(0)
        self.tensors = list(tensors_in(args, kwargs))
        self.metas = [TensorMeta(tuple(t.shape), t.stride(), t.dtype) for t in self.tensors]
        copies = [t.clone() for t in self.tensors]
        given, named = filled(args, kwargs, iter(copies))
        self.expected = list(tensors_in([entry.op(*given, **named)], {}))
        self.shares = bool(set(map(memory_of, copies)) & set(map(memory_of, self.expected)))
        self.has_values = "empty" not in entry.op._schema.name
        before = tensors_in(args[: entry.written], {})
        self.written = None if entry.written is None else len(list(before))

    def rule(self, count: int) -> Rule:
        """The rule for the call on an axis of `count` ranks."""
        where = _axis(count)
        specs = [DTensorSpec(where, default_placements(where), meta) for meta in self.metas]
        self.results, self.structure = infer(self.entry.op, self.args, self.kwargs, specs)
        given = filled(self.args, self.kwargs, iter(map(Operand, range(len(specs)))))
        assert self.entry.family is not None
        call = Call(self.entry.op, *given, specs, self.results, self.structure)
        return self.entry.family(call)

    def rows(self, rule: Rule) -> list[Row]:
        """The rows to try; for an operator that writes, those that keep the written layout."""
        kept = self.written
        rows = [r for r in rule.rows if kept is None or r.inputs[kept] is r.outputs[0]]
        return [row for row in rows if all(map(_can_be, row.inputs, self.metas))]

    def problem(self, rule: Rule, row: Row, count: int, cuts: Cuts) -> str | None:
        """The problem with the call in this layout, or None."""
        factors: Any = {} if row.factor is None else {row.factor: (cuts, (count,))}

        def specs(*columns: Sequence[Any]) -> list[DTensorSpec]:
            return [
                spec_for(_axis(count), [place], dims, meta, factors, groups)
                for place, dims, meta, groups in zip(*columns, strict=True)
            ]

        ins, outs = rule.apart or ([None] * len(self.metas), [None] * len(self.results))
        try:
            inputs = specs(row.inputs, rule.inputs, self.metas, ins)
            outputs = specs(row.outputs, rule.outputs, self.results, outs)
            wrong = self._run(rule, inputs, outputs)
        except _FAILURES as error:
            wrong = f"{type(error).__name__}: {error}"
        setting = f" with cuts {list(cuts)}" if row.factor is not None else ""
        return None if wrong is None else f"on {count} ranks{setting}, {wrong}"

    def _run(self, rule: Rule, inputs: list[DTensorSpec], outputs: list[DTensorSpec]) -> str | None:
        plan = CallPlan(
            self.entry.op,
            inputs,
            inputs,
            outputs,
            places=None,
            structure=self.structure,
            written=self.written,
            target=self.entry.written or 0,
            local=rule.local,
            unless=rule.unless,
            shape_arg=rule.shape_arg,
            tail=rule.tail,
            windows=rule.windows,
        )
        operands = [
            wrap(spec, _parts(tensor, spec, self.draw))
            for spec, tensor in zip(inputs, self.tensors, strict=True)
        ]
        given, named = filled(self.args, self.kwargs, iter(operands))
        made = list(tensors_in([plan.run(operands, given, named)], {}))
        if len(made) != len(self.expected):
            return f"{len(made)} results, not {len(self.expected)}"
        for index, (got, want) in enumerate(zip(made, self.expected, strict=True)):
            wrong = _difference(got, want, self.has_values)
            if not self.shares and _memories([got]) & _memories(operands):
                wrong = "it shares memory with an operand"
            if wrong is not None:
                return f"result {index}: {wrong}"
        return None


def _memories(tensors: Sequence[Any]) -> set[int]:
    """The storages of local tensors that have elements."""
    return {memory_of(part) for x in tensors for part in x._locals if part.numel()}


def _can_be(place: Placement, meta: TensorMeta) -> bool:
    """True if a tensor can have this placement: not all dtypes can be reduced."""
    try:
        if isinstance(place, Partial):
            check_reducible(place.reduce_op, meta.dtype)
    except LayoutError:
        return False
    return True


@cache
def _axis(count: int) -> Topology:
    return topology(VirtualMesh("cpu", range(count)))


def _parts(tensor: torch.Tensor, spec: DTensorSpec, draw: torch.Generator) -> Locals:
    """The local tensors of a whole tensor laid out as `spec`, which has one axis."""
    (place,) = spec.placements
    if isinstance(place, Partial):
        parts = _split(tensor, place.reduce_op, len(spec.slots), draw)
        return tuple(torch.empty_like(tensor).copy_(part) for part in parts)  # in its memory format
    whole = DTensorSpec(spec.topology, default_placements(spec.topology), spec.meta)
    return redistribute_locals(whole, spec, (tensor.clone(),), fresh=True)


def _split(whole: torch.Tensor, op: str, count: int, draw: torch.Generator) -> list[torch.Tensor]:
    """Random tensors that reduce to `whole`."""
    dtype = whole.dtype
    noise = [torch.randint(-3, 4, whole.shape, generator=draw).to(dtype) for _ in range(count)]
    if dtype is torch.bool:
        op = {"sum": "max", "product": "min"}.get(op, op)
    if op in ("max", "min"):
        owner = torch.randint(count, whole.shape, generator=draw)
        beyond = torch.minimum if op == "max" else torch.maximum
        return [
            torch.where(owner == rank, whole, beyond(whole, other))
            for rank, other in enumerate(noise)
        ]
    if op == "product":
        signs = [torch.where(other.real > 0, 1, -1).to(dtype) for other in noise[1:]]
        return [whole * reduce(mul, signs), *signs]
    first = (whole if op == "sum" else whole * count) - sum(noise[1:])
    if op == "avg" and not has_fractions(dtype):  # the result must not depend on rounding
        first += (count - 1) * torch.where(whole < 0, -1, 1).to(dtype)
    return [first, *noise[1:]]


def _difference(got: Any, want: torch.Tensor, values: bool) -> str | None:
    spec = got._spec
    expected = TensorMeta(tuple(want.shape), want.stride(), want.dtype)
    if not (values and want.numel()):  # then strides do not matter
        expected = expected._replace(stride=spec.stride)
    if spec.meta != expected:
        return f"it is {spec.meta}, not {expected}"
    for coord, local in zip(spec.slots, got._locals, strict=True):
        shape = spec.local_shape(coord)
        if tuple(local.shape) != shape or local.dtype is not want.dtype:
            return f"rank {coord[0]} has {local.dtype} {list(local.shape)}, not {list(shape)}"
    if not values:
        return None
    whole = full_local(got)
    # Sums in another order differ in the last digits, and more where large parts cancel.
    close = torch.finfo(want.dtype).eps ** 0.5 if has_fractions(want.dtype) else 0
    if torch.equal(whole, want):  # much faster than assert_close
        return None
    try:
        torch.testing.assert_close(whole, want, rtol=close, atol=close, equal_nan=True)
    except AssertionError as error:
        return "values differ: " + "; ".join(filter(None, str(error).splitlines()[1:]))
    return None
