"""A layout as a small picture: which ranks hold which part of a tensor."""

from __future__ import annotations

from .errors import LayoutError
from .finer import held_of
from .geometry import Interval, all_coords
from .spec import DTensorSpec
from .wrapper import Wrapper

__all__ = ["picture"]

Intervals = tuple[Interval, ...]


def picture(tensor: Wrapper | DTensorSpec) -> str:
    """The first two dims of a tensor, cut as they are, with the ranks that hold each part.

    >>> import torch, shardwise
    >>> from shardwise import Replicate, Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2, 2))
    >>> x = shardwise.distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0), Replicate()])
    >>> print(picture(x))
         0:4
        +-----+
    0:3 | 0 1 |
        +-----+
    3:5 | 2 3 |
        +-----+
    """
    if not isinstance(tensor, Wrapper | DTensorSpec):
        raise LayoutError(
            f"picture: a DTensor or a DTensorSpec is needed, but got {type(tensor).__name__}."
        )
    spec = tensor if isinstance(tensor, DTensorSpec) else tensor._spec
    held: dict[tuple[Intervals, Intervals], list[int]] = {}
    for coord in all_coords(spec.topology.shape):
        box = (*held_of(spec, coord), ((0, 1),), ((0, 1),))[:2]
        held.setdefault((box[0], box[1]), []).append(spec.topology.rank_of(coord))
    rows = sorted({row for row, _ in held})
    columns = sorted({column for _, column in held})
    cells = [[" ".join(map(str, held.get((r, c), ["-"]))) for c in columns] for r in rows]
    join = " + " if spec.sums else " "
    cells = [[cell.replace(" ", join) for cell in line] for line in cells]
    heads = [_text(column) if spec.ndim > 1 else "" for column in columns]
    names = [_text(row) if spec.ndim > 0 else "" for row in rows]
    return _drawn(heads, names, cells)


def _text(held: Intervals) -> str:
    texts = [f"{a}:{b}" for a, b in held]
    return ",".join(texts if len(texts) < 4 else [*texts[:2], "..", texts[-1]])


def _drawn(heads: list[str], names: list[str], cells: list[list[str]]) -> str:
    widths = [
        max(len(head), *(len(line[index]) for line in cells)) for index, head in enumerate(heads)
    ]
    left = max(map(len, names))
    rule = " " * left + " +" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = []
    if any(heads):
        titles = "   ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True))
        lines.append((" " * left + "  " + titles).rstrip())
    lines.append(rule)
    for name, line in zip(names, cells, strict=True):
        row = " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines += [f"{name.ljust(left)} | {row} |", rule]
    return "\n".join(lines)
