"""`make bench` runs, compares what it times with plain PyTorch, and hides nothing that is slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.bench import sides
from benchmarks.bench.page import page, table
from benchmarks.bench.timing import Row

ROOT = Path(__file__).parents[2]


def test_the_training_steps_are_timed_and_written(tmp_path: Path) -> None:
    file = tmp_path / "results.md"
    command = [sys.executable, "-m", "benchmarks.bench", "--quick", "--only", "step"]
    subprocess.run([*command, "--page", str(file)], cwd=ROOT, check=True, timeout=240)
    text = file.read_text()
    for case in ("MLP: backward", "MLP: whole", "GPT block: forward", "GPT block: whole"):
        assert f"| step | {case} |" in text
    assert (tmp_path / "charts" / "results-step.png").stat().st_size > 1000


def test_what_is_slower_than_pytorchs_is_on_top() -> None:
    rows = [
        Row("operator", "quick", "us", 1.0, 2.0),
        Row("operator", "alone", "us", 1.0, None, 1.0, "NotImplementedError"),
        Row("list", "slow", "us", 3.0, 1.5),
        Row("operator", "slower", "us", 9.0, 3.0),
        Row("memory", "left", "KiB", 5.0, 1.0, rated=False),
    ]
    names = [line.split(" | ")[1] for line in table(rows).splitlines()[2:]]
    assert names[:3] == ["slower", "slow", "quick"]
    assert set(names) == {row.name for row in rows}
    assert "| operator | 2 | 1 | 1.22 | 0.50 to 3.00 |" in page(rows, 0.0, [])


def test_wrong_values_are_not_timed() -> None:
    def wrong(side: sides.Side) -> object:
        return lambda: side.put(torch.full((4,), 1.0 if side.name == "plain" else 2.0))

    with pytest.raises(AssertionError, match="shardwise"):
        sides.check(wrong)
