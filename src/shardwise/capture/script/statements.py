"""The step of a rank as statements of plain PyTorch and `torch.distributed`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ..._torch import OpOverload
from ...errors import CaptureError
from ..agree import COLLECTIVES
from ..emit import INFIX, infix
from ..graph import Graph
from ..inductor import RECURRENT
from ..passes import has_effects, is_view, root_of, written_roots
from ..passes.memory import changes_views, nodes_in, shows
from ..recorder import finish, set_random_state

aten = torch.ops.aten
_CALLS = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}
_CALLS |= {"all_to_all": "all_to_all_single"}
_PARTS = frozenset((operator.getitem, *INFIX))
"""What stands in an expression, at each of its uses."""
_LONGEST = 70
"""A longer call is a statement of its own."""
CHECKS = {
    "_refuse_outside": """
def refuse_outside(index, least, size, dim):
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < least or high >= size:
        bad = high if high >= size else low
        raise IndexError(f"index {bad} is out of bounds for dimension {dim} with size {size}")
""",
    "_refuse_targets": """
def refuse_targets(target, outside):
    if bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")
""",
    "_refuse_classes": """
def refuse_classes(part, num_classes):
    if part.numel() and (part.min() < 0 or (num_classes != -1 and part.max() >= num_classes)):
        raise RuntimeError(f"Class values must be non-negative and below {num_classes}.")
""",
}
"""The checks of indices as they stand in a script, by the name of the function in a graph."""


class Writer:
    """Writes the step of this rank: `lines`, and what else the script needs."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.groups: list[tuple[int, ...]] = []
        self.checks: list[str] = []
        self.state: dict[str, str] = {}
        """The names of tensors in the state, with their layouts."""
        self._texts: dict[fx.Node, str] = {}
        self._names: dict[str, int] = {}
        self.lines: list[str] = []
        self._delayed: set[fx.Node] = set()
        """Calls that stand where they are used, with more in them than views of variables."""
        nodes = _in_order(graph.recording.seen.graph)
        self._effects = _effects_before(nodes)
        for each in graph.recording.seen.inputs:
            self._texts[each.node] = self._input(each)
        for node in nodes:
            if node.op == "call_function":
                self._write(node)
        end: Any = next(n for n in reversed(nodes) if n.op == "output")
        pairs = zip(graph.recording.outputs, end.args[0][0], strict=False)  # gradients follow
        made = [self._result(output, nodes) for output, nodes in pairs]
        self.lines.append(f"return {', '.join(made) or None}")

    def _input(self, each: Any) -> str:
        text: str = each.expression
        if text.startswith("flat["):
            return "args" + text.removeprefix("flat").partition(".")[0]
        if ".param_groups[" in text:
            at, _, rest = text.partition(".param_groups[")
            return f"options[{at.removeprefix('O')}][{rest}"
        name = self._graph.names[each.node]
        whole = each.spec is not None and ".state[" not in text
        self.state[name] = str(each.spec) if whole else ""
        return f"s[{name!r}]"

    def _result(self, output: Any, nodes: Sequence[Any]) -> str:
        if output.expression is not None:
            return "None"
        return self.text(nodes[0]) if nodes else self.text(output.value)

    def text(self, value: Any) -> str:
        """An argument in a script."""
        if isinstance(value, fx.Node):
            return self._texts[value]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self.text, value)) + "]"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if isinstance(value, torch.device):
            return repr(str(value))
        if isinstance(value, dist.ReduceOp.RedOpType):
            return f"dist.ReduceOp.{value.name}"
        plain = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)
        if not isinstance(value, plain):
            raise CaptureError(f"code: a {type(value).__name__} cannot be written into a script.")
        return str(value) if isinstance(value, plain[5:]) else repr(value)

    def _write(self, node: fx.Node) -> None:
        target: Any = node.target
        if target in _PARTS:
            self._texts[node] = (
                f"{self.text(node.args[0])}[{node.args[1]}]"
                if target is operator.getitem
                else f"({infix(target, *map(self.text, node.args))})"
            )
            self._delayed |= {node} if self._delayed.intersection(node.all_input_nodes) else set()
        elif target is finish:
            self.lines.append(f"{self.text(node.args[0])}.wait()")
        elif target.__name__ != "_begin":
            call = self._call(node, target)
            if self._is_inlined(node, call):
                self._texts[node] = call
                return
            self.lines.append(f"{self._variable(node, target)} = {call}" if node.users else call)

    def _is_inlined(self, node: fx.Node, call: str) -> bool:
        """True if a call can stand where its result is used, once: nothing is written or drawn
        between the two, or it is a view of a variable."""
        uses = _uses(node)
        if len(uses) != 1 or len(call) > _LONGEST or uses[0].op != "call_function":
            return False
        if is_view(node) and self._delayed.isdisjoint(node.all_input_nodes):
            return True
        alike = not has_effects(node) and self._effects[node] == self._effects[uses[0]]
        self._delayed |= {node} if alike else set()
        return alike

    def _call(self, node: fx.Node, target: Any) -> str:
        if target in COLLECTIVES:
            name = _CALLS.get(target.__name__, target.__name__)
            parts = [*map(self.text, node.args[1:]), self._group(node.args[0])]
            return f"dist.{name}({', '.join(parts)})"
        given: list[str] = [self.text(each) for each in node.args]
        named = {name: each for name, each in node.kwargs.items() if name != "pin_memory" or each}
        given += [f"{name}={self.text(each)}" for name, each in named.items()]
        return f"{self._function(target)}({', '.join(given)})"

    def _function(self, target: Any) -> str:
        if isinstance(target, OpOverload):
            if target is RECURRENT:
                raise CaptureError("code: an LSTM cannot be written as operators of no_grad mode.")
            name = str(target).removesuffix(".default")
            return name if target.namespace == "aten" else f"torch.ops.{name}"
        if target.__name__ in CHECKS:
            if target.__name__ not in self.checks:
                self.checks.append(target.__name__)
            return str(target.__name__).removeprefix("_")
        if target in (torch.get_rng_state, set_random_state):
            return "torch." + ("g" if target is torch.get_rng_state else "s") + "et_rng_state"
        if getattr(target, "__module__", "") in ("math", "builtins", "_operator"):
            return f"{target.__module__.removeprefix('_')}.{target.__name__}"
        raise CaptureError(
            f"code: {target.__name__} is a function of shardwise. Random numbers in counter mode "
            "cannot be written into a script; capture the step in exact mode."
        )

    def _group(self, group: Any) -> str:
        found = getattr(group, "process_group", group)
        if found is None:
            raise CaptureError("code: some ranks talk in pairs, for they have no process group.")
        ranks = tuple(dist.get_process_group_ranks(found))
        if ranks not in self.groups:
            self.groups.append(ranks)
        return f"group=groups[{self.groups.index(ranks)}], async_op=True"

    def _variable(self, node: fx.Node, target: Any) -> str:
        base = target._opname if isinstance(target, OpOverload) else target.__name__
        base = base.strip("_")
        count = self._names[base] = self._names.get(base, -1) + 1
        made = self._texts[node] = f"{base}_{count}"
        return made


