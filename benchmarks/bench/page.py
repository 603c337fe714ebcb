"""The page `benchmarks/results.md`: a summary, charts, and a table with the slow ones on top."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import geometric_mean

import torch
from benchmarks.bench.charts import draw
from benchmarks.bench.timing import Row

HOW = """\
How it is measured:

- Each case runs on Shardwise, on PyTorch's DTensor and on plain tensors in one process, in turns,
  on one thread. A time is that of the processor, the least of all turns; between processes it is
  that of the clock. A ratio is Shardwise's time divided by that of
  `torch.distributed.tensor`: below 1 is faster.
- The process group is `fake` with 16 ranks: its collectives do nothing, so times are those of the
  host. `processes` are real ones (gloo). `virtual` has all ranks in one process, beside PyTorch's
  `LocalTensorMode`.
- Both libraries run the same program in the same layouts. Before a case is timed its values are
  compared with those of plain tensors: Shardwise's on a virtual mesh, PyTorch's under
  `LocalTensorMode`.
- Steps are written as users write them. `MLP` is 8 linear layers with data parallelism: the batch
  is sharded, parameters are replicated. `GPT block` has sharded heads and a sharded hidden layer
  (tensor parallelism); both programs `redistribute` the results of its two row-parallel
  projections to replicated. Attention is written out, because PyTorch's DTensor has no rule for
  the fused one on CPU. So is the loss, because its gradient of `mse_loss` on sharded rows is too
  large by the number of ranks.
- After `backward()` Shardwise's `.grad` has the layout of its leaf. PyTorch's is Partial where each
  rank has a part of the sum; its program reduces it by `redistribute`, which counts as `backward`.
  Both end with equal gradients in the leaf's layout, which is checked.
- On CPU `S0 to S1` of PyTorch's DTensor is an all-gather and a cut: less work for the host, more
  bytes.
- `clip_grad_norm_` is called without an argument that chooses how.
- `new shape` runs layer_norm, linear, gelu, linear, add, relu with eight batch sizes in a row that
  were not met before, and with these sizes again. `warm` is the least of many calls of one size.
  `first ...` calls are on sizes that were not met before."""


def page(rows: Sequence[Row], load: float, charts: Sequence[str]) -> str:
    """The text of the page."""
    pictures = "\n".join(f"![{Path(name).stem}]({name})" for name in charts)
    return "\n\n".join(
        [
            "# Times beside `torch.distributed.tensor`",
            f"Written by `make bench`. {about(load)}",
            summary(rows),
            pictures,
            HOW,
            "## All cases\n\nWhat is slower than PyTorch's comes first.",
            table(rows),
        ]
    ) + "\n"  # fmt: skip


def about(load: float) -> str:
    """What was measured where."""
    return (
        f"{date.today()}, commit {commit()}, PyTorch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()} with "
        f"{os.cpu_count()} cores. Load of the machine before it began: {load:.1f}."
    )


def commit() -> str:
    """The commit of the checkout, and whether its sources are changed."""
    try:
        found = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "src"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found} with changes" if changed.strip() else found


def summary(rows: Sequence[Row]) -> str:
    """The ratios of each group."""
    lines = [
        "| group | cases | slower than PyTorch's | geometric mean of the ratios | least to most |",
        "|---|---:|---:|---:|---|",
    ]
    for group in dict.fromkeys(row.group for row in rows):
        found = [row.ratio for row in rows if row.group == group and row.ratio is not None]
        if found:
            slower = sum(each > 1.005 for each in found)
            lines.append(
                f"| {group} | {len(found)} | {slower} | {geometric_mean(found):.2f} "
                f"| {min(found):.2f} to {max(found):.2f} |"
            )
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """What is slower than PyTorch's comes first; what has no ratio comes last."""
    lines = [
        "| | | Shardwise | `torch.distributed.tensor` | plain | ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in ordered(rows):
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        theirs = f"{shown(row.torch, row.unit)} {row.note}".strip()
        cells = [row.group, row.name, shown(row.ours, row.unit), theirs, shown(row.plain, row.unit)]
        lines.append(f"| {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -1.0 if row.ratio is None else row.ratio, reverse=True)


def shown(value: float | None, unit: str) -> str:
    """A number with as many digits as tell something."""
    if value is None:
        return ""
    if unit == "us" and value >= 1e4:
        value, unit = value / 1e3, "ms"
    digits = 1 if abs(value) < 100 and value != int(value) else 0
    return f"{value:,.{digits}f} {unit}".strip()


def write(path: Path, rows: Sequence[Row], load: float) -> None:
    """Write the page and its charts, which are beside it."""
    folder = path.parent / "charts"
    charts = [f"charts/{file.name}" for file in draw(folder, path.stem, rows)]
    path.write_text(page(rows, load, charts))
