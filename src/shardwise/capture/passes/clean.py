"""Passes that drop operations: views, repeated ones, and those that nobody uses."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ..._torch import OpOverload, is_composite
from .memory import by_target, changes_view, memory_of

aten = torch.ops.aten


@by_target
def has_effects(node: fx.Node) -> bool:
    """True if a node does more than give a result: it writes, draws or communicates."""
    target = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "") not in ("_operator", "math", "builtins")
    return bool(target._schema.is_mutable) or torch.Tag.nondeterministic_seeded in target.tags


def drop_dead(graph: fx.Graph) -> None:
    """Drop operations whose results nobody uses."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not has_effects(node):
            graph.erase_node(node)


def fold_views(graph: fx.Graph) -> None:
    """Drop views that show all of a tensor as it is, and transpositions of transpositions."""
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    changing = _changing_views(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not _may_fold(node):
            continue
        if changing and root_of(node) in changing:
            continue
        base: Any = node.args[0]
        found: Any = None
        if node.target in (aten.detach.default, aten.alias.default):
            found = base
        elif node.target is aten.t.default and base.target is aten.t.default:
            found = base.args[0]
        elif node.target in _VIEWS and _layout(node) == _layout(base) is not None:
            found = base
        if found is not None:
            # A user who gets `weight.detach()` does not get the parameter itself.
            keep = found.op == "placeholder"
            node.replace_all_uses_with(found, lambda user, keep=keep: not keep or user is not end)
            if not node.users:
                graph.erase_node(node)


@by_target
def _may_fold(node: fx.Node) -> bool:
    return node.target in (aten.detach.default, aten.alias.default, aten.t.default, *_VIEWS)


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.permute.default)


def _layout(node: Any) -> Any:
    return node.meta.get("val")


def _changing_views(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of whose views one is given another shape in place: each must stay itself."""
    return {root_of(node) for node in graph.nodes if changes_view(node)}


@by_target
def is_view(node: fx.Node) -> bool:
    """True if a node gives a view of its first argument, in its memory."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    # Composites such as `reshape` and `to` may copy.
    return len(returns) == 1 and returns[0].alias_info is not None and not is_composite(target)


def root_of(node: fx.Node) -> fx.Node:
    """The node whose memory a node shows."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        if not _aliases(node):
            return node
        node = node.args[0]
    return node


@by_target
def _aliases(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return any(each.alias_info is not None for each in node.target._schema.returns)


def written_roots(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory is written by any operation."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        target: Any = node.target
        if isinstance(target, OpOverload) and not target._schema.is_mutable:
            continue
        if node.op == "call_function" and not _is_arithmetic(node):
            found.update(map(root_of, node.all_input_nodes))
    return found


def _is_arithmetic(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")


_SMALL = 1 << 16
"""Results of at most so many bytes are kept, and not computed again."""


def drop_duplicates(graph: fx.Graph) -> None:
    """Drop an operation that repeats another one: views, and small results that are not floating
    point, such as masks of indices. Activations that are computed again stay so."""
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    # Results that a user gets must not share memory.
    kept = written_roots(graph) | set(map(root_of, end.all_input_nodes))
    memory = {memory_of(each) for each in kept} - {None}
    changing = _changing_views(graph)
    found: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or has_effects(node)
            or not isinstance(node.target, OpOverload)
            or (changing and root_of(node) in changing)
        ):
            continue
        if not (is_view(node) or (_is_small(node) and not _touches(node, kept, memory))):
            continue
        key = repr((str(node.target), node.args, sorted(node.kwargs.items())))
        same = found.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _is_small(node: fx.Node) -> bool:
    if "val" not in node.meta:
        return False
    shape, _, dtype = node.meta["val"]
    return not dtype.is_floating_point and math.prod(shape) * dtype.itemsize <= _SMALL


def _touches(node: fx.Node, written: set[fx.Node], memory: set[int | None]) -> bool:
    """True if a node gives or reads memory that is written: arguments may share theirs."""
    roots = {root_of(each) for each in (node, *node.all_input_nodes)}
    return not roots.isdisjoint(written) or any(memory_of(each) in memory for each in roots)
