"""One recorded call of a step: its graph with inputs and outputs, and how two of them compare."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import memory_of, pytree
from ..layout.spec import DTensorSpec
from ..storage.wrapper import Wrapper
from .numbers import Symbol, settle
from .recorder import Input, Recorded, Recorder, recording
from .state import State, local_tensors
from .variables import Variable

_LONGEST = 200
"""How much of a row an error shows."""


@dataclass
class Output:
    """A value that a replay returns, or puts into a `.grad`.

    `expression` finds a value that was there before the step. Otherwise it is made of `nodes`, with
    `spec` for a DTensor, or it is the constant `value`.
    """

    expression: str | None = None
    spec: DTensorSpec | None = None
    nodes: tuple[fx.Node, ...] = ()
    value: Any = None


@dataclass
class Recording:
    """A recorded call: `outputs` in the order of `tree`, and the new `.grad` of some tensors."""

    seen: Recorded
    outputs: list[Output]
    tree: Any
    grads: list[tuple[int, Output]]
    variables: list[Variable]
    written: list[int]
    """The inputs that the step writes into."""

    def took_same_branches(self, other: Recording) -> bool:
        """False if two calls need two graphs: hyperparameters led to other branches, or a number in
        a variable is another one."""
        one, two = ({each.name: each.value for each in r.variables} for r in (self, other))
        numbers = [n for n in one.keys() & two.keys() if not isinstance(one[n], torch.Tensor)]
        truths = [[truth for _, truth in each.seen.guards] for each in (self, other)]
        return truths[0] == truths[1] and all(one[name] == two[name] for name in numbers)


def record(
    step: Callable[..., Any], flat: Sequence[Any], tree: Any, state: State, facts: bool
) -> tuple[Any, Recording]:
    """Run a step and record it: with facts about nodes, or only to compare another recording with
    it. Returns what the step returns, too."""
    variables = state.variables()
    known = state.known(flat, variables)
    before = [tensor.grad if tensor.is_leaf else None for tensor in state.tensors]
    others = _Others(state, flat, variables)
    with recording(known, facts) as recorder, _symbolic_options(recorder, state):
        for each in variables:
            if isinstance(each.value, torch.amp.GradScaler) and each.value.is_enabled():
                recorder.refuse(
                    f"the variable {each.name!r} is a GradScaler, which reads values to decide "
                    "whether the optimizer steps. Train in bfloat16, which needs no scaling"
                )
        given = [_given(recorder, place, value) for place, value in enumerate(flat)]
        args, kwargs = pytree.tree_unflatten(given, tree)
        result = step(*args, **kwargs)
        leaves, out_tree = pytree.tree_flatten(result)
        owners = _owners(flat, state)
        outputs = [_output(recorder, leaf, owners) for leaf in leaves]
        grads = [
            (place, _output(recorder, tensor.grad, {}))
            for place, tensor in enumerate(state.tensors)
            if tensor.is_leaf and tensor.grad is not before[place]
        ]
    others.refuse_changes(recorder)
    _refuse_shared(recorder, flat, state)
    seen = recorder.seen
    texts = "\n".join([each.expression for each in seen.inputs])
    variables = [
        each
        for each in variables
        if not isinstance(each.value, torch.Tensor) or f"variables[{each.name!r}]" in texts
    ]
    # The length of a list to which the step appends is no matter of a replay.
    variables = [each for each in variables if not each.may_grow or each.is_same()]
    for each in variables:
        if not each.is_same():
            recorder.refuse(f"the step changes the variable {each.name!r}, and a replay would not")
    nodes = [each.nodes for each in (*outputs, *[grad for _, grad in grads])]
    seen.graph.output((nodes, [node for node, _ in seen.guards]))
    written = [
        place
        for place, each in enumerate(seen.inputs)
        if isinstance(each.value, torch.Tensor) and memory_of(each.value) in seen.written
    ]
    made = Recording(seen, outputs, out_tree, grads, variables, written)
    plain = [float(leaf) if type(leaf) is Symbol else leaf for leaf in leaves]
    return pytree.tree_unflatten(plain, out_tree), made


def _given(recorder: Recorder, place: int, value: Any) -> Any:
    """An argument for the step: floats are symbols."""
    if type(value) is not float:
        return value
    return recorder.number(f"flat[{place}]", f"argument {place}", value)


def _owners(flat: Sequence[Any], state: State) -> dict[int, str]:
    """The expressions of tensors that a step may return as they are."""
    found = {id(value): f"flat[{place}]" for place, value in enumerate(flat)}
    for place, tensor in enumerate(state.tensors):
        found.setdefault(id(tensor), f"T{place}")
    return found


def _output(recorder: Recorder, value: Any, owners: dict[int, str]) -> Output:
    if isinstance(value, torch.Tensor) and id(value) in owners:
        return Output(owners[id(value)])
    if isinstance(value, Wrapper):
        nodes = tuple([recorder.node_of(part) for part in value._locals])
        return Output(spec=value._spec, nodes=nodes)
    if isinstance(value, torch.Tensor):
        return Output(nodes=(recorder.node_of(value),))
    if type(value) is Symbol:
        return Output(nodes=(value.node.fx_node,))
    if not isinstance(value, (int, float, str, bool, torch.dtype, type(None))):
        recorder.refuse(f"the step returns a {type(value).__name__}")
    return Output(value=value)


@contextmanager
def _symbolic_options(recorder: Recorder, state: State) -> Iterator[None]:
    """Let the floats in `param_groups` be symbols meanwhile."""
    before: list[tuple[dict[str, Any], str, Any, Any]] = []
    for at, optimizer in enumerate(state.optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                text = f"O{at}.param_groups[{place}][{name!r}]"
                made = _symbols(recorder, text, name, value)
                if made is not value:
                    before.append((group, name, value, made))
    for group, name, _, made in before:
        group[name] = made
    try:
        yield
    finally:
        for group, name, value, made in before:
            if group.get(name) is not made:
                recorder.refuse(
                    f"the step changes {name!r} of an optimizer. Call scheduler.step() after the "
                    "captured step, not in it"
                )
            group[name] = value
        for optimizer in state.optimizers:
            settle(list(optimizer.state.values()))


def _symbols(recorder: Recorder, text: str, name: str, value: Any) -> Any:
    if type(value) is float:
        return recorder.number(text, name, value)
    if type(value) is tuple and any(type(each) is float for each in value):
        return tuple(
            [_symbols(recorder, f"{text}[{at}]", name, each) for at, each in enumerate(value)]
        )
    return value


class _Others:
    """The state that a replay does not change, before a step: a step that changes it is refused."""

    def __init__(self, state: State, flat: Sequence[Any], variables: Sequence[Variable]) -> None:
        self._state = state
        self._kept = state.optimizer_state()
        self._flags = [module.training for module in state.modules]
        self._memory = [(*each, _memory(each[1])) for each in state.held(flat, variables)]
        own = set(map(id, state.tensors))
        leaves = [each for each in variables if isinstance(each.value, torch.Tensor)]
        leaves = [each for each in leaves if each.value.is_leaf and id(each.value) not in own]
        self._grads = [(each, each.value.grad) for each in leaves]
        self._drawn = _python_random()

    def refuse_changes(self, recorder: Recorder) -> None:
        """Compare with what is there after the step."""
        self._refuse_other_state(recorder)
        for label, tensor, memory in self._memory:
            if _memory(tensor) != memory:
                recorder.refuse(
                    f"the step gives {label} other memory, as `x.data = ...` does, and a replay "
                    "would not. Write into it: x.copy_(...)"
                )
        for each, grad in self._grads:
            if each.value.grad is not grad:
                recorder.refuse(
                    f"the step leaves a gradient of the variable {each.name!r}, and a replay would "
                    "not. Make it a parameter of a module or of an optimizer that the step uses"
                )
        if _python_random() != self._drawn:
            recorder.refuse(
                "the step draws from Python's or numpy's generator, and a replay would not. Draw "
                "with PyTorch, or pass the number as an argument"
            )

    def _refuse_other_state(self, recorder: Recorder) -> None:
        state, now = self._state, self._state.optimizer_state()
        if len(now) != len(self._kept) or any(
            a[2] is not b[2] and (isinstance(a[2], torch.Tensor) or a[2] != b[2])
            for a, b in zip(now, self._kept, strict=True)
        ):
            names = ", ".join(type(optimizer).__name__ for optimizer in state.optimizers)
            recorder.refuse(
                f"{names} replaces its state in a step, or keeps numbers outside tensors"
            )
        if not state.is_current():
            recorder.refuse("the step replaces a parameter, a buffer or a module of a module")
        if self._flags != [module.training for module in state.modules]:
            recorder.refuse("the step changes the training flag of a module")


def _memory(tensor: Any) -> list[int]:
    return [memory_of(part) for part in local_tensors(tensor)]


def _refuse_shared(recorder: Recorder, flat: Sequence[Any], state: State) -> None:
    """Refuse an argument that is a parameter or buffer: the graph would not know which is meant."""
    own = {id(part) for tensor in state.tensors for part in local_tensors(tensor)}
    for place, value in enumerate(flat):
        if any(id(part) in own for part in local_tensors(value)):
            recorder.refuse(
                f"argument {place} is a parameter or buffer of a module. Pass x.clone(), or let "
                "the step use the module"
            )


def _python_random() -> tuple[Any, ...]:
    """The states of the generators that are not PyTorch's."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else pickle.dumps(numpy.random.get_state())


