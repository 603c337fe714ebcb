"""Passes that let collectives run while the program computes.

Both move operations only as far as memory allows: what lives at one time never exceeds what the
recorded order had at its peak.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from ..agree import COLLECTIVES, calls_of
from ..recorder import finish
from .memory import EMPTY, Effects, EffectsOf, Lifetimes, changes_views, shows

aten = torch.ops.aten
_COPIES = frozenset(
    (
        *EMPTY,
        operator.getitem,
        aten.cat.default,
        aten.cat.out,
        aten.clone.default,
        aten.copy_.default,
        aten._foreach_copy_.default,
        aten._foreach_add_.List,
        aten._to_copy.default,
        aten.div_.Scalar,
        aten.div.Scalar,
    )
)
"""Operators that bring tensors into a collective's buffer, and results out of it."""


def _goes_along(node: fx.Node) -> bool:
    """True if a node may be moved together with a collective."""
    return node.target in _COPIES or shows(node)


def delay_waits(graph: fx.Graph) -> None:
    """Wait for a collective just before its result is used, or its input written."""
    if changes_views(graph):
        return
    _delay_empty(graph)
    nodes, effects = list(graph.nodes), EffectsOf()
    lives = Lifetimes(nodes)
    for wait in reversed(calls_of(graph, finish)):
        at = nodes.index(wait)
        landing = Effects(wait)
        place = at
        for place in range(at + 1, len(nodes)):
            node = nodes[place]
            if node.op == "output":
                break
            if landing.must_keep_order(effects[node]):
                if not _goes_along(node):
                    break
                landing.add(effects[node])
        if place == at + 1:
            continue
        end = _latest(nodes, lives, landing, at, place)
        moving = [node for node in nodes[at:end] if node in landing.nodes]
        for node in moving:
            _move(node, nodes[end])
        nodes[at:end] = [node for node in nodes[at:end] if node not in landing.nodes] + moving
        lives.update(at, end)


def _latest(
    nodes: Sequence[fx.Node], lives: Lifetimes, landing: Effects, start: int, stop: int
) -> int:
    """The last place up to `stop` to which a landing can be moved."""
    live = lives.live()
    most, numbers = max(live), landing.reads | landing.writes
    more = sum([lives.sizes[n] for n in numbers if n in lives.sizes and lives.dies[n] < stop])
    for place in range(start + 1, stop):
        if live[place] + more > most and nodes[place] not in landing.nodes:
            return place
    return stop


def _move(node: fx.Node, before: fx.Node) -> None:
    if node is not before:
        before.prepend(node)
        node.meta.pop("grad", None)  # copies and waits are the same in all modes


def _delay_empty(graph: fx.Graph) -> None:
    """Make empty tensors, and views, just before they are used."""
    for node in reversed(list(graph.nodes)):
        alone = node.target in EMPTY and not node.all_input_nodes
        if node.users and node.op == "call_function" and (alone or shows(node)):
            _move(node, min(node.users))


def hoist_gathers(graph: fx.Graph) -> None:
    """Start to gather a parameter as soon as the one before it has arrived, so that it overlaps
    with what uses that one."""
    starts = list(filter(_is_gather, calls_of(graph, *COLLECTIVES)))
    if len(starts) < 2 or changes_views(graph):
        return
    nodes, effects = list(graph.nodes), EffectsOf()
    lives = Lifetimes(nodes)
    before: fx.Node | None = None
    for start in starts:
        at = nodes.index(start)
        packing = Effects(start)
        for place in range(at - 1, -1, -1):
            node = nodes[place]
            if node.op == "call_function" and packing.must_keep_order(effects[node]):
                if not _goes_along(node):
                    break
                packing.add(effects[node])
        else:  # it depends on nothing but inputs
            if before is not None:
                first = _earliest(nodes, lives, packing, at, nodes.index(before) + 1)
                moving = [node for node in nodes[first : at + 1] if node in packing.nodes]
                others = [node for node in nodes[first:at] if node not in packing.nodes]
                for node in moving if others else ():
                    if node > others[0]:
                        _move(node, others[0])
                nodes[first : at + 1] = moving + others
                lives.update(first, at + 1)
            before = next((user for user in start.users if user.target is finish), before)


def _is_gather(node: fx.Node) -> bool:
    """True for a collective that may be a gather, among ranks that have a process group."""
    named = node.target.__name__ in ("all_gather", "all_to_all")  # type: ignore[union-attr]
    return named and node.args[0].process_group is not None  # type: ignore[union-attr]


def _earliest(
    nodes: Sequence[fx.Node], lives: Lifetimes, packing: Effects, at: int, stop: int
) -> int:
    """The first place from `stop` on at which a gather can be started."""
    live = lives.live()
    most, numbers = max(live), packing.reads | packing.writes
    more = sum([lives.sizes[n] for n in numbers if n in lives.sizes])
    for place in range(at - 1, stop - 1, -1):
        if live[place] + more > most and nodes[place] not in packing.nodes:
            return place + 1
    return min(stop, at)
