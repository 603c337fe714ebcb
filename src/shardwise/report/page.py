"""A report as one HTML page, with its data, style and script inside of it."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..layout.geometry import all_coords
from ..layout.layout import Layout
from ..layout.mesh import Coord
from ..layout.picture import Intervals, as_html, panels_of

if TYPE_CHECKING:
    from .step_report import StepReport

_TEMPLATE = Path(__file__).with_name("page.html")
_DRAWN = 64
"""Layouts of meshes with more ranks are not drawn."""


def page(report: StepReport) -> str:
    """The text of the page."""
    data = report.to_dict()
    here = f"{Path.cwd()}/"
    data["lines"] = {each["line"]: each["line"].removeprefix(here) for each in data["causes"]}
    data["pictures"] = {
        layout.text(move.dtype): _picture(layout)
        for one in report.collectives
        for move in one.moves
        for layout in (move.src, move.dst)
    }
    # A text of the user must not end the script, nor begin a comment in it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = _TEMPLATE.read_text(encoding="utf-8")
    return template.replace("__TITLE__", escape(report.name)).replace("__DATA__", text)


def _picture(layout: Layout) -> str:
    where = layout.topology
    coords = all_coords(where.shape)
    if len(coords) > _DRAWN:
        return ""
    held: dict[Coord, tuple[Intervals, ...]] = {
        coord: tuple((each,) for each in layout.box(coord)) for coord in coords
    }
    return as_html(panels_of(where, held, layout.partial))
