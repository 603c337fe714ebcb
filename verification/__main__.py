"""Run PyTorch's operator database: `python -m verification`. Stops and goes on where it stopped."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

import shardwise

from .entry import check_index, entries, entry_name
from .page import write_page


def _known(path: Path, sources: str) -> dict[str, Any]:
    """What a run of these sources has found, and left to be gone on with."""
    if not path.exists():
        return {}
    known = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # it was being written when the run was stopped
            continue
        if row.get("sources") == sources:
            known[row["name"]] = row
    return known


def _sources(most: int | None, *modes: bool) -> str:
    """A digest of what is run: the library, this harness, PyTorch, how many samples, the mode."""
    digest = hashlib.sha256(f"{torch.__version__} {most} {modes}".encode())
    for package in (shardwise, sys.modules[check_index.__module__.split(".")[0]]):
        assert package.__file__ is not None
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _progress(done: int, total: int, start: float, name: str) -> None:
    width = 30
    filled = width * done // max(total, 1)
    bar = "#" * filled + "." * (width - filled)
    line = f"[{bar}] {done}/{total} {time.time() - start:6.0f} s  {name}"
    if sys.stderr.isatty():
        print(f"\r{line[:110]:110}", end="", file=sys.stderr, flush=True)
    elif done % 50 == 0 or done == total:
        print(line, file=sys.stderr, flush=True)


def summary(rows: list[dict[str, Any]]) -> str:
    """The table at the end."""
    checked = [row for row in rows if not row["left_out"]]
    lines = [f"{len(rows)} entries, {len(checked)} checked, {len(rows) - len(checked)} left out"]
    for stage in ("forward", "backward"):
        has = [row for row in checked if row[stage]]
        right = [row for row in has if set(row[stage]) == {"right"}]
        kinds = {k: sum(k in row[stage] for row in has) for k in ("wrong", "error", "time")}
        calls = sum(sum(row[stage].values()) for row in has)
        share = 100 * len(right) / max(len(has), 1)
        lines.append(
            f"{stage:9} {len(right)}/{len(has)} entries right ({share:.1f} %), {calls} calls; "
            + ", ".join(f"{count} with {kind}" for kind, count in kinds.items())
        )
    rounded = sum(row["rounded"] for row in checked)
    lines.append(f"{rounded} calls differ by rounding that is plain PyTorch's own")
    others = sum(row["of_subclass"] for row in checked)
    lines.append(f"{others} gradients are those of PyTorch's formula for subclasses of tensors")
    fallback = sum("fallback" in row["tiers"] for row in checked)
    share = 100 * fallback / max(len(checked), 1)
    lines.append(f"replicate fallback when dim 0 is sharded: {share:.1f} % of entries")
    for row in checked:
        if row["examples"]:
            lines.append(f"  {row['name']}: {row['forward']} {row['backward']}")
            lines += [f"      {kind}: {text}" for kind, text in row["examples"].items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verification")
    parser.add_argument("--out", type=Path, default=Path("verification/results.jsonl"))
    parser.add_argument("--page", type=Path, help="write the page of operators here")
    parser.add_argument("--most", type=int, help="at most so many samples an entry")
    parser.add_argument("--sample", type=int, help="only so many entries, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=300, help="CPU time of an entry")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--inference", action="store_true", help="forward, in inference mode")
    parser.add_argument("--strides", action="store_true", help="check strides after each operator")
    parser.add_argument("--fresh", action="store_true", help="go on with nothing")
    parser.add_argument("names", nargs="*", help="only these entries")
    options = parser.parse_args()
    if options.fresh:
        options.out.unlink(missing_ok=True)
    names = [entry_name(entry) for entry in entries()]
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"no entry is called {', '.join(unknown)}")
    chosen = [i for i, name in enumerate(names) if not options.names or name in options.names]
    if options.sample is not None:
        chosen = sorted(
            random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
        )
    sources = _sources(options.most, options.inference, options.strides)
    known = _known(options.out, sources)
    missing = [i for i in chosen if names[i] not in known]
    modes = options.inference, options.strides
    tasks = [(i, options.most, options.seconds, *modes) for i in missing]
    start = time.time()
    context = multiprocessing.get_context("spawn")
    cut = options.out.exists() and not options.out.read_text().endswith("\n")
    file = options.out.open("a")
    file.write("\n" if cut else "")
    pool = ProcessPoolExecutor(options.workers, context)
    try:
        waiting = [pool.submit(check_index, *task) for task in tasks]
        for done, finished in enumerate(as_completed(waiting), 1):
            row = {**finished.result(), "sources": sources}
            known[row["name"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            _progress(done, len(tasks), start, row["name"])
    except KeyboardInterrupt:
        left = sum(names[i] not in known for i in chosen)
        print(f"\nstopped; {left} entries are left, the same command goes on", file=sys.stderr)
        return 130
    finally:
        pool.shutdown(cancel_futures=True)
        file.close()
    rows = [known[names[i]] for i in chosen]
    text = summary(rows)
    print("\n" + text)
    if options.page is not None:
        many = (
            "every sample" if options.most is None else f"at most {options.most} samples an entry"
        )
        head = [line for line in text.splitlines() if not line.startswith(" ")]
        write_page(options.page, rows, "\n".join([many, *head]))
    bad = any("wrong" in row[stage] for row in rows for stage in ("forward", "backward"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
