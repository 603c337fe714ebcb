"""A plan as a table: parameters, shapes, layouts, bytes per rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .names import common_name, common_names, generic_name
from .plan import Entry, Plan


def plan_table(plan: Plan) -> str:
    """The table, a line of totals, the parameters that are whole because nobody named them, and
    the notes. Layers that are alike are one line."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in plan.entries:
        if not entry.is_buffer or entry.spec.is_sharded():
            key = generic_name(entry.name), str(list(entry.spec.shape)), _layout(entry)
            groups.setdefault(key, []).append(entry)
    lines = [("parameter", "shape", "layout", "bytes per rank")]
    for (_, shape, layout), alike in groups.items():
        count = f"{len(alike)} x " if len(alike) > 1 else ""
        size = sum(entry.bytes_per_rank for entry in alike)
        name = common_name([entry.name for entry in alike])
        lines.append((name, count + shape, layout, readable_bytes(size)))
    parts = [_columns(lines), _totals(plan)]
    if plan.unnamed:
        names = ", ".join(common_names(plan.unnamed))
        parts.append(f"replicated because no pattern names them: {names}")
    parts += [f"note: {text}" for text in common_names(plan.notes)]
    return "\n".join(parts)


def _layout(entry: Entry) -> str:
    spec = entry.spec
    pairs = zip(spec.topology.names, spec.placements, strict=True)
    return ", ".join(f"{a}: {p!r}" for a, p in pairs if not p.is_replicate()) or "replicated"


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for *left, last in lines:
        cells = [cell.ljust(width) for cell, width in zip(left, widths, strict=False)]
        texts.append("  ".join([*cells, last.rjust(widths[-1])]))
    texts.insert(1, "-" * max(map(len, texts)))
    return "\n".join(texts)


def _totals(plan: Plan) -> str:
    own = [entry for entry in plan.entries if not entry.is_buffer]
    sizes = [prod(entry.spec.shape) for entry in own]
    whole = sum(n for n, entry in zip(sizes, own, strict=True) if not entry.spec.is_sharded())
    share = 100 * whole / max(sum(sizes), 1)
    everything = sum(n * entry.spec.dtype.itemsize for n, entry in zip(sizes, own, strict=True))
    here = sum(entry.bytes_per_rank for entry in own)
    return (
        f"{len(own)} parameters of {readable_bytes(everything)}, {readable_bytes(here)} per rank "
        f"on {plan.mesh!r}; {share:.1f} % of the elements are whole on every rank"
    )


def readable_bytes(count: float) -> str:
    """A number of bytes with a unit: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
