"""Examples, and scripts in the docs, on processes: they print what they print in one process.

One runs under torchrun itself. The others are forked, which saves the imports.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..core.test_docs import PAGES, Block, blocks, check_printed
from ..core.test_examples import EXAMPLES, losses, printed
from .harness import run_script
from .torchrun import torchrun

_SCRIPTS = [
    (page, block) for page in PAGES for block in blocks(page) if block.mark.startswith("torchrun:")
]


def forked(script: Path, count: int) -> str:
    """What a script prints on `count` processes; an error if it fails, hangs or warns."""
    ends = run_script(script, count)
    assert all(end.code == 0 and not end.err for end in ends), ends
    return "".join(end.out for end in ends)


def test_an_example_prints_the_same_under_torchrun() -> None:
    assert torchrun(EXAMPLES["inplace"], 2) == printed("inplace")


def test_an_example_prints_the_same() -> None:
    assert forked(EXAMPLES["per_rank_batch"], 4) == printed("per_rank_batch")


@pytest.mark.parametrize(("name", "count"), [("conv", 4), ("moe", 8), ("long_context", 4)])
def test_an_example_prints_the_same_losses(name: str, count: int) -> None:
    assert losses(forked(EXAMPLES[name], count)) == losses(printed(name))


def test_the_demo_prints_the_same_losses_under_torchrun() -> None:
    text = torchrun(EXAMPLES["train_gpt"], 4, "--steps", "4")
    assert losses(text) == losses(printed("train_gpt"))


@pytest.mark.parametrize(
    ("page", "block"), _SCRIPTS, ids=[f"{p.stem}:{b.line}" for p, b in _SCRIPTS]
)
def test_a_script_of_the_docs(page: Path, block: Block, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block.code)
    check_printed(page, block, forked(script, int(block.mark.removeprefix("torchrun:"))))
