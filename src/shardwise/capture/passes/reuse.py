"""The pass that lets results take memory that is free."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from ..._torch import OpOverload
from .memory import Lifetimes, changes_views, memory_of, shows

aten = torch.ops.aten
_SMALL = 1 << 10
"""Memory of fewer bytes is not worth it."""


def reuse_buffers(graph: fx.Graph) -> None:
    """Write the results of pointwise operations into an operand that nobody needs any more."""
    if changes_views(graph):
        return
    nodes = list(graph.nodes)
    lives = Lifetimes(nodes)
    became: dict[int, tuple[int, int]] = {}
    for place, node in enumerate(nodes):
        number = memory_of(node)
        if number in became:  # a view of a result that has other memory now
            node.meta["memory"] = became[number]
        written = _in_place(node.target)
        if written is None or number is None or shows(node):
            continue
        base: Any = node.args[0]
        other = memory_of(base) if isinstance(base, fx.Node) else None
        if (
            other is None
            or lives.dies.get(other) != place
            or lives.sizes[other] < _SMALL
            or base.meta["val"] != node.meta["val"]
            or not _is_dense(base)
            or any(each is not base and memory_of(each) == other for each in node.all_input_nodes)
        ):
            continue
        node.target = written
        node.meta["memory"] = became[number] = base.meta["memory"]
        lives.dies[other] = lives.dies.pop(number, place)


@cache
def _in_place(target: Any) -> Any:
    """The operator that writes the result of a pointwise one into its first operand, if any."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    packet = getattr(torch.ops.aten, f"{target._opname}_", None)
    found = getattr(packet, target._overloadname, None)
    arguments = None if found is None else [each.name for each in found._schema.arguments]
    return found if arguments == [each.name for each in target._schema.arguments] else None


def _is_dense(node: fx.Node) -> bool:
    """True if a tensor has all of its memory, each element once."""
    shape, stride, dtype = node.meta["val"]
    count = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != count:
            return False
        count *= size
    return bool(count * dtype.itemsize == node.meta["memory"][1])
