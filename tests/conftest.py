"""Settings for every test process, and what is said at the end of a run."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import settings

from . import tier

settings.register_profile("untimed", deadline=None)  # a loaded machine is no failure
settings.load_profile("untimed")
settings.register_profile("thorough", max_examples=20_000)  # make redistribute
torch.set_num_threads(1)  # tensors are tiny, and test processes share the cores


def pytest_configure(config: pytest.Config) -> None:
    tier.choose(quick="not thorough" in config.getoption("markexpr"))


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # numbers must not depend on which tests a process has run before


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """A process per core for directories; one for a file, and for tests that start their own."""
    return None if _is_whole_suite(config) else 0


def _is_whole_suite(config: pytest.Config) -> bool:
    named = [config.invocation_params.dir / name for name in config.args]
    return all(path.is_dir() and path.name != "process" for path in named)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test of many cases the quick tier runs a part, unless it was asked for by name."""
    if config.getoption("keyword") or not _is_whole_suite(config):
        return
    counts = Counter(_function(item) for item in items)
    left = [
        item
        for item in items
        if counts[_function(item)] > _MANY and not tier.is_tried(item.nodeid, _SHARE)
    ]
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]


_MANY, _SHARE = 8, 0.55


def _function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


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
