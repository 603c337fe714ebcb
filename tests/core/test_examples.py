"""The examples run as they are, in one process. `tests/process` runs some under torchrun too."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch

EXAMPLES = {path.stem: path for path in (Path(__file__).parents[2] / "examples").glob("*.py")}

LONG = {"dropout"}  # seconds
_thorough = pytest.mark.thorough


@cache
def printed(name: str) -> str:
    """What an example prints in one process."""
    output = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(output):
        runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    return output.getvalue()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=_thorough if name in LONG else ()) for name in sorted(EXAMPLES)],
)
def test_an_example_runs_in_one_process(name: str) -> None:
    assert printed(name)


def test_the_demo_prints_the_loss_beside_that_of_one_device() -> None:
    text = printed("demo")
    found = losses(text)
    assert len(found) >= 5
    assert all(single == meshed for _, single, meshed in found)
    assert float(found[-1][1]) < float(found[0][1])
    assert "all_reduce" in text


def losses(text: str) -> list[tuple[str, str, str]]:
    """Step, loss on a single device and loss on the mesh, as the demo prints them."""
    return re.findall(r"^ *(\d+) +(\d+\.\d+) +(\d+\.\d+) ", text, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_can_be_read_in_one_sitting(name: str) -> None:
    most = 150 if name == "demo" else 80
    assert len(EXAMPLES[name].read_text().splitlines()) < most
