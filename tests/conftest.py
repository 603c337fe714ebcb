"""What is said at the end of a run: how many rows of rules were checked by brute force."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Add up what the tests recorded, also those that ran in other processes."""
    totals = {"rows": 0, "runs": 0}
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in report.user_properties:
            if name in totals:
                totals[name] += value
    if totals["rows"]:
        terminalreporter.write_line(
            f"{totals['rows']:,} rows of rules checked by brute force, in {totals['runs']:,} runs"
        )