# --- comparing -----------------------------------------------------------------------------------


def difference(one: Recording, other: Recording) -> str | None:
    """The first thing in which two recorded calls differ, in words; None if they are alike."""
    if one.tree != other.tree or len(one.outputs) != len(other.outputs):
        return "the step returns values of another structure"
    texts = [{each.node: _text(each) for each in r.seen.inputs} for r in (one, other)]
    same: dict[fx.Node, fx.Node] = {}
    for a, b in zip(one.seen.graph.nodes, other.seen.graph.nodes, strict=False):
        same[a] = b
        if a.op == b.op == "placeholder":
            alike = texts[0][a] == texts[1][b]
        else:
            alike = a.target == b.target and _are_alike(a.args, b.args, same)
            if alike and (a.kwargs or b.kwargs):
                alike = _are_alike([a.kwargs], [b.kwargs], same)
        if not alike:
            file, line = b.meta.get("line", ("unknown", 0))
            where = f", at {file}:{line}" if line else ""
            text = f"{_shown(a, texts[0])} became {_shown(b, texts[1])} in the next call{where}"
            return f"{text}. A counter, or another variable that the step changes, can be the cause"
    sizes = [len(each.seen.graph.nodes) for each in (one, other)]
    if sizes[0] != sizes[1] or len(one.grads) != len(other.grads):
        return f"one call made {sizes[0]} operations and the next one {sizes[1]}"
    pairs = zip(one.outputs, other.outputs, strict=True)
    if any((a.value, a.expression, a.spec) != (b.value, b.expression, b.spec) for a, b in pairs):
        return "a value that the step returns is another one in the next call"
    return None


