"""`Collective`: one collective of a program, and its cause; `CommDebugMode` and reports keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

import torch

from ..comm.events import Communication
from ..errors import CommunicationError
from ..layout.layout import Layout
from .causes import Cause, Causes, tensors_moving
from .text_table import Table

MICROSECOND = 10**9
"""In the unit of prices."""

By = Literal["line", "module", "op", "axis"]


class Moved(NamedTuple):
    """The layouts of a tensor before and after its part in a collective."""

    dtype: torch.dtype
    src: Layout
    dst: Layout

    def __str__(self) -> str:
        return f"{self.src.text(self.dtype)} -> {self.dst.text(self.dtype)}"


@dataclass(frozen=True)
class Collective:
    """One collective.

    - `axes` are the names of the mesh axes whose ranks talk.
    - `bytes` are those that the rank that receives most receives.
    - `price` is what they take by the links of the mesh, in microseconds.
    - `parameters` are the names of parameters that move, or whose gradients do.
    - `begin` and `end` are seconds since recording began, as measured; both 0 if it was not.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    price: float
    cause: Cause
    parameters: tuple[str, ...] = ()
    moves: tuple[Moved, ...] = field(default=(), repr=False)
    begin: float = 0.0
    end: float = 0.0

    @property
    def axis(self) -> str:
        """The names of the axes, with commas."""
        return ",".join(self.axes)

    def timed(self, begin: float, end: float) -> Collective:
        """The same collective with its time."""
        return replace(self, begin=begin, end=end)


def collective_of(event: Communication, causes: Causes) -> Collective:
    """The record of a collective that starts now."""
    names = (causes.modules.name_of(each) for each in tensors_moving())
    pairs = zip(event.steps, event.dtypes, strict=True)
    return Collective(
        event.kind,
        tuple(event.topology.names[axis] for axis in event.axes),
        event.nbytes,
        event.price / MICROSECOND,
        causes.of_collective(),
        tuple(dict.fromkeys(name for name in names if name)),
        tuple(Moved(dtype, step.src, step.dst) for step, dtype in pairs),
    )


class _Total:
    """The totals of the collectives of one cause."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.bytes = 0
        self.price = 0.0
        self.axes: dict[str, None] = {}  # in the order they came
        self.parameters: dict[str, None] = {}

    def add(self, one: Collective) -> None:
        self.kinds[one.kind] += 1
        self.bytes += one.bytes
        self.price += one.price
        self.axes[one.axis] = None
        self.parameters.update(dict.fromkeys(one.parameters))


_WHERE: dict[By, Callable[[Collective], tuple[str, ...]]] = {
    "line": lambda one: (one.cause.line, one.cause.phase),
    "module": lambda one: (one.cause.module, one.cause.phase),
    "op": lambda one: (one.cause.op, one.cause.phase),
    "axis": lambda one: (one.axis, one.cause.phase),
}


def totals(what: str, collectives: Iterable[Collective], by: By) -> Table:
    """Collectives added up by line, module, operator or axis, those with most bytes first."""
    if by not in get_args(By):
        raise CommunicationError(
            f"{what}: by={by!r} is none of {', '.join(map(repr, get_args(By)))}."
        )
    found: dict[tuple[str, ...], _Total] = {}
    for one in collectives:
        found.setdefault(_WHERE[by](one), _Total()).add(one)
    rows = [
        (
            *where,
            tuple(f"{kind} {count}" for kind, count in total.kinds.items()),
            tuple(total.axes),
            total.kinds.total(),
            total.bytes,
            total.price,
            tuple(total.parameters),
        )
        for where, total in sorted(found.items(), key=lambda each: -each[1].bytes)
    ]
    columns = (by, "pass", "collectives", "axes", "count", "bytes", "price", "parameters")
    return Table(columns, tuple(rows))


def counted(collectives: Sequence[Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    """The number of collectives and their bytes, by kind and axes."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for one in collectives:
        count, nbytes = found.get((one.kind, one.axis), (0, 0))
        found[one.kind, one.axis] = count + 1, nbytes + one.bytes
    return found
