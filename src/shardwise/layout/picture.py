"""The drawing of a layout: which ranks hold which part, as text, with colours, and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby, product
from operator import itemgetter
from typing import NamedTuple

from .geometry import Interval, all_coords
from .mesh import Coord, Topology
from .spec import DTensorSpec
from .split_dims import held_of

Intervals = tuple[Interval, ...]
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
_TURN = 137.5
"""Degrees between the hues of two shards: those of neighbours are far apart."""


class Panel(NamedTuple):
    """One drawing of two dims: rows are the shards of the first, columns those of the second.

    A cell has the number of its shard, and the ranks that hold it.
    """

    title: str
    columns: list[str]
    rows: list[str]
    cells: list[list[tuple[int, str]]]


def panels(spec: DTensorSpec) -> list[Panel]:
    """The drawings of a layout: of two dims, sharded ones first, for each shard of the others."""
    held = {coord: tuple(held_of(spec, coord)) for coord in all_coords(spec.topology.shape)}
    return panels_of(spec.topology, held, spec.partial)


def panels_of(
    topology: Topology, held: dict[Coord, tuple[Intervals, ...]], partial: Sequence[tuple[int, str]]
) -> list[Panel]:
    """The drawings of what each rank holds of each dim, with the axes that are Partial."""
    boxes: dict[tuple[Intervals, ...], list[Coord]] = {}
    for coord, box in held.items():
        boxes.setdefault(box, []).append(coord)
    sums = [(op, axis) for axis, op in partial if topology.shape[axis] > 1]
    pairs = enumerate(boxes.items())
    cells = {box: (number, _ranks(topology, sums, coords)) for number, (box, coords) in pairs}
    ndim = len(next(iter(boxes)))
    pieces = [sorted({box[dim] for box in boxes}) for dim in range(ndim)]
    cut = [dim for dim in range(ndim) if len(pieces[dim]) > 1]
    whole = [dim for dim in range(ndim) if dim not in cut]
    drawn = sorted([*cut, *whole][:2])
    rest = [dim for dim in cut if dim not in drawn]
    found = []
    for fixed in product(*[pieces[dim] for dim in rest]):
        at = dict(zip(rest, fixed, strict=True))
        part = {
            tuple(box[dim] for dim in drawn): cell
            for box, cell in cells.items()
            if all(box[dim] == piece for dim, piece in at.items())
        }
        title = [f"dim {dim} = {_text(piece)}" for dim, piece in at.items()]
        if drawn != [*range(len(drawn))] or rest:
            title += [
                f"{way}: dim {dim}" for way, dim in zip(("rows", "columns"), drawn, strict=False)
            ]
        found.append(_panel(", ".join(title), [pieces[dim] for dim in drawn], part))
    return found


def _panel(
    title: str,
    pieces: Sequence[Sequence[Intervals]],
    cells: dict[tuple[Intervals, ...], tuple[int, str]],
) -> Panel:
    rows, columns, *_ = [*pieces, [()], [()]]
    none = (-1, "-")
    lines = [
        [cells.get(tuple(piece for piece in (row, column) if piece), none) for column in columns]
        for row in rows
    ]
    return Panel(title, [_text(column) for column in columns], [_text(row) for row in rows], lines)


def _ranks(topology: Topology, partial: Sequence[tuple[str, int]], coords: Sequence[Coord]) -> str:
    """The ranks at some coordinates: replicas side by side, terms of a Partial in brackets."""
    alike = [(op, [axis for _, axis in axes]) for op, axes in groupby(partial, itemgetter(0))]

    def text(some: Sequence[Coord], left: Sequence[tuple[str, list[int]]]) -> str:
        if not left:
            return " ".join(str(topology.rank_of(coord)) for coord in some)
        (op, axes), *later = left
        terms: dict[tuple[int, ...], list[Coord]] = {}
        for coord in some:
            terms.setdefault(tuple(coord[axis] for axis in axes), []).append(coord)
        return f"{op}({', '.join(text(term, later) for term in terms.values())})"

    return text(coords, alike)


def _text(held: Intervals) -> str:
    texts = [f"{a}:{b}" for a, b in held]
    return ",".join(texts if len(texts) < 4 else [*texts[:2], "..", texts[-1]])


def as_text(found: Sequence[Panel], colours: bool = False) -> str:
    """Drawings as text, with `colours` in the markup of `rich`."""
    return "\n\n".join(_drawn(panel, colours) for panel in found)


def _drawn(panel: Panel, colours: bool) -> str:
    heads, names, cells = panel.columns, panel.rows, panel.cells
    widths = [
        max(len(head), *(len(line[index][1]) for line in cells)) for index, head in enumerate(heads)
    ]
    left = max(map(len, names))
    rule = " " * left + " +" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [panel.title] if panel.title else []
    if any(heads):
        titles = "   ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True))
        lines.append((" " * left + "  " + titles).rstrip())
    lines.append(rule)
    for name, line in zip(names, cells, strict=True):
        texts = [
            _coloured(number, text.ljust(width)) if colours else text.ljust(width)
            for (number, text), width in zip(line, widths, strict=True)
        ]
        lines += [f"{name.ljust(left)} | {' | '.join(texts)} |", rule]
    return "\n".join(lines)


def _coloured(number: int, text: str) -> str:
    colour = _COLOURS[number % len(_COLOURS)]
    return text if number < 0 else f"[black on {colour}]{text}[/]"


def as_html(found: Sequence[Panel]) -> str:
    """Drawings as HTML tables: each shard has a colour, and the ranks that hold it."""
    return "".join(_table(panel) for panel in found)


def _table(panel: Panel) -> str:
    title = f"<caption style='text-align:left'>{escape(panel.title)}</caption>"
    title = title if panel.title else ""
    heads = "".join(f"<th>{escape(text)}</th>" for text in ("", *panel.columns))
    rows = [
        f"<tr><th>{escape(name)}</th>{''.join(_cell(*cell) for cell in line)}</tr>"
        for name, line in zip(panel.rows, panel.cells, strict=True)
    ]
    style = "display:inline-table;border-collapse:separate;border-spacing:2px;margin-right:1em"
    return f"<table style='{style}'>{title}<tr>{heads}</tr>{''.join(rows)}</table>"


def _cell(number: int, text: str) -> str:
    colour = "transparent" if number < 0 else f"hsl({number * _TURN % 360:.0f} 70% 80%)"
    style = f"background:{colour};color:#222;padding:.5em 1em;text-align:center"
    return f"<td style='{style}'>{escape(text)}</td>"
