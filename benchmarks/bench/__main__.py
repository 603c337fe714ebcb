"""Run the benchmark: `python -m benchmarks.bench [--quick] [--only GROUP ...]`."""

from __future__ import annotations

import argparse

import torch
from benchmarks.bench import first_calls, memory, operators, steps, virtual
from benchmarks.bench.page import table
from benchmarks.bench.timing import Job, Row, Settings
from tqdm import tqdm

GROUPS = {
    "step": steps.jobs,
    "list": operators.list_jobs,
    "optimizer": operators.optimizer_jobs,
    "operator": operators.operator_jobs,
    "cold": first_calls.cold_jobs,
    "shape": first_calls.shape_jobs,
    "virtual": virtual.jobs,
    "memory": memory.jobs,
}


def run(groups: list[str], settings: Settings) -> list[Row]:
    """The rows of these groups, with a bar that shows how far it is."""
    chosen: list[tuple[str, Job]] = [item for group in groups for item in GROUPS[group]().items()]
    rows: list[Row] = []
    with tqdm(chosen, unit="case") as bar:
        for name, job in bar:
            bar.set_description(name)
            rows += job(settings)
    return rows


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about a minute, less precise")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), metavar="GROUP", default=[],
                        help="some groups alone: " + ", ".join(GROUPS))  # fmt: skip
    options = parser.parse_args(given)
    torch.set_num_threads(1)  # small tensors: a second thread only adds noise
    rows = run(options.only or list(GROUPS), Settings(options.quick))
    print(table(rows))


if __name__ == "__main__":
    main()
