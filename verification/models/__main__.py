"""Run whole models: `python -m verification.models`. Stops and goes on where it stopped."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .cases import BY_DIM_0, OTHERS, causal_types
from .compare import check
from .dtensor import BESIDE, check_beside
from .examples import run_example
from .files import FILES, check_files, with_files
from .page import summary, write_page

Row = dict[str, Any]
_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("verification/models.jsonl"))
    parser.add_argument("--page", type=Path, help="write this page")
    parser.add_argument("--only", nargs="*", help="these models, and show why they fail")
    parser.add_argument("--again", nargs="*", default=[], help="forget rows with these verdicts")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2)))
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each model")
    parser.add_argument("--examples", nargs="*", default=[], help="then run these scripts")
    given = parser.parse_args()
    names = [*OTHERS, *causal_types()]
    names = given.only or names + [name + BY_DIM_0 for name in names]
    rows = {} if given.only else _known(given.out, given.again)
    torch.set_num_threads(1)
    _import_all()
    todo: list[tuple[str, Callable[[str], Row]]] = [
        (name, check_files if name.startswith(FILES) else check) for name in names
    ]
    if not given.only:
        todo += [(FILES + name, check_files) for name in with_files()]
        todo += [(f"dtensor {name}", check_beside) for name in BESIDE]
    todo = [(name, work) for name, work in todo if name not in rows]
    for row in tqdm(_each(todo, given.jobs, given.timeout), total=len(todo)):
        rows[row["name"]] = row
        if given.only:
            print(row.pop("trace", ""), "\n", json.dumps(row, indent=1))
        else:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(summary(list(rows.values())))
    if given.page:
        write_page(given.page, list(rows.values()))
    for example in given.examples:
        run_example(example)


def _known(path: Path, again: list[str]) -> dict[str, Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {
        row["name"]: row for row in rows if row["verdict"] not in again and row["name"] not in again
    }


def _import_all() -> None:
    """What all models need, once: they run in forks of this process."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    _import_torchvision()
    import timm  # noqa: F401
    import transformers.modeling_utils  # noqa: F401


def _import_torchvision() -> None:
    """timm imports torchvision. If its compiled operators were made for another build of torch, as
    with a torch for CPUs only, their names are declared; no model here calls them."""
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        forward = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
        for name in ("nms", "qnms", *forward, *[f"_{each}_backward" for each in forward]):
            _DECLARED.define(f"{name}(Tensor input) -> Tensor")
        import torchvision  # noqa: F401


def _each(todo: list[tuple[str, Callable[[str], Row]]], jobs: int, seconds: float) -> Iterator[Row]:
    """Rows as they come. Each model has a process of its own, that is ended after some seconds."""
    context = multiprocessing.get_context("fork")
    running: dict[Any, tuple[str, Any, float]] = {}
    todo = todo[::-1]
    while todo or running:
        while todo and len(running) < jobs:
            name, work = todo.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(work, name, there))
            process.start()
            there.close()
            running[here] = name, process, time.time()
        for pipe in wait(list(running), timeout=1):
            name, process, start = running.pop(pipe)
            try:
                row = pipe.recv()
            except EOFError:
                process.join()
                row = {"verdict": "error", "why": f"the process ended with {process.exitcode}"}
            process.join()
            yield {"name": name} | row | {"all_seconds": round(time.time() - start, 1)}
        for pipe, (name, process, start) in list(running.items()):
            if time.time() - start > seconds:
                del running[pipe]
                process.kill()
                process.join()
                yield {"name": name, "verdict": "timeout", "why": f"over {seconds:.0f} s"}


def _child(work: Callable[[str], Row], name: str, pipe: Connection) -> None:
    pipe.send(work(name.removeprefix("dtensor ")))
    pipe.close()


if __name__ == "__main__":
    main()
