"""Passes: functions from graph to graph. A replay gives the same bits before and after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload

aten = torch.ops.aten
Pass = Callable[[fx.Graph], None]
"""Changes a graph in place."""


def has_effects(node: fx.Node) -> bool:
    """True if a node does more than give a result: it writes, draws or communicates."""
    target: Any = node.target
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
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
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
            node.replace_all_uses_with(found)
            graph.erase_node(node)


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.permute.default)


def _layout(node: Any) -> Any:
    return node.meta.get("val")


DEFAULT: tuple[Pass, ...] = (fold_views, drop_dead)
