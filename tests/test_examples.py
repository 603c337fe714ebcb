"""The examples run as they are: in one process, and those for torchrun on real processes too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .torchrun import torchrun

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
BY_NAME = {path.stem: path for path in EXAMPLES}


def alone(script: Path) -> str:
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_in_one_process(script: Path) -> None:
    assert alone(script)


@pytest.mark.parametrize("name", ["inplace", "per_rank_batch"])
def test_an_example_prints_the_same_on_processes(name: str) -> None:
    count = 2 if name == "inplace" else 4
    assert torchrun(BY_NAME[name], count) == alone(BY_NAME[name])


def test_the_demo_prints_the_same_losses_on_four_processes() -> None:
    """`make demo` and torchrun: one program, one answer."""
    here, there = (losses(text) for text in (alone(BY_NAME["demo"]), torchrun(BY_NAME["demo"], 4)))
    assert len(here) >= 5
    assert here == there


def losses(text: str) -> list[tuple[str, str, str]]:
    """Step, loss on a single device and loss on the mesh, as printed."""
    return re.findall(r"^ *(\d+) +(\d+\.\d+) +(\d+\.\d+) ", text, re.MULTILINE)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_read_in_one_sitting(script: Path) -> None:
    most = 150 if script.stem == "demo" else 80
    assert len(script.read_text().splitlines()) < most
