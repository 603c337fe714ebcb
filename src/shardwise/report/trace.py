"""A report as a trace for Perfetto and chrome://tracing: one process for each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..tools.causes import Cause

if TYPE_CHECKING:
    from .step_report import StepReport

_COMPUTE, _COMMUNICATION = 1, 2


def trace(report: StepReport) -> str:
    """The trace as JSON: local calls, collectives and the memory of each rank."""
    events = [event for rank in report.ranks for event in _events(report, rank)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(report: StepReport, rank: int) -> Iterator[dict[str, Any]]:
    yield _name("process_name", rank, 0, f"rank {rank}")
    yield _name("thread_name", rank, _COMPUTE, "compute")
    yield _name("thread_name", rank, _COMMUNICATION, "communication")
    for call in report.calls:
        if rank in call.ranks:
            yield _span(call.op, rank, _COMPUTE, call.begin, call.end, _details(call.cause))
    for one in report.collectives:
        more = {
            "axes": one.axis,
            "bytes": one.bytes,
            "price (us)": one.price,
            "moves": [str(move) for move in one.moves],
        }
        details = more | _details(one.cause)
        yield _span(one.kind, rank, _COMMUNICATION, one.begin, one.end, details)
    for time, held in report.memory(rank).curve:
        yield {
            "ph": "C",
            "name": "memory",
            "pid": rank,
            "ts": time * 1e6,
            "args": {"bytes": held},
        }


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _span(
    name: str, rank: int, thread: int, begin: float, end: float, details: dict[str, Any]
) -> dict[str, Any]:
    span = {"ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": details}
    return {"ph": "X", "name": name, "pid": rank, "tid": thread} | span


def _details(cause: Cause) -> dict[str, Any]:
    return {
        "operator": cause.op,
        "line": cause.line,
        "module": cause.module,
        "pass": cause.phase,
    }