def _text(found: Input) -> str:
    """An input: the expression that finds it, and the value of a constant."""
    constant = found.expression.startswith("constants")
    return f"{found.expression} {found.value.tolist()!r}" if constant else found.expression


def _are_alike(one: Sequence[Any], other: Sequence[Any], same: dict[fx.Node, fx.Node]) -> bool:
    """True if arguments of nodes in two graphs are alike; `same` has the nodes that are."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if isinstance(a, fx.Node):
            alike = same[a] is b
        elif isinstance(a, (list, tuple)):
            alike = isinstance(b, (list, tuple)) and _are_alike(a, b, same)
        elif isinstance(a, dict):
            alike = list(a) == list(b) and _are_alike([*a.values()], [*b.values()], same)
        elif isinstance(a, float):
            alike = type(a) is type(b) and repr(a) == repr(b)
        else:
            alike = bool(a == b)
        if not alike:
            return False
    return True


def _shown(node: fx.Node, texts: dict[fx.Node, str]) -> str:
    """A node in a few words: an input, or a function with the arguments that are no results."""
    if node.op == "output":
        return "the end of the step"
    if node.op == "placeholder":
        return texts[node][:_LONGEST]
    given = ", ".join(map(_argument, [*node.args, *node.kwargs.values()]))
    return f"{getattr(node.target, '__name__', node.target)}({given})"[:_LONGEST]


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    return "..." if isinstance(value, fx.Node) else str(value)
