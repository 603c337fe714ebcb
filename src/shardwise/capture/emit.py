"""A graph as straight-line Python: one statement per node, over the operators' own entry points."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from .._torch import OpOverload, local_function, set_grad_enabled
from ..layout.spec import DTensorSpec
from ..storage.wrapper import wrap
from .inductor import Stretch
from .passes.memory import memory_of
from .record import Output, Recording
from .recorder import Input, finish

INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}


class Missed(Exception):
    """A tensor has another layout than the graph was recorded with."""


def infix(target: Any, left: str, right: str) -> str:
    """An operation of two numbers as Python.

    >>> infix(operator.pow, "-2.0", "step")
    '(-2.0) ** step'
    """
    return (
        f"({left}) {INFIX[target]} {right}" if left[0] == "-" else f"{left} {INFIX[target]} {right}"
    )


class Emitter:
    """Writes Python for nodes. Objects that have no literal are names in `names`."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self._functions: dict[int, str] = {}
        self._objects: dict[int | str, str] = {}

    def text(self, value: Any) -> str:
        """An argument of a node."""
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, tuple):
            return "(" + "".join([self.text(each) + ", " for each in value]) + ")"
        if isinstance(value, list):
            text = "[" + ", ".join(map(self.text, value)) + "]"
            plain = all(type(each) in (int, bool) for each in value)
            return self.object(value, text) if plain else text  # Python compiles a name faster
        if type(value) in (int, bool, str, type(None)):
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        return self.object(value)

    def object(self, value: Any, text: str = "") -> str:
        """The name of an object, or of one that has the same text."""
        name = self._objects.setdefault(text or id(value), f"k{len(self._objects)}")
        self.names[name] = value
        return name

    def function(self, target: Any) -> str:
        """The name of the function that runs a node."""
        name = self._functions.get(id(target))
        if name is None:
            base = getattr(target, "__name__", "f").replace(".", "_")
            name = self._functions[id(target)] = f"f{len(self._functions)}_{base}"
            own = isinstance(target, OpOverload)
            self.names[name] = local_function(target) if own else target
        return name

    def statement(self, node: fx.Node) -> str:
        """A node as a statement."""
        target, args = node.target, node.args
        if not isinstance(target, OpOverload) and target in INFIX:  # the hash of operators is slow
            value = infix(target, self.text(args[0]), self.text(args[1]))
        elif target is operator.getitem:
            value = f"{self.text(args[0])}[{args[1]!r}]"
        elif target is finish:
            value = f"{self.text(args[0])}()"
        else:
            given = [self.text(each) for each in args]
            given += [f"{name}={self.text(each)}" for name, each in node.kwargs.items()]
            value = f"{self.function(target)}({', '.join(given)})"
        return f"{node.name} = {value}" if node.users else value


def emit(
    recording: Recording,
    graph: fx.Graph,
    names: dict[str, Any],
    stretches: Mapping[fx.Node, tuple[str, Stretch]],
) -> tuple[str, Any]:
    """The source of a replay, and the function: it takes the leaves of the arguments, and returns
    the results and the new gradients. `stretches` are functions for nodes, each with its name."""
    emitter = Emitter({**names, "wrap": wrap, "part": _part, "set_grad_enabled": set_grad_enabled})
    lines = _feed(recording.seen.inputs, graph, emitter)
    dying = _last_uses(graph)
    enabled = None
    for node in graph.nodes:
        if node.op == "call_function":
            if node.meta.get("grad", enabled) is not enabled:
                enabled = node.meta["grad"]
                lines.append(f"set_grad_enabled({enabled})")
            if node not in stretches:
                lines.append(emitter.statement(node))
                dead = dying.get(node)
            elif node is stretches[node][1].nodes[0]:
                name, stretch = stretches[node]
                lines.append(_call(name, stretch))
                used = [each for own in stretch.nodes for each in dying.get(own, ())]
                dead = [each for each in used if each in stretch.inputs]
            else:
                continue
            if dead:
                lines.append(" = ".join([each.name for each in dead]) + " = None")
    nodes = next(node for node in reversed(graph.nodes) if node.op == "output").args[0][0]
    every = [*recording.outputs, *[grad for _, grad in recording.grads]]
    made = [_output(each, own, emitter) for each, own in zip(every, nodes, strict=True)]
    split = len(recording.outputs)
    lines.append(f"return [{', '.join(made[:split])}], [{', '.join(made[split:])}]")
    source, function = _compiled("replay", "flat", lines, emitter.names)
    return source, function


