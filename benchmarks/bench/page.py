"""The page `benchmarks/results.md`: a table and its charts."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bench.timing import Row


def table(rows: Sequence[Row]) -> str:
    """What is slower than PyTorch's comes first; what has no ratio comes last."""
    lines = [
        "| | | Shardwise | `torch.distributed.tensor` | plain | ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in ordered(rows):
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        theirs = row.note or shown(row.torch, row.unit)
        cells = [row.group, row.name, shown(row.ours, row.unit), theirs, shown(row.plain, row.unit)]
        lines.append(f"| {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -1.0 if row.ratio is None else row.ratio, reverse=True)


def shown(value: float | None, unit: str) -> str:
    """A number with as many digits as tell something."""
    if value is None:
        return ""
    if unit == "us" and value >= 1e4:
        value, unit = value / 1e3, "ms"
    digits = 1 if abs(value) < 100 and value != int(value) else 0
    return f"{value:,.{digits}f} {unit}".strip()
