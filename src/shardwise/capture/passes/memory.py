"""The memory that operations of a graph read and write, and how much of it lives at each.

The recorder gives each storage a number: nodes with the same number show the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import fx

from ..._torch import OpOverload
from ..recorder import finish

aten = torch.ops.aten
EMPTY = frozenset(
    (
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    )
)
"""Operators that give memory without values."""


T = TypeVar("T")


def by_target(function: Callable[[fx.Node], T]) -> Callable[[fx.Node], T]:
    """Remember what a function of the target of a node gives. The hash of an operator is slow."""
    known: dict[int, tuple[Any, T]] = {}

    @wraps(function)
    def call(node: fx.Node) -> T:
        found = known.get(id(node.target))
        if found is None:  # a target that is kept keeps its id
            found = known[id(node.target)] = node.target, function(node)
        return found[1]

    return call


def memory_of(node: fx.Node) -> int | None:
    """The number of the storage that a node shows; None if its result is no tensor."""
    found: tuple[int, int] | None = node.meta.get("memory")
    return None if found is None else found[0]


def shows(node: fx.Node) -> bool:
    """True if a node gives memory of its inputs, or of parts of them, and reads no values."""
    shown = _shows(node)
    if shown is not None:
        return shown
    if memory_of(node) is None:  # a list of tensors
        return any(each.alias_info is not None for each in node.target._schema.returns)  # type: ignore[union-attr]
    return memory_of(node) in _numbers(node.all_input_nodes)


@by_target
def _shows(node: fx.Node) -> bool | None:
    """True or False for all calls of a function that is so; None if it depends on the call."""
    target = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__name__", "") == "getitem"
    return False if target._schema.is_mutable else None


def changes_views(graph: fx.Graph) -> bool:
    """True if a tensor is given another shape in place: views of it are not what they were."""
    return any(map(changes_view, graph.nodes))


@by_target
def changes_view(node: fx.Node) -> bool:
    """True if a node gives a tensor another shape in place."""
    return isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags


def _numbers(nodes: Iterable[fx.Node]) -> set[int]:
    return {number for node in nodes if (number := memory_of(node)) is not None}


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes among arguments, each as often as it is there."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def _written(node: fx.Node) -> list[fx.Node]:
    """The inputs that a node writes into."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return nodes_in([node.args[place] for place in getattr(target, "writes", ())])
    found = []
    for place, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            found += nodes_in(given)
    return found


class Effects:
    """The effects of one or more operations: nodes they need, memory they read or write."""

    __slots__ = ("nodes", "reads", "uses", "writes")

    def __init__(self, node: fx.Node | None = None) -> None:
        self.nodes: set[fx.Node] = set()
        self.uses: set[fx.Node] = set()
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        if node is None:
            return
        self.nodes, self.uses = {node}, set(node.all_input_nodes)
        # A collective is at work until it is waited for.
        what: Any = node.args[0] if node.target is finish else node
        if not shows(what):
            self.writes = _numbers(_written(what))
            self.reads = _numbers(what.all_input_nodes)

    def add(self, other: Effects) -> None:
        """Let these be the effects of `other`, too."""
        self.nodes |= other.nodes
        self.uses |= other.uses
        self.reads |= other.reads
        self.writes |= other.writes

    def must_keep_order(self, other: Effects) -> bool:
        """True if what comes first of the two must stay so."""
        return not (
            self.uses.isdisjoint(other.nodes)
            and self.nodes.isdisjoint(other.uses)
            and self.writes.isdisjoint(other.reads)
            and self.reads.isdisjoint(other.writes)
        )


class EffectsOf(dict[fx.Node, Effects]):
    """The effects of nodes, found when they are first asked for."""

    def __missing__(self, node: fx.Node) -> Effects:
        found = self[node] = Effects(node)
        return found


class Touched(dict[fx.Node, list[tuple[int, int]]]):
    """The memory that nodes need, with its bytes, found when it is first asked for. Inputs are not
    counted. It is the same wherever a node is moved."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        super().__init__()
        self._outside = _numbers(node for node in nodes if node.op == "placeholder")

    def __missing__(self, node: fx.Node) -> list[tuple[int, int]]:
        what: Any = node.args[0] if node.target is finish else node
        every = [each.meta.get("memory") for each in (node, *what.all_input_nodes)]
        found = self[node] = [each for each in every if each and each[0] not in self._outside]
        return found


class Lifetimes:
    """From when to when the memory that a graph makes lives. Inputs are not counted."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.born: dict[int, int] = {}
        self.dies: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self._nodes, self._touched = nodes, Touched(nodes)
        self.update(0, len(nodes))

    def update(self, start: int, stop: int) -> None:
        """Look at the nodes from `start` to `stop` again, which have other places among these."""
        rows = [(place, self._touched[self._nodes[place]]) for place in range(start, stop)]
        for place, row in rows:
            for number, size in row:
                self.sizes[number] = size
                if self.dies.get(number, start) < stop:
                    self.dies[number] = place
        for place, row in reversed(rows):
            for number, _ in row:
                if self.born.get(number, start) >= start:
                    self.born[number] = place

    def live(self) -> list[int]:
        """The bytes that live while each node runs."""
        change = [0] * (len(self._nodes) + 1)
        for number, size in self.sizes.items():
            change[self.born[number]] += size
            change[self.dies[number] + 1] -= size
        return list(accumulate(change[:-1]))


def peak(graph: fx.Graph) -> int:
    """The most bytes of results that live at a time when a graph runs."""
    return max(Lifetimes(list(graph.nodes)).live(), default=0)
