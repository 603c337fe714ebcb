"""Run the benchmark: `python -m benchmarks.bench [--quick] [--only GROUP ...]`."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path

import torch
from benchmarks.bench import (
    first_calls,
    memory,
    moves,
    operators,
    processes,
    random_numbers,
    steps,
    virtual,
)
from benchmarks.bench.page import summary, table, write
from benchmarks.bench.timing import Row, Settings
from tqdm import tqdm

PAGE = Path(__file__).parents[1] / "results.md"
GROUPS = {
    "step": steps.jobs,
    "list": operators.list_jobs,
    "optimizer": operators.optimizer_jobs,
    "operator": operators.operator_jobs,
    "cold": first_calls.cold_jobs,
    "shape": first_calls.shape_jobs,
    "redistribute": moves.jobs,
    "processes": processes.jobs,
    "random": random_numbers.jobs,
    "virtual": virtual.jobs,
    "memory": memory.jobs,
}


def run(groups: list[str], settings: Settings) -> list[Row]:
    """The rows of these groups, with a bar that shows how far it is."""
    chosen = [item for group in groups for item in GROUPS[group](settings).items()]
    rows: list[Row] = []
    with tqdm(chosen, unit="case") as bar:
        for name, job in bar:
            bar.set_description(name)
            rows += job(settings)
    return rows


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute: fewer cases and turns")
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", default=[],
                        help="some groups alone: " + ", ".join(GROUPS))  # fmt: skip
    parser.add_argument("--page", type=Path, metavar="FILE",
                        help="write the page here; else a whole run writes benchmarks/results.md, "
                        "others print only")  # fmt: skip
    options = parser.parse_args(given)
    logging.getLogger("torch").setLevel(logging.ERROR)  # advice would tear the progress bar
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # small tensors: a second thread only adds noise
    load = os.getloadavg()[0]
    rows = run(options.only or list(GROUPS), Settings(options.quick))
    print(f"{table(rows)}\n\n{summary(rows)}")
    path = options.page or (None if options.quick or options.only else PAGE)
    if path is not None:
        write(path, rows, load)
        print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
