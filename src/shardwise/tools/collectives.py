"""`Collective`: one collective of a program, and its cause; `CommDebugMode` and reports keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
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


def totals(what: str, collectives: Iterable[Collective], by: By) -> Table:
    """Collectives added up by line, module, operator or axis, those with most bytes first."""
    if by not in get_args(By):
        raise CommunicationError(
            f"{what}: by={by!r} is none of {', '.join(map(repr, get_args(By)))}."
        )
    found: dict[tuple[str, str], list[Collective]] = {}
    for one in collectives:
        where = one.axis if by == "axis" else getattr(one.cause, by)
        found.setdefault((where, one.cause.phase), []).append(one)
    rows = []
    for cause, every in found.items():
        kinds = Counter(one.kind for one in every)
        rows.append(
            (
                *cause,
                tuple(f"{kind} {count}" for kind, count in kinds.items()),
                tuple(dict.fromkeys(one.axis for one in every)),
                len(every),
                sum(one.bytes for one in every),
                sum(one.price for one in every),
                tuple(dict.fromkeys(name for one in every for name in one.parameters)),
            )
        )
    rows.sort(key=lambda row: -row[5])
    columns = (by, "pass", "collectives", "axes", "count", "bytes", "price", "parameters")
    return Table(columns, tuple(rows))
