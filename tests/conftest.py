"""Settings for every test process, and what is said at the end of a run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import settings

from . import tier

settings.register_profile("thorough", max_examples=20_000)  # make redistribute
torch.set_num_threads(1)  # tensors are tiny, and test processes share the cores


def pytest_configure(config: pytest.Config) -> None:
    tier.choose(quick="not thorough" in config.getoption("markexpr"))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """A process per core for directories; one for a file, and for tests that start their own."""
    named = [config.invocation_params.dir / name for name in config.args]
    return None if all(path.is_dir() and path.name != "process" for path in named) else 0


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and samples stay: nobody needs to look through them again


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many rows of rules were checked by brute force, in whichever process."""
    totals = {"rows": 0, "runs": 0}
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in report.user_properties:
            if name in totals:
                totals[name] += value
    if totals["rows"]:
        terminalreporter.write_line(
            f"{totals['rows']:,} rows of rules checked by brute force, in {totals['runs']:,} runs"
        )
