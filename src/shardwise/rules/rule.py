"""A rule: what layouts one call may run in on one mesh axis. A row is one such choice.

Every dim of every operand and result names the *factor* it walks along, or nothing if it is needed
whole.
Sharding a factor shards every dim that walks along it; results that do not have the factor become
partial. So the factors, with the traits that say where partial values may pass, generate all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ..layout.geometry import Box, Cuts, Interval
from ..layout.mesh import Coord
from ..layout.placement import Partial, Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, Groups

__all__ = [
    "Along",
    "Dims",
    "Link",
    "Local",
    "Row",
    "Rule",
    "Scaled",
    "Site",
    "Windows",
    "along",
    "anywhere",
    "dims_of",
    "is_anywhere",
]


class Link(Protocol):
    """How the cuts of a dim follow from the cuts of its factor."""

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
    """Where a local call runs: its coordinate, and the layouts and boxes of operands and
    results."""

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

    def is_first(self, axes: Sequence[int] | None = None) -> bool:
        """Whether this is the first coordinate of the axes on which the first result is partial."""
        pending = self.outputs[0].sums if axes is None else axes
        return all(self.coord[axis] == 0 for axis in pending)


Windows = Callable[
    [Sequence[DTensorSpec], Sequence[DTensorSpec]], dict[int, dict[int, tuple[Interval, ...]]]
]
"""What local calls read beside what their ranks hold: from the layouts of operands and results to
the intervals of an operand's dims, one for each shard."""

Local = Callable[[Any, tuple[Any, ...], dict[str, Any], Site], Any]
"""A local call that depends on where it runs: `local(op, args, kwargs, site)`."""

_ANYWHERE = "_anywhere"


def anywhere(local: Local) -> Local:
    """Mark a local call that looks at shapes only, not at which part of a tensor it has."""
    setattr(local, _ANYWHERE, True)
    return local


def is_anywhere(local: Local | None) -> bool:
    """Whether a local call does not look at which part of a tensor it has."""
    return local is None or hasattr(local, _ANYWHERE)


@dataclass(frozen=True)
class Rule:
    """What layouts a call may run in.

    `reduce` is the pending reduction of results that lack a sharded factor (None: not allowed).
    `added` are operands that count once per result, so they must be partial where the result is.
    `alike` are results that no sharded or pending operand of such a row enters, so that every rank
    makes the whole of them; `same` are pairs (result, factor) that are so for one factor alone.
    `linear` are sets of operands that may hold pending sums or, with `averages`, averages
    together. With `copies` every element of a result is one of the first operand, so that a
    pending maximum, minimum or product passes too. `shape_arg` is the argument to
    be replaced by the local shape of the first result; `tail` gives all arguments after the
    operands for the place where a call runs; `local` replaces the local call,
    `unless` the operator's own is right at every place; `placed` are the factors of which `tail`
    and `local` must know what interval is held (None: all, or none if `local` works `anywhere`).
    `windows` widens operands to
    what the local call reads of their neighbours. With `ignores` the call does not read its
    operands, so that they never move. With `apart` the dims of the rule are those of operands and
    results whose dims are taken apart like this.
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
