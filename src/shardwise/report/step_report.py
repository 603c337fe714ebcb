"""`StepReport`: what a step communicated, computed and held in memory, as data and as text."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from .._torch import memory_of
from ..errors import LayoutError, need, public
from ..storage.wrapper import Wrapper
from ..tools.causes import Cause
from ..tools.collectives import By, Collective, totals
from ..tools.text_table import Table
from .recorder import Recorder

_SECOND = 10**9
_SHOWN = 60
"""The most collectives that the text lists."""


@dataclass(frozen=True, slots=True)
class LocalCall:
    """One operator on local tensors: the ranks it ran for, seconds since the step began, cause."""

    op: str
    begin: float
    end: float
    ranks: tuple[int, ...]
    cause: Cause


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that ranks held from `begin` to `end`, in seconds since the step began.

    `cause` is None if it was there before the step; `name` is that of the parameter in it.
    """

    bytes: int
    begin: float
    end: float
    ranks: tuple[int, ...]
    cause: Cause | None
    name: str = ""


@dataclass(frozen=True)
class Memory:
    """The memory of one rank: the most bytes held at one time, that time, and the bytes before the
    step; `curve` has the times at which the bytes change."""

    rank: int
    peak: int
    at: float
    before: int
    curve: tuple[tuple[float, int], ...]
    holders: Table
    """Who holds the memory at the peak: operator, line and module that made it."""


@public
@dataclass(frozen=True, repr=False)
class StepReport:
    """The report of a step. `print` shows it, `write_html` makes a page of it.

    - `collectives` are in the order in which they began; `checks` are those that compare ranks.
    - `calls` are the operators that ran on local tensors.
    - `allocations` are the memory of tensors that were made or used.
    - `ranks` are those that run in this process: all of a virtual mesh, else one.
    """

    name: str
    meshes: tuple[str, ...]
    ranks: tuple[int, ...]
    seconds: float
    collectives: tuple[Collective, ...]
    checks: tuple[Collective, ...]
    calls: tuple[LocalCall, ...]
    allocations: tuple[Allocation, ...]

    @property
    def bytes(self) -> int:
        """The bytes that a rank receives, for the rank that receives most in each collective."""
        return sum(one.bytes for one in self.collectives)

    @property
    def price(self) -> float:
        """The time that the collectives take by the links of their meshes, in microseconds."""
        return sum(one.price for one in self.collectives)

    @property
    def peak(self) -> int:
        """The most bytes that a rank of this process held at one time."""
        return max((self.memory(rank).peak for rank in self.ranks), default=0)

    def table(self, by: By = "line") -> Table:
        """The collectives added up by line, module, operator or axis."""
        return totals("StepReport.table", self.collectives, by)

    def memory(self, rank: int | None = None) -> Memory:
        """The memory of a rank of this process; without one that of the rank that held most."""
        if rank is None:
            rank = max(self.ranks, key=lambda each: (self._memory[each].peak, -each))
        if rank not in self.ranks:
            raise LayoutError(f"StepReport.memory: rank {rank!r} is none of {list(self.ranks)}.")
        return self._memory[rank]

    @cached_property
    def _memory(self) -> dict[int, Memory]:
        return {rank: _memory_of(rank, self.allocations) for rank in self.ranks}

    def write_html(self, file: str | os.PathLike[str]) -> Path:
        """Write one page that shows all of the report and needs no other file or network."""
        from .page import page

        return _write(file, page(self))

    def write_trace(self, file: str | os.PathLike[str]) -> Path:
        """Write a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""
        from .trace import trace

        return _write(file, trace(self))

    def to_dict(self) -> dict[str, Any]:
        """All of the report in dicts, lists, numbers and strings, for JSON."""
        from .data import as_dict

        return as_dict(self)

    def __str__(self) -> str:
        return "\n\n".join(_sections(self))

    __repr__ = __str__


def _write(file: str | os.PathLike[str], text: str) -> Path:
    need("StepReport", file, str | os.PathLike, "a file name")
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# --- from a recording ----------------------------------------------------------------------------


def report_of(name: str, recorder: Recorder) -> StepReport:
    """The report of what a recorder has seen."""
    virtual = any(where.virtual for where in recorder.topologies)
    every = sorted({rank for where in recorder.topologies for rank in where.ranks}) or [0]
    here = [at.rank_of(at.coordinate) for at in recorder.topologies if at.coordinate is not None]
    ranks = tuple(every) if virtual else (*here, 0)[:1]

    @cache
    def sets(bits: int) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if bits >> rank & 1)

    names = _names_of_memory(recorder)
    total = recorder.nanoseconds
    allocations = [
        Allocation(
            block.nbytes,
            block.begin / _SECOND,
            (total if block.end is None else block.end) / _SECOND,
            sets(block.ranks),
            block.cause,
            names.get(block.key, "") if block.cause is None else "",
        )
        for block in recorder.blocks
        if block.nbytes and block.end != block.begin
    ]
    return StepReport(
        name,
        tuple(map(str, recorder.topologies)),
        ranks,
        total / _SECOND,
        tuple(recorder.collectives),
        tuple(recorder.checks),
        tuple(
            LocalCall(op, begin / _SECOND, end / _SECOND, sets(bits), cause)
            for op, begin, end, bits, cause in recorder.calls
        ),
        tuple(allocations),
    )


def _names_of_memory(recorder: Recorder) -> dict[int, str]:
    """The names of parameters, by their memory."""
    found: dict[int, str] = {}
    for module, own in recorder.causes.modules.parameters.items():
        for key, value in own.items():
            parts = value.__dict__.get("_locals", ()) if isinstance(value, Wrapper) else (value,)
            found.update((memory_of(part), f"{module}.{key}") for part in parts)
    return found


# --- memory --------------------------------------------------------------------------------------


def _memory_of(rank: int, allocations: Iterable[Allocation]) -> Memory:
    own = [each for each in allocations if rank in each.ranks]
    before = sum(each.bytes for each in own if each.cause is None)
    changes: dict[float, int] = {}
    for each in own:
        changes[each.begin] = changes.get(each.begin, 0) + each.bytes
        changes[each.end] = changes.get(each.end, 0) - each.bytes
    curve, held = [], 0
    for time in sorted(changes):
        held += changes[time]
        curve.append((time, held))
    at, peak = max(curve[:-1], key=lambda point: point[1], default=(0.0, 0))
    there = [each for each in own if each.begin <= at < each.end]
    return Memory(rank, peak, at, before, tuple(curve), _holders(there))


def _holders(allocations: Iterable[Allocation]) -> Table:
    """Memory added up by who made it, most bytes first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for each in allocations:
        found.setdefault(holder(each), []).append(each.bytes)
    rows = [
        (*who, len(some), sum(some))
        for who, some in sorted(found.items(), key=lambda pair: -sum(pair[1]))
    ]
    return Table(("operator", "line", "module", "tensors", "bytes"), tuple(rows))


