"""Charts of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from benchmarks.bench.timing import Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, THEIRS, PLAIN = "#1f6f8b", "#c8553d", "#a0a0a0"
SIDES = {"plain": PLAIN, "torch": THEIRS, "ours": OURS}
LABELS = {"plain": "plain", "torch": "torch.distributed.tensor", "ours": "Shardwise"}
Chart = Callable[[Sequence[Row]], Any]


def draw(folder: Path, prefix: str, rows: Sequence[Row]) -> list[Path]:
    """Write each chart that there are rows for; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, chart in CHARTS.items():
        figure = chart(rows)
        if figure is not None:
            files.append(folder / f"{prefix}-{name}.png")
            figure.savefig(files[-1], dpi=110, metadata={"Software": None})
            plt.close(figure)
    return files


def steps(rows: Sequence[Row]) -> Any:
    """Bars of the steps, stacked by part."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.group == "step":
            model, part = row.name.split(": ")
            found.setdefault(model, {})[part] = row
    if not found:
        return None
    figure, axes = plt.subplots(
        1, len(found), figsize=(9, 3.6), layout="constrained", squeeze=False
    )
    for axis, (model, parts) in zip(axes[0], found.items(), strict=True):
        base = [0.0] * len(SIDES)
        for part, row in parts.items():
            if part != "whole":
                values = [(getattr(row, side) or 0.0) / 1e3 for side in SIDES]
                axis.bar(list(LABELS.values()), values, bottom=base, label=part)
                base = [a + b for a, b in zip(base, values, strict=True)]
        axis.set(title=f"{model}, training step", ylabel="ms on the host")
        axis.tick_params(axis="x", labelsize=8)
    axes[0][0].legend(fontsize=8)
    return figure


def ratios(rows: Sequence[Row]) -> Any:
    """Ratios of the warm cases, slow ones on top."""
    kinds = "step", "list", "optimizer", "operator"
    rated = [row for row in rows if row.group in kinds and row.ratio is not None]
    if not rated:
        return None
    rated.sort(key=lambda row: row.ratio or 0.0)
    figure, axis = plt.subplots(figsize=(9, 1 + 0.2 * len(rated)), layout="constrained")
    values = [row.ratio or 0.0 for row in rated]
    colors = [THEIRS if value > 1 else OURS for value in values]
    axis.barh([row.name for row in rated], [value - 1 for value in values], left=1, color=colors)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xscale("log")
    ticks = [tick for tick in (0.25, 0.5, 0.7, 1, 1.5, 2, 4, 8) if tick <= 1.2 * max(values)]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("time of Shardwise / time of torch.distributed.tensor")
    axis.tick_params(axis="y", labelsize=7)
    axis.margins(y=0.01)
    return figure


def first_calls(rows: Sequence[Row]) -> Any:
    """First calls by the number of axes of the mesh."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.group == "cold":
            call, axes = row.name.split(", ")
            found.setdefault(call, {})[int(axes[0])] = row
    if not found:
        return None
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for (call, by_axes), style in zip(found.items(), ("-", "--", ":", "-."), strict=False):
        for side in ("torch", "ours"):
            values = [getattr(row, side) / 1e3 for row in by_axes.values()]
            axis.plot(list(by_axes), values, style, color=SIDES[side], marker="o", markersize=3,
                      label=f"{call.removeprefix('first ')}, {LABELS[side]}")  # fmt: skip
    axis.set_yscale("log")
    axis.set_xticks(sorted({axes for by_axes in found.values() for axes in by_axes}))
    axis.set(xlabel="axes of the mesh", ylabel="ms", title="First call")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def virtual(rows: Sequence[Row]) -> Any:
    """All ranks in one process."""
    found = [row for row in rows if row.group == "virtual"]
    if not found:
        return None
    figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
    for at, side in enumerate(("torch", "ours")):
        places = [place + 0.4 * at for place in range(len(found))]
        values = [getattr(row, side) / 1e3 for row in found]
        label = "LocalTensorMode of PyTorch" if side == "torch" else "Shardwise"
        bars = axis.barh(places, values, 0.4, color=SIDES[side], label=label)
        axis.bar_label(
            bars,
            [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values],
            fontsize=7,
            padding=2,
        )
    names = [row.name.removesuffix(" in one process") for row in found]
    axis.set_yticks([place + 0.2 for place in range(len(found))], names, fontsize=8)
    axis.set_xscale("log")
    axis.margins(x=0.1)
    axis.set(xlabel="ms", title="All ranks in one process")
    axis.legend(fontsize=8)
    return figure


CHARTS: dict[str, Chart] = {
    "step": steps,
    "ratios": ratios,
    "first-calls": first_calls,
    "virtual": virtual,
}
