"""The page `benchmarks/results.md`: a table and its charts."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bench.timing import Row


def table(rows: Sequence[Row]) -> str:
    """What is slower than PyTorch's comes first; what PyTorch does not have comes last."""
    lines = [
        "| | Shardwise | `torch.distributed.tensor` | plain | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in ordered(rows):
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        cells = [shown(value, row.unit) for value in (row.ours, row.torch, row.plain)]
        lines.append(f"| {row.name} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -1.0 if row.ratio is None else row.ratio, reverse=True)


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "us" and value >= 1e4:
        value, unit = value / 1e3, "ms"
    return f"{value:.1f} {unit}" if value < 100 else f"{value:,.0f} {unit}"