def _call(name: str, stretch: Stretch) -> str:
    given = ", ".join([each.name for each in stretch.inputs])
    made = "".join([f"{each.name}, " for each in stretch.outputs])
    return f"{made}= {name}({given})"


def emit_guards(recording: Recording, names: dict[str, Any]) -> Callable[[Sequence[Any]], bool]:
    """A function of the leaves of the arguments: True if hyperparameters lead to the same branches
    as in the recorded call."""
    emitter = Emitter({**names})
    wanted: set[Any] = set()
    for node, _ in recording.seen.guards:
        _add_ancestors(node, wanted)
    inputs = [each for each in recording.seen.inputs if each.node in wanted]
    lines = [f"{each.node.name} = {each.expression}" for each in inputs]
    lines += [
        emitter.statement(node)
        for node in recording.seen.graph.nodes
        if node in wanted and node.op == "call_function"
    ]
    tests = [f"bool({emitter.text(node)}) is {value}" for node, value in recording.seen.guards]
    lines.append(f"return {' and '.join(tests) or 'True'}")
    function: Callable[[Sequence[Any]], bool] = _compiled("guard", "flat", lines, emitter.names)[1]
    return function


def _add_ancestors(node: Any, found: set[Any]) -> None:
    if isinstance(node, fx.Node) and node not in found:
        found.add(node)
        for each in node.all_input_nodes:
            _add_ancestors(each, found)


def _compiled(name: str, argument: str, lines: Sequence[str], names: dict[str, Any]) -> Any:
    source = f"def {name}({argument}):\n    " + "\n    ".join(lines) + "\n"
    exec(compile(source, f"<captured {name}>", "exec"), names)
    return source, names[name]


def _feed(inputs: Sequence[Input], graph: fx.Graph, emitter: Emitter) -> list[str]:
    """Statements that find the inputs that are used, and check layouts before anything is done."""
    lines = []
    used = {node for node in graph.nodes if node.op == "placeholder" and node.users}
    for each in inputs:
        if each.node not in used:
            continue
        owner, _, part = each.expression.partition("._locals[")
        if ".state[" in owner and part:
            slot = part.removesuffix("]")
            lines.append(f"{each.node.name} = part({owner}, {emitter.object(each.spec)}, {slot})")
        else:
            lines.append(f"{each.node.name} = {each.expression}")
    return lines


def _part(owner: Any, spec: DTensorSpec, slot: int) -> Any:
    """A local part of a DTensor, if that has the layout which it was recorded with."""
    if owner._spec is not spec:
        raise Missed
    return owner._locals[slot]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By the node that uses them last: the results that are not needed afterwards, but for
    numbers, and for what shows memory of inputs."""
    outside = {memory_of(node) for node in graph.nodes if node.op == "placeholder"} - {None}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for each in node.all_input_nodes:
            last[each] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for each, node in last.items():
        kept = "number" in each.meta or memory_of(each) in outside
        if node.op == "call_function" and not kept:
            found.setdefault(node, []).append(each)
    return found


def _output(output: Output, nodes: Any, emitter: Emitter) -> str:
    if output.expression is not None:
        return output.expression
    if output.spec is not None:
        return f"wrap({emitter.object(output.spec)}, {emitter.text(tuple(nodes))})"
    return emitter.text(nodes[0]) if nodes else emitter.text(output.value)


def emit_list(expressions: Sequence[str], names: dict[str, Any]) -> Callable[[Any], list[Any]]:
    """A function of the leaves of the arguments that gives the values of expressions."""
    found: Callable[[Any], list[Any]] = _compiled(
        "values", "flat", [f"return [{', '.join(expressions)}]"], {**names}
    )[1]
    return found
