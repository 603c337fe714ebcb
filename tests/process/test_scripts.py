"""Examples, and scripts in the docs, under torchrun: they print what they print in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..test_docs import PAGES, Block, blocks, check_printed
from ..test_examples import EXAMPLES, losses, printed
from .torchrun import torchrun

_SCRIPTS = [
    (page, block) for page in PAGES for block in blocks(page) if block.mark.startswith("torchrun:")
]


@pytest.mark.parametrize(("name", "count"), [("inplace", 2), ("per_rank_batch", 4)])
def test_an_example_prints_the_same(name: str, count: int) -> None:
    assert torchrun(EXAMPLES[name], count) == printed(name)


def test_the_demo_prints_the_same_losses() -> None:
    assert losses(torchrun(EXAMPLES["demo"], 4)) == losses(printed("demo"))


@pytest.mark.parametrize(
    ("page", "block"), _SCRIPTS, ids=[f"{p.stem}:{b.line}" for p, b in _SCRIPTS]
)
def test_a_script_of_the_docs(page: Path, block: Block, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block.code)
    check_printed(page, block, torchrun(script, int(block.mark.removeprefix("torchrun:"))))
