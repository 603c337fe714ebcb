"""Settings for every test process, and what is said at the end of a run."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings

settings.register_profile("thorough", max_examples=20_000)  # make redistribute
torch.set_num_threads(1)  # tensors are tiny, and test processes share the cores


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