def holder(allocation: Allocation) -> tuple[str, str, str]:
    """Who made some memory: operator, line and module; in words if it was there before."""
    cause = allocation.cause
    if cause is None:
        module, _, _ = allocation.name.rpartition(".")
        return ("parameters" if allocation.name else "before the step"), "", module
    return cause.op, cause.line, cause.module


# --- text ----------------------------------------------------------------------------------------


def _sections(report: StepReport) -> Iterable[str]:
    meshes = ", ".join(report.meshes) or "no mesh"
    count = len(report.ranks)
    where = f"{count} ranks in one process" if count > 1 else f"rank {report.ranks[0]}"
    yield f"{report.name} on {meshes}, {where}: {report.seconds * 1e3:.3f} ms"
    yield _communication(report)
    for by in ("axis", "module", "line"):
        if report.collectives:
            yield f"by {by}\n{_short(report.table(by))}"
    memory = report.memory()
    share = memory.at / report.seconds if report.seconds else 0.0
    head = (
        f"memory of rank {memory.rank}: peak {memory.peak:,} bytes at {share:.0%} of the step, "
        f"{memory.before:,} of them from before it; held at the peak by"
    )
    yield f"{head}\n{_short(_first(memory.holders, 20))}"


def _communication(report: StepReport) -> str:
    names = "collective axes bytes price pass operator line module moves"
    rows = [
        (
            one.kind,
            one.axis,
            one.bytes,
            one.price,
            one.cause.phase,
            one.cause.op,
            one.cause.line,
            one.cause.module,
            _moves(one),
        )
        for one in report.collectives
    ]
    count = len(rows)
    text = (
        f"{count} collective{'s' * (count != 1)}, {report.bytes:,} bytes received per rank, "
        f"{report.price:,.1f} us by the links of the mesh"
    )
    if report.checks:
        text += f"; {len(report.checks)} checks, {sum(c.bytes for c in report.checks):,} bytes"
    table = Table(tuple(names.split()), tuple(rows))
    return f"{text}\n{_short(_first(table, _SHOWN))}" if rows else text


def _moves(one: Collective) -> str:
    """The first move of a collective, and how many more there are."""
    more = len(one.moves) - 1
    first = str(one.moves[0]) if one.moves else ""
    return f"{first}, and {more} more" if more > 0 else first


def _first(table: Table, count: int) -> Table:
    if len(table) <= count:
        return table
    more = (f"and {len(table) - count} more", *[""] * (len(table.columns) - 1))
    return Table(table.columns, (*table.rows[:count], more))


def _short(table: Table) -> Table:
    """A table with lines as they are called from the current folder."""
    if "line" not in table.columns:
        return table
    at = table.columns.index("line")
    rows = [(*row[:at], short_line(row[at]), *row[at + 1 :]) for row in table.rows]
    return Table(table.columns, tuple(rows))


def short_line(line: str) -> str:
    """A line with its file as it is called from the current folder."""
    return line.removeprefix(f"{Path.cwd()}{os.sep}")
