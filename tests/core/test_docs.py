"""Every Python block of the README and the docs runs, in order, and prints what the page says.

A block fenced as `python` is run in this process, on virtual meshes; the blocks of a page share
their names. A `text` block right after it must be what it printed (`...` stands for anything).
A comment before a block changes that: `<!-- torchrun: 2 -->` makes it a script of its own that
`tests/process` runs on two processes, `<!-- not run: reason -->` leaves it out.
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

import shardwise

ROOT = Path(__file__).parents[2]
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


def check_printed(page: Path, block: Block, printed: str) -> None:
    """An error if a block printed something else than its page says."""
    if block.printed is not None:
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        same = doctest.OutputChecker().check_output(block.printed, printed, options)
        assert same, f"{page.name}:{block.line} printed\n{printed}\nbut says\n{block.printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    state = torch.get_rng_state()
    try:
        for block in blocks(page):
            if block.mark:
                continue
            code = compile("\n" * block.line + block.code, str(page), "exec")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(code, names)
            check_printed(page, block, output.getvalue())
    finally:
        torch.set_rng_state(state)


def test_every_mark_is_known() -> None:
    marks = [block.mark for page in PAGES for block in blocks(page) if block.mark]
    assert all(re.fullmatch(r"torchrun: \d+|not run: .+", mark) for mark in marks), marks


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_in_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    paths = re.findall(r"^::: shardwise\.([\w.]+)", page, re.MULTILINE)
    shown = {path.rpartition(".")[2] for path in paths}
    modules = {"debug", "errors", "experimental", "parallel", "random", "register"}
    assert set(shardwise.__all__) - modules - shown == set()
    assert {path for path in paths if "." not in path} <= set(shardwise.__all__) | modules
