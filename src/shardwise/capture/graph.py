"""A graph that can be replayed: its guards, its generated function, and its first, verified run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import increment_version

from .._torch import below_autograd, pytree
from ..comm.dtypes import as_bytes
from ..comm.events import listeners
from ..comm.events import record as tell
from ..comm.failures import report
from ..errors import CaptureError
from ..layout.mesh import Topology
from ..random.agree import begin
from ..storage.operands import mark_written
from ..storage.wrapper import Wrapper
from .agree import all_agree, have_same_order, number_collectives
from .emit import Missed, emit, emit_guards, emit_list
from .inductor import Stretch, stretches
from .passes import Pass
from .record import Recording
from .recorder import Recorded
from .state import State, autocasts


class Graph:
    """A recorded step, ready to be replayed. `again` is another recording of the same step."""

    def __init__(
        self,
        recording: Recording,
        again: Recording,
        state: State,
        meshes: Sequence[Topology],
        passes: Sequence[Pass],
    ) -> None:
        self.recording, self.state, self.meshes = recording, state, meshes
        self.is_verified = False
        held = {each.name: each.value for each in recording.variables}
        names = {**state.names(), "constants": recording.seen.constants, "variables": held}
        self._names, self.is_compiled = names, False
        self._guard = emit_guards(recording, names)
        seen = recording.seen = _changed(recording.seen, again.seen, passes, meshes)
        self.source, self._function = emit(recording, seen.graph, names, {})
        written = [seen.inputs[place] for place in recording.written]
        self._written = emit_list([each.expression for each in written], names)
        self._labels = [each.label for each in written]
        owners = [each.expression.partition("._locals[") for each in written]
        unique = dict.fromkeys(owner for owner, part, _ in owners if part)
        self._owners = emit_list(list(unique), names)
        state_inputs = [each for each in seen.inputs if is_state(each.expression)]
        self.names = _unique({each.node: each.label for each in state_inputs})
        self._expressions = [each.expression for each in state_inputs]
        for found in seen.inputs:
            found.value = None  # tensors are found anew; the recorded ones may go

    def inputs(self, flat: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The local tensors that the step reads beside its arguments, by name."""
        values = emit_list(self._expressions, self._names)(flat)
        return dict(zip(self.names.values(), values, strict=True))

    def changed(self) -> str | None:
        """The name of a variable that has another value than in the recorded call."""
        return next((each.name for each in self.recording.variables if not each.is_same()), None)

    def takes(self, flat: Sequence[Any]) -> bool:
        """True if hyperparameters lead to the same branches as in the recorded call."""
        return self._guard(flat)

    def run(self, flat: Sequence[Any]) -> Any:
        """Replay the step."""
        owners = self._owners(flat)  # before a gradient among them is dropped
        made, grads = self._run(flat)
        tensors = self.state.tensors
        for (place, _), grad in zip(self.recording.grads, grads, strict=True):
            tensors[place].grad = grad
        increment_version(owners)
        for owner in owners:
            if owner._cell is not None or owner._memo:
                mark_written(owner)
        return pytree.tree_unflatten(made, self.recording.tree)

    def _run(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        if self.recording.seen.draws:
            for mesh in self.meshes:
                begin("a captured step", mesh, None)
        if listeners:
            for event in self.recording.seen.events:
                tell(*event)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
                stack.enter_context(below_autograd())
                _leave_autocast(stack)
                made, grads = self._function(flat)
                return made, grads
        except Missed:
            raise
        except BaseException as error:
            for mesh in self.meshes:
                report(error, mesh)
            raise

    # --- the first replay ----------------------------------------------------------------------

    def verify(self, flat: Sequence[Any], eager: Callable[[], Any]) -> tuple[Any, str | None]:
        """Replay the step, take back what it wrote, and run it eagerly: what the eager step returns
        and, in words, in what the two differ."""
        generators = self._generators()
        written = self._written(flat)
        made, grads, replayed, drawn = self._rehearse(flat, written)
        result = eager()
        pairs = list(zip(self._labels, written, replayed, strict=True))
        returned = pytree.tree_leaves(result)
        pairs.append(("the number of values that the step returns", len(returned), len(made)))
        pairs += [("a value that the step returns", *pair) for pair in zip(returned, made)]  # noqa: B905
        for (place, _), grad in zip(self.recording.grads, grads, strict=True):
            label = f"the gradient of {self.state.labels[place]}"
            pairs.append((label, self.state.tensors[place].grad, grad))
        states = [generator.get_state() for generator in generators]
        pairs += [("a random state", *pair) for pair in zip(states, drawn, strict=True)]
        bad = [label for label, one, other in pairs if not _same_bits(one, other)]
        text = f"the first replay and the eager step differ in {bad[0]}" if bad else None
        return result, text

    def _generators(self) -> list[torch.Generator]:
        return [torch.default_generator, *self.recording.seen.generators]

    def _rehearse(self, flat: Sequence[Any], written: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Replay the step and take back what it wrote and drew: results, new gradients, what it
        wrote, and the random states that it left."""
        generators = self._generators()
        states = [generator.get_state() for generator in generators]
        before = [tensor.clone() for tensor in written]
        made, grads = self._run(flat)
        replayed = [tensor.clone() for tensor in written]
        drawn = [generator.get_state() for generator in generators]
        with torch.no_grad():
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return made, grads, replayed, drawn

    # --- inductor ------------------------------------------------------------------------------

    def compile(self, flat: Sequence[Any], verify: bool) -> str | None:
        """Let inductor compile the local parts, and compare each with PyTorch's own kernels in a
        replay that is taken back. Returns why it cannot be on some rank, in words."""
        graph = self.recording.seen.graph
        self.is_compiled = True
        found, reason = _stretches(graph)
        reason = all_agree(self.meshes, None, reason)  # before the collectives of a replay
        if reason is not None:
            return reason
        names = {node: f"local_{at}" for at, each in enumerate(found) for node in each.nodes}
        calls = {node: (names[node], each) for each in found for node in each.nodes}
        differences: list[str] = []
        if verify:
            own = {names[each.nodes[0]]: each.compared(differences) for each in found}
            self._function = emit(self.recording, graph, {**self._names, **own}, calls)[1]
            self._rehearse(flat, self._written(flat))
        own = {names[each.nodes[0]]: each.run for each in found}
        self.source, self._function = emit(self.recording, graph, {**self._names, **own}, calls)
        return all_agree(self.meshes, None, next(iter(differences), None))


def _leave_autocast(stack: ExitStack) -> None:
    """Disable autocast until a stack is left: casts are part of the graph."""
    for device, _ in autocasts():
        stack.enter_context(torch.autocast(device, enabled=False))


def _stretches(graph: fx.Graph) -> tuple[list[Stretch], str | None]:
    """The compiled stretches of a graph, or why there are none."""
    try:
        with ExitStack() as stack:
            _leave_autocast(stack)
            found = stretches(graph)
    except CaptureError as error:
        return [], str(error)
    words = "backend='inductor' finds nothing to compile between collectives and writes"
    return found, None if found else words


def _unique(labels: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """Names for the inputs of a graph, made of labels of which some are alike."""
    counts: Counter[str] = Counter()
    names = {}
    for node, label in labels.items():
        counts[label] += 1
        names[node] = label if counts[label] == 1 else f"{label}_{counts[label]}"
    return names


def _changed(
    seen: Recorded, again: Recorded, passes: Sequence[Pass], meshes: Sequence[Topology]
) -> Recorded:
    """A recording after the passes.

    If ranks do not make the same collectives in the same order then, the passes are tried one by
    one, on the other recording, and those that divide the ranks are left out: the graphs of ranks
    differ, so a pass may treat them differently.
    """
    for each in (seen, again):
        end: Any = each.graph.output_node()
        end.args = ((end.args[0][0], []),)  # without the guards
    number_collectives(seen.graph)
    facts = [{**node.meta} for node in seen.graph.nodes]  # the other recording has none
    for change in passes:
        change(seen.graph)
    seen.graph.lint()
    if have_same_order(meshes, seen.graph):
        return seen
    for node, own in zip(again.graph.nodes, facts, strict=True):
        node.meta |= own
    pairs = zip(seen.inputs, again.inputs, strict=True)
    inputs = [replace(each, node=other.node) for each, other in pairs]
    kept = replace(seen, graph=again.graph, inputs=inputs)
    for change in passes:
        made = _copied(kept)
        change(made.graph)
        made.graph.lint()
        kept = made if have_same_order(meshes, made.graph) else kept
    return kept


def _copied(seen: Recorded) -> Recorded:
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(seen.graph, nodes))
    inputs = [replace(each, node=nodes[each.node]) for each in seen.inputs]
    return replace(seen, graph=graph, inputs=inputs)


def is_state(expression: str) -> bool:
    """True if an input is no argument and no hyperparameter."""
    return not expression.startswith("flat[") and ".param_groups[" not in expression


def _same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, Wrapper) and isinstance(other, Wrapper):
        parts = zip(one._locals, other._locals, strict=True)
        return one._spec is other._spec and all(_same_bits(a, b) for a, b in parts)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.shape == other.shape and one.dtype is other.dtype
        return alike and torch.equal(_bits(one.detach()), _bits(other.detach()))
    return one is other or (type(one) is type(other) and bool(one == other))


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers, which are equal only if the bits are."""
    kind = _INTEGERS.get(tensor.dtype)
    return as_bytes(tensor) if kind is None or tensor.is_neg() else tensor.view(kind)
