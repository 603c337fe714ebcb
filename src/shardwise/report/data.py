"""A report as dicts, lists, numbers and strings: for JSON, and for the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tools.causes import Cause

if TYPE_CHECKING:
    from .step_report import StepReport


class _Index(dict[Any, int]):
    """Values by number, in the order in which they came."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def as_dict(report: StepReport) -> dict[str, Any]:
    """All of a report. Times are microseconds since the step began, prices too.

    `calls` and `memory.allocations` are lists of values under `columns`. Causes, operators and sets
    of ranks stand in lists, and are referred to by their index; -1 is the cause of memory from
    before the step.
    """
    causes, ops, ranks = _Index(), _Index(), _Index()
    calls = [
        [ops[one.op], _time(one.begin), _time(one.end), ranks[one.ranks], causes[one.cause]]
        for one in report.calls
    ]
    allocations = [
        [
            one.bytes,
            _time(one.begin),
            _time(one.end),
            ranks[one.ranks],
            -1 if one.cause is None else causes[one.cause],
            one.name,
        ]
        for one in report.allocations
    ]
    collectives = [
        {
            "kind": one.kind,
            "axes": list(one.axes),
            "bytes": one.bytes,
            "price": round(one.price, 3),
            "begin": _time(one.begin),
            "end": _time(one.end),
            "cause": causes[one.cause],
            "parameters": list(one.parameters),
            "moves": [[move.src.text(move.dtype), move.dst.text(move.dtype)] for move in one.moves],
        }
        for one in report.collectives
    ]
    return {
        "name": report.name,
        "meshes": list(report.meshes),
        "ranks": list(report.ranks),
        "microseconds": _time(report.seconds),
        "bytes": report.bytes,
        "price": round(report.price, 3),
        "collectives": collectives,
        "checks": {"count": len(report.checks), "bytes": sum(one.bytes for one in report.checks)},
        "calls": {"columns": ["op", "begin", "end", "ranks", "cause"], "rows": calls},
        "memory": {
            "peaks": [
                {
                    "rank": rank,
                    "peak": report.memory(rank).peak,
                    "at": _time(report.memory(rank).at),
                    "before": report.memory(rank).before,
                }
                for rank in report.ranks
            ],
            "columns": ["bytes", "begin", "end", "ranks", "cause", "name"],
            "allocations": allocations,
        },
        "operators": list(ops),
        "rank_sets": [list(each) for each in ranks],
        "causes": [_cause(each) for each in causes],
    }


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "line": cause.line,
        "modules": list(cause.modules),
        "op": cause.op,
        "pass": cause.phase,
    }


def _time(seconds: float) -> float:
    return round(seconds * 1e6, 1)
