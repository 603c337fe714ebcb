"""The parts of a rule: calls as rules see them, factors, rows.

A rule says what layouts one call may run in on one mesh axis; a row is one such choice. Every dim
of every operand and result names the *factor* it walks along, or nothing if it is needed whole.
Sharding a factor shards every dim that walks along it; results without the factor become partial.
So the factors, with the traits that say where partial values may pass, generate all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch

from .._torch import OpOverload
from ..layout.geometry import Box, Cuts, Interval
from ..layout.mesh import Coord
from ..layout.placement import Partial, Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, Groups, TensorMeta
from ..layout.split_dims import common


class Link(Protocol):
    """How the cuts of a dim follow from the cuts of its factor (`layout.cost.Link` is another)."""

    def to_factor(self, cuts: Cuts) -> Cuts | None:
        """The factor's cuts that these cuts of the dim come from; None if there are none."""

    def from_factor(self, cuts: Cuts, counts: tuple[int, ...]) -> Cuts:
        """The dim's cuts for these cuts of the factor, on axes of these sizes."""


@dataclass(frozen=True)
class Scaled:
    """A dim that is the factor times an inner block: its cuts are multiples of the block."""

    block: int

    def to_factor(self, cuts: Cuts) -> Cuts | None:
        if any(size % self.block for size in cuts):
            return None
        return tuple(size // self.block for size in cuts)

    def from_factor(self, cuts: Cuts, counts: tuple[int, ...]) -> Cuts:
        return tuple(size * self.block for size in cuts)


@dataclass(frozen=True)
class Along:
    """A dim that walks along `factor`; `link` maps the cuts if they are not the factor's own."""

    factor: str
    link: Link | None = None


Dims = tuple[Along | None, ...]


def along(names: Sequence[str | None]) -> Dims:
    """Dims from factor names; None for a dim that is needed whole."""
    return tuple(None if name is None else Along(name) for name in names)


@dataclass(frozen=True)
class Row:
    """One way to run on one axis: a placement for each operand and each result."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str | None = None

    def __repr__(self) -> str:
        ins, outs = ", ".join(map(repr, self.inputs)), ", ".join(map(repr, self.outputs))
        return f"{ins} -> {outs}"


@dataclass(frozen=True)
class Site:
    """Where a local call runs: its coordinate, and the layouts of operands and results."""

    coord: Coord
    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[DTensorSpec, ...]

    def box(self, operand: int) -> Box:
        """The box of an operand here."""
        return self.inputs[operand].box(self.coord)

    @cached_property
    def out_boxes(self) -> tuple[Box, ...]:
        return tuple(spec.box(self.coord) for spec in self.outputs)

    @cached_property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(spec.local_shape(self.coord) for spec in self.outputs)


Windows = Callable[
    [Sequence[DTensorSpec], Sequence[DTensorSpec]], dict[int, dict[int, tuple[Interval, ...]]]
]
"""From the layouts of operands and results to what local calls read of operands: for each dim an
interval for each shard. They may overlap the pieces of other ranks."""

Local = Callable[[Any, tuple[Any, ...], dict[str, Any], Site], Any]
"""A local call that depends on where it runs: `local(op, args, kwargs, site)`."""

NOWHERE: frozenset[str] = frozenset()
"""The `placed` of rules whose local call does not depend on the interval that a rank holds."""


@dataclass(frozen=True)
class Rule:
    """The layouts in which a call may run.

    - `reduce`: the reduction of results that lack a sharded factor, which are Partial; None if that
      is not allowed.
    - `added`: operands that count once per result, so they are partial where the result is.
    - `alike`: results that every rank makes whole in rows whose factor they lack; `same`: pairs
      (result, factor) for which that holds.
    - `linear`: sets of operands that may be Partial sums together; with `averages` also averages.
    - `copies`: every element of a result is one of the first operand, so a Partial maximum,
      minimum or product passes too.
    - `shape_arg`: the argument to be replaced by the local shape of the first result.
    - `tail`: gives all arguments after the operands for the place where a call runs.
    - `local`: replaces the local call, `unless` the operator's own is right at every place.
    - `placed`: the factors of which `tail` and `local` read the interval that a rank holds; None
      for all.
    - `windows`: what the local call reads of its neighbours' pieces.
    - `ignores`: the call does not read its operands, so they never move.
    - `apart`: the dims of the rule are those of operands and results split like this.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: dict[str, int] = field(default_factory=dict)
    reduce: str | None = "sum"
    added: frozenset[int] = frozenset()
    alike: frozenset[int] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    averages: bool = True
    copies: bool = False
    shape_arg: int | None = None
    tail: Callable[[Site], tuple[Any, ...]] | None = None
    local: Local | None = None
    unless: Callable[[Site], bool] | None = None
    windows: Windows | None = None
    same: frozenset[tuple[int, str]] = frozenset()
    ignores: bool = False
    placed: frozenset[str] | None = None
    apart: tuple[tuple[Groups, ...], tuple[Groups, ...]] | None = None

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All rows: one per factor, all Replicate, then the partial ones."""
        rows = [row for factor in self.sizes if (row := self._factor_row(factor)) is not None]
        whole = (Replicate(),) * len(self.inputs)
        rows.append(Row(whole, (Replicate(),) * len(self.outputs)))
        for operands in self.linear:
            for op in ("sum", "avg") if self.averages else ("sum",):
                rows.append(self._partial_row(operands, op))
        if self.copies:
            rows.extend([self._partial_row((0,), op) for op in ("max", "min", "product")])
        return tuple(rows)

    def _factor_row(self, factor: str) -> Row | None:
        outputs: list[Placement] = []
        partial = False
        for index, dims in enumerate(self.outputs):
            at = dims_of(dims, factor)
            if not at and (index in self.alike or (index, factor) in self.same):
                outputs.append(Replicate())
                continue
            if len(at) > 1 or (not at and self.reduce is None):
                return None
            partial |= not at
            outputs.append(Shard(at[0]) if at else Partial(self.reduce or "sum"))
        inputs: list[Placement] = []
        for index, dims in enumerate(self.inputs):
            at = dims_of(dims, factor)
            if len(at) > 1:
                return None
            if at:
                inputs.append(Shard(at[0]))
            elif partial and index in self.added:
                inputs.append(Partial(self.reduce or "sum"))
            else:
                inputs.append(Replicate())
        return Row(tuple(inputs), tuple(outputs), factor)

    def _partial_row(self, operands: Sequence[int], op: str) -> Row:
        inputs = tuple(
            Partial(op) if index in operands else Replicate() for index in range(len(self.inputs))
        )
        outputs = tuple(
            Replicate() if index in self.alike else Partial(op)
            for index in range(len(self.outputs))
        )
        return Row(inputs, outputs)

    def __str__(self) -> str:
        """The rule in index notation, with its traits."""
        apart = self.apart or ((None,) * len(self.inputs), (None,) * len(self.outputs))
        ins, outs = (
            ", ".join(map(_dims_text, dims, groups))
            for dims, groups in zip((self.inputs, self.outputs), apart, strict=True)
        )
        text = f"{ins} -> {outs}"
        if self.reduce != "sum":
            text += f"  reduce={self.reduce}"
        if self.linear:
            text += f"  linear={'|'.join(','.join(map(str, each)) for each in self.linear)}"
        if self.copies:
            text += "  copies"
        return text


def dims_of(dims: Dims, factor: str) -> list[int]:
    """The dims that walk along a factor."""
    return [dim for dim, at in enumerate(dims) if at is not None and at.factor == factor]


def _dims_text(dims: Dims, groups: Groups | None) -> str:
    if not dims:
        return "()"
    names = iter("_" if at is None else at.factor + ("~" if at.link else "") for at in dims)
    if groups is None:
        return " ".join(names)
    texts = [" ".join([next(names) for _ in group]) for group in groups]
    return " ".join(f"({text})" if " " in text else text for text in texts)


# --- calls ---------------------------------------------------------------------------------------


class Operand(int):
    """Stands in for a tensor among the arguments: its index among the operands."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"operand {int(self)}"


def has_fractions(dtype: torch.dtype) -> bool:
    """True for floats and complex numbers: averages of integers drop the remainder."""
    return dtype.is_floating_point or dtype.is_complex


def keeps_sums(src: torch.dtype, dst: torch.dtype) -> bool:
    """True if a tensor may stay a Partial sum while it is cast from `src` to `dst`.

    Booleans saturate. Integers wrap around, floats do not. A cast to integers drops fractions, and
    one to a narrower float may overflow where the sum does not.
    """
    if src is dst:
        return src is not torch.bool
    if not (has_fractions(src) and has_fractions(dst)) or _is_tiny(dst):
        return False
    return _is_tiny(src) or torch.promote_types(src, dst) is dst


def _is_tiny(dtype: torch.dtype) -> bool:
    """True for 8-bit floats, which PyTorch does not promote."""
    return dtype.is_floating_point and dtype.itemsize == 1


LEAST, MOST = 1e-38, 1e38
"""Numbers between these have reciprocals, and are neither infinite nor zero in any dtype."""


def stored(meta: TensorMeta) -> int:
    """How many elements a tensor has in memory: those that `expand` repeats count once."""
    return prod(n for n, stride in zip(meta.shape, meta.stride, strict=True) if stride)


class Call:
    """An operator call with its tensors replaced by specs.

    `structure` says how the results are returned: 0 for one alone, else the index of the result at
    each place of a tuple. `laid` has the real layouts; in `specs` every sharded dim is cut into
    consecutive pieces.
    """

    __slots__ = ("args", "kwargs", "laid", "op", "results", "specs", "structure", "values")

    def __init__(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        specs: Sequence[DTensorSpec],
        results: Sequence[TensorMeta],
        structure: Any = 0,
    ) -> None:
        self.op = op
        self.args = tuple(args)
        self.kwargs = kwargs
        self.laid = tuple(specs)
        self.specs = tuple([spec.consecutive for spec in specs])
        self.results = tuple(results)
        self.structure = structure
        self.values = named(op, self.args, kwargs)

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by name, with the operator's default if it was not given."""
        return self.values.get(name, default)

    def position(self, name: str) -> int:
        """Where an argument stands in the operator's signature."""
        names = [argument.name for argument in self.op._schema.arguments]
        return names.index(name)

    def shape(self, operand: int) -> tuple[int, ...]:
        """The global shape of an operand."""
        return self.specs[operand].meta.shape

    def present(self) -> list[int]:
        """Which of the operator's tensor arguments were given, by their index among them."""
        tensors = [a.name for a in self.op._schema.arguments if "Tensor" in str(a.type)]
        return [i for i, name in enumerate(tensors) if isinstance(self.values[name], Operand)]

    @property
    def name(self) -> str:
        return str(self.op)

    @property
    def operand_names(self) -> list[str]:
        """The names of the tensor arguments that were given."""
        return [name for name, value in self.values.items() if isinstance(value, Operand)]


def together(call: Call, operands: Sequence[int] | None = None) -> dict[str, Any]:
    """The traits of a call that joins elements of its operands: a sum passes if it is pending in
    all of them and `keeps_sums` allows every cast."""
    every = tuple(range(len(call.specs)) if operands is None else operands)
    dst = call.results[0].dtype
    dtypes = [call.specs[index].dtype for index in every]
    same = all(dtype is dst for dtype in dtypes)
    return {
        "linear": (every,) if same or all(keeps_sums(dtype, dst) for dtype in dtypes) else (),
        "averages": same or all(map(has_fractions, dtypes)),
    }


Family = Callable[[Call], Rule]
"""From a call to its rule."""


def named(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with those that were not given."""
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given |= dict(zip(given, args, strict=False))
    return {**given, **kwargs}


def replicated(call: Call) -> Rule:
    """A rule that needs all operands whole."""
    inputs = tuple((None,) * spec.ndim for spec in call.specs)
    return Rule(inputs, tuple((None,) * len(meta.shape) for meta in call.results), {}, reduce=None)


def zeros_at(call: Call, site: Site, like: torch.Tensor) -> Any:
    """The results of a rank that has nothing to do: no elements, and zeros where sums are due."""
    made = [
        like.new_zeros(shape, dtype=spec.dtype)
        for shape, spec in zip(site.out_shapes, site.outputs, strict=True)
    ]
    if not isinstance(call.structure, (list, tuple)):
        return made[0]
    return tuple(made[at] if isinstance(at, int) else None for at in call.structure)


def unless_empty(call: Call, operand: int = 0) -> dict[str, Any]:
    """The traits of a call whose kernel refuses the empty shard of an operand: such a rank makes
    zeros."""

    def unless(site: Site) -> bool:
        spec = site.inputs[operand]
        if prod(spec.local_shape(site.coord)):
            return True
        return not prod(spec.meta.shape) and all(map(prod, site.out_shapes))

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        return op(*args, **kwargs) if unless(site) else zeros_at(call, site, _first(args))

    return {"local": local, "unless": unless, "placed": NOWHERE}


def _first(args: Sequence[Any]) -> torch.Tensor:
    return next(value for value in args if isinstance(value, torch.Tensor))


# --- dims that are sharded block by block ---------------------------------------------------------


Parts = dict[str, tuple[int, ...]]
"""For some factors the sizes of which they are the product."""


def split_factors(rule: Rule, call: Call) -> Rule:
    """The rule with the factors of block-sharded dims split, where that is allowed.

    A factor cannot be split if a local call reads which interval of it a rank holds, or if the cuts
    of some dim are not the factor's own.
    """
    parts: Parts = {}
    free = rule.sizes.keys() - _fixed(rule)
    for spec, dims in zip(call.laid, rule.inputs, strict=True):
        for group, at in zip(spec.groups or (), dims, strict=False):
            if len(group) == 1 or at is None or at.factor not in free:
                continue
            both = common((parts.get(at.factor, (rule.sizes[at.factor],)),), (group,))
            if both is not None:
                parts[at.factor] = both[0]
    if not parts:
        return rule
    shapes = [spec.meta.shape for spec in call.specs], [meta.shape for meta in call.results]
    inputs, outputs = (
        [_split(dims, shape, parts) for dims, shape in zip(every, each, strict=True)]
        for every, each in zip((rule.inputs, rule.outputs), shapes, strict=True)
    )
    return replace(
        rule,
        inputs=tuple(dims for dims, _ in inputs),
        outputs=tuple(dims for dims, _ in outputs),
        sizes=dict(pair for factor in rule.sizes for pair in _sizes(factor, rule, parts)),
        same=frozenset((i, n) for i, f in rule.same for n, _ in _sizes(f, rule, parts)),
        apart=(tuple(groups for _, groups in inputs), tuple(groups for _, groups in outputs)),
    )


def _fixed(rule: Rule) -> frozenset[str]:
    """The factors that cannot be split."""
    if rule.windows is not None:
        return frozenset(rule.sizes)
    every = [at for dims in (*rule.inputs, *rule.outputs) for at in dims if at is not None]
    linked = frozenset(at.factor for at in every if at.link is not None)
    if rule.placed is not None:
        return linked | rule.placed
    return linked if rule.tail is None and rule.local is None else frozenset(rule.sizes)


def _sizes(factor: str, rule: Rule, parts: Parts) -> Iterable[tuple[str, int]]:
    finer = parts.get(factor)
    if finer is None:
        return [(factor, rule.sizes[factor])]
    return [(f"{factor}.{place}", size) for place, size in enumerate(finer)]


def _split(dims: Dims, shape: Sequence[int], parts: Parts) -> tuple[Dims, Groups]:
    """The dims of a tensor with these factors split, and the sizes each dim becomes."""
    finer: list[Along | None] = []
    groups = []
    for at, size in zip(dims, shape, strict=True):
        group = None if at is None else parts.get(at.factor)
        groups.append(group or (size,))
        if at is None or group is None:
            finer.append(at)
        else:
            finer += [Along(f"{at.factor}.{place}") for place in range(len(group))]
    return tuple(finer), tuple(groups)
