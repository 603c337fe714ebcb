"""A table that prints itself: what reports return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of values under the names of their columns; `print` aligns them.

    >>> table = Table(("op", "bytes"), (("mm", 64), ("add", 8)))
    >>> table
    op   bytes
    mm      64
    add      8
    >>> [row["bytes"] for row in table]
    [64, 8]
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows, each as a dict by column."""
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        right = [
            any(isinstance(row[i], int | float) for row in self.rows)
            for i in range(len(self.columns))
        ]
        texts = [[_text(value) for value in row] for row in (self.columns, *self.rows)]
        wide = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = [
            "  ".join(
                text.rjust(size) if to_right else text.ljust(size)
                for text, size, to_right in zip(row, wide, right, strict=True)
            ).rstrip()
            for row in texts
        ]
        return "\n".join(lines)

    __repr__ = __str__


def _text(value: Any) -> str:
    """A value in its column: of many, the first three."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if not isinstance(value, tuple):
        return str(value)
    more = len(value) - 3
    texts = value if more < 2 else (*value[:3], f"and {more} more")
    return ", ".join(map(str, texts))
