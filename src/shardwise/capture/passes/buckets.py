"""The pass that merges reductions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from ...comm.group import all_reduce
from ..recorder import finish
from .memory import memory_of

aten = torch.ops.aten
_start: Any = all_reduce.__wrapped__  # type: ignore[attr-defined]
BUCKET = 25 << 20
"""The most bytes that one collective reduces, unless one tensor has more."""


def bucket_reductions(graph: fx.Graph) -> None:
    """Make one all-reduce of those that are under way at one time over one group, in one dtype and
    by one reduction. Each bucket takes its own size in memory while it is reduced."""
    for starts in _buckets(graph):
        _merge(graph, starts)


def _buckets(graph: fx.Graph) -> list[list[fx.Node]]:
    found: list[list[fx.Node]] = []
    running: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is finish:
            for key, starts in list(running.items()):
                if node.args[0] in starts:
                    found.append(running.pop(key))
        elif node.target is _start and _is_contiguous(node.args[1]):
            group, value, op = node.args
            key = id(group), value.meta["val"][2], str(op)
            starts = running.setdefault(key, [])
            if sum(map(_bytes, [*starts, node])) > BUCKET:
                found.append(starts)
                starts = running[key] = []
            starts.append(node)
    return [starts for starts in found if len(starts) > 1]


def _is_contiguous(value: Any) -> bool:
    shape, stride, _ = value.meta["val"]
    return bool(torch.empty_strided(shape, stride, device="meta").is_contiguous())


def _count(start: fx.Node) -> int:
    return prod(start.args[1].meta["val"][0])  # type: ignore[union-attr]


def _bytes(start: fx.Node) -> int:
    return _count(start) * start.args[1].meta["val"][2].itemsize  # type: ignore[union-attr, no-any-return]


def _merge(graph: fx.Graph, starts: Sequence[fx.Node]) -> None:
    """Copy the tensors into one, when the last is there, and back when the first is waited for."""
    group, _, op = starts[0].args
    values: list[Any] = [start.args[1] for start in starts]
    dtype, sizes = values[0].meta["val"][2], list(map(_count, starts))
    number = 1 + max(memory_of(node) or 0 for node in graph.nodes)
    memory = number, sum(sizes) * dtype.itemsize

    def add(target: Any, args: tuple[Any, ...], size: int = 0, owner: Any = memory) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["line"] = starts[0].meta.get("line", ("unknown", 0))
        if size:
            node.meta |= {"val": ((size,), (1,), dtype), "memory": owner}
        return node

    waits = [user for start in starts for user in start.users if user.target is finish]
    with graph.inserting_before(starts[-1]):
        flats = [
            add(aten.view.default, (value, [-1]), size, value.meta["memory"])
            for value, size in zip(values, sizes, strict=True)
        ]
        whole = add(aten.cat.default, (flats,), sum(sizes))
        merged = add(_start, (group, whole, op))
        merged.meta["calls"] = sum([start.meta.get("calls", ()) for start in starts], ())
    with graph.inserting_before(min(waits)):
        add(finish, (merged,))
        parts = add(aten.split_with_sizes.default, (whole, sizes))
        pieces = [add(operator.getitem, (parts, at), n) for at, n in enumerate(sizes)]
        add(aten._foreach_copy_.default, (flats, pieces))
    for node in (*waits, *starts):
        graph.erase_node(node)
