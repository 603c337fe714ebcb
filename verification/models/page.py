"""The page of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]


def summary(rows: list[Row]) -> str:
    counted: dict[str, int] = {}
    for row in rows:
        counted[row["verdict"]] = counted.get(row["verdict"], 0) + 1
    return ", ".join(f"{kind}: {count}" for kind, count in sorted(counted.items()))


def write_page(path: Path, rows: list[Row]) -> None:
    pass