def _uses(node: fx.Node) -> list[fx.Node]:
    """The calls in which a result stands, itself or as a part of an expression, each as often."""
    found: list[fx.Node] = []
    for user in node.users:
        times = nodes_in((user.args, user.kwargs)).count(node)
        found += times * (_uses(user) if user.target in _PARTS else [user])
    return found


def _in_order(graph: fx.Graph) -> list[fx.Node]:
    """The nodes in an order in which layers, and ranks, are alike: a view directly behind what it
    shows, whoever uses it first; and at the beginning what depends on no input, such as a mask,
    which the first layer makes and all use."""
    found: dict[fx.Node, None] = {}
    views = set() if changes_views(graph) else {node for node in graph.nodes if shows(node)}

    def add(node: fx.Node) -> None:
        if all(each in found for each in node.all_input_nodes):
            found[node] = None
            for user in sorted(views.intersection(node.users)):
                add(user)

    for node in (*_made_of_nothing(graph), *graph.nodes):
        if node not in found:
            add(node)
    return list(found)


def _effects_before(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many nodes with effects come before each node. Waits do not count: what a collective
    writes is not read between its start and its wait."""
    found, count = {}, 0
    for node in nodes:
        found[node] = count
        count += node.op == "call_function" and node.target is not finish and has_effects(node)
    return found


def _made_of_nothing(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes that depend on no input and are never written."""
    found: dict[fx.Node, None] = {}
    written = written_roots(graph)
    for node in graph.nodes:
        made = isinstance(node.target, OpOverload) and not has_effects(node)
        if made and root_of(node) not in written and all(n in found for n in node.all_input_nodes):
            found[node] = None
    return found
