"""Every Python block of the README and the docs runs, in order, and prints what the page says.

A block fenced as `python` is run in this process, on virtual meshes; the blocks of a page share
their names. A `text` block right after it must be what it printed (`...` stands for anything).
A comment before a block changes that: `<!-- torchrun: 2 -->` runs it as a script of its own on two
processes, `<!-- not run: reason -->` leaves it out.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from .torchrun import torchrun

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*?) -->\n)?^```python\n(?P<code>.*?)^```\n"
    r"(?:\n?^```text\n(?P<printed>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code: where it stands, what it must print, and how it is run."""

    line: int
    code: str
    printed: str | None
    mark: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            text.count("\n", 0, found.start("code")),
            found["code"],
            found["printed"],
            found["mark"] or "",
        )
        for found in _FENCE.finditer(text)
    ]


def _checked(page: Path, block: Block, printed: str) -> None:
    if block.printed is not None:
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        same = doctest.OutputChecker().check_output(block.printed, printed, options)
        assert same, f"{page.name}:{block.line} printed\n{printed}\nbut says\n{block.printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    state = torch.get_rng_state()
    try:
        for block in blocks(page):
            if block.mark.startswith("not run:"):
                assert block.mark.removeprefix("not run:").strip(), f"{page}:{block.line}: why?"
                continue
            if block.mark.startswith("torchrun:"):
                script = tmp_path / f"line{block.line}.py"
                script.write_text(block.code)
                count = int(block.mark.removeprefix("torchrun:"))
                _checked(page, block, torchrun(script, count))
                continue
            code = compile("\n" * block.line + block.code, str(page), "exec")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(code, names)
            _checked(page, block, output.getvalue())
    finally:
        torch.set_rng_state(state)


def test_every_mark_is_known() -> None:
    marks = [block.mark for page in PAGES for block in blocks(page) if block.mark]
    assert all(mark.startswith(("torchrun: ", "not run: ")) for mark in marks), marks


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
