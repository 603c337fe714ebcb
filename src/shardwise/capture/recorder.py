"""The recorder: below the wrapper, every operator on local tensors becomes a node of a graph.

It runs the calls with real tensors and keeps their order, in-place writes included. A tensor is
known by identity. What cannot be recorded is noted, and the step goes on: a recorded call gives the
result of an eager one in any case.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from .._torch import (
    DispatchMode,
    StorageWeakRef,
    add_node,
    autograd_node,
    memory_of,
    next_node_number,
    untraced,
)
from ..comm.events import listeners
from ..comm.recording import recorder, set_recorder
from ..errors import CaptureError
from ..layout.user_line import in_backward, user_place
from .numbers import Number, StandIns, Symbol
from .state import Known

aten = torch.ops.aten
_READS = frozenset(("tolist", "numpy", "__array__"))
"""Functions of PyTorch that read values, and are no operators."""

_LIFT = aten.lift_fresh.default
_ITEMS = (aten._local_scalar_dense.default, aten.item.default)


@dataclass
class Input:
    """A placeholder: the expression that finds it before a replay, and what it is in words."""

    expression: str
    label: str
    node: fx.Node
    value: Any = None
    spec: Any = None


@dataclass
class Recorded:
    """The contents of a recording. `events` are the collectives that listeners are told, `written`
    the numbers of the storages that the step writes into."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[Input] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    guards: list[tuple[Any, bool]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    draws: bool = False


def finish(wait: Callable[[], None]) -> None:
    """Wait for a collective; a node of its own."""
    wait()


def set_random_state(state: torch.Tensor) -> None:
    """Set the state of PyTorch's CPU generator; a node of its own."""
    torch.set_rng_state(state)


class Recorder(DispatchMode):
    """Records into `seen`. `known` says where inputs come from, by the id of a tensor. Without
    `facts`, which take time, nodes get no shapes, memory and lines."""

    def __init__(self, known: Known, facts: bool) -> None:
        super().__init__()
        self._facts = facts
        self.seen = Recorded()
        self.graph = self.seen.graph
        self.stand_ins = StandIns()
        self.numbers: list[Number] = []
        self.used: set[int] = set()
        self.gives_number = False
        self._known = known
        self._by_memory = {memory_of(each[0]): each for each in reversed(known.values())}
        self._nodes: dict[int, tuple[Any, fx.Node]] = {}
        self._computed: dict[Any, fx.Node] = {}
        self._storages: dict[int, tuple[int, Any]] = {}
        self._names = itertools.count()
        self._root = self.graph.call_function(_begin)
        self._off = 0
        self._places: dict[int, tuple[str, int]] = {}
        self._states: dict[bytes, tuple[fx.Node, bool]] = {}
        self._state = b""
        self._note_state(self._root, False)

    # --- the ledger ----------------------------------------------------------------------------

    def refuse(self, reason: str) -> None:
        if not self._off:
            file, line = self._place()
            text = f"{file}:{line}" if line else "unknown line"
            self.seen.refusals.append(f"{reason}, at {text}{in_backward()}")

    def _place(self) -> tuple[str, int]:
        """The user's file and line; in a backward those of the forward."""
        return user_place(self._forward_place)

    def _forward_place(self) -> tuple[str, int] | None:
        node = autograd_node()
        return None if node is None else self._places.get(node._sequence_nr())

    def _keep_place(self, place: tuple[str, int] | None = None) -> None:
        """Keep the place of the autograd node that was made last."""
        number = next_node_number() - 1
        if number not in self._places and autograd_node() is None:
            self._places[number] = place or self._place()

    def _set_place(self, node: fx.Node) -> tuple[str, int] | None:
        """Note the place of a node, if facts are wanted."""
        if not self._facts:
            return None
        place = node.meta["line"] = self._place()
        return place

    def guard(self, node: fx.Node, truth: bool) -> None:
        self.seen.guards.append((node, truth))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    @property
    def is_paused(self) -> bool:
        return self._off > 0

    def number(self, expression: str, label: str, value: float) -> Any:
        """The symbol of a hyperparameter."""
        node = self._placeholder(expression, label, value)
        return Symbol(Number(self, node, value, True))

    # --- tensors and nodes ---------------------------------------------------------------------

    def _placeholder(
        self, expression: str, label: str, value: Any = None, spec: Any = None
    ) -> fx.Node:
        name = f"in_{len(self.seen.inputs)}"
        node = add_node(self.graph, name, name, (), {}, self._root)
        self.seen.inputs.append(Input(expression, label, node, value, spec))
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor; an input if the step did not make it."""
        return self._node(tensor) or self._keep_node(tensor, self._of_outside(tensor))

    def _node(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node of a tensor that was met before."""
        found = self._nodes.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _keep_node(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        self._nodes[id(tensor)] = weakref.ref(tensor), node
        return node

    def _of_outside(self, tensor: torch.Tensor) -> fx.Node:
        found = self._known.get(id(tensor))
        if found is not None:
            value, expression, label, spec = found
            return self._described(self._placeholder(expression, label, value, spec), tensor)
        base = self._by_memory.get(memory_of(tensor))
        if base is not None and base[0].dtype is tensor.dtype:
            place = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
            with self.graph.inserting_after(self._root):
                node = self.graph.call_function(
                    aten.as_strided.default, (self.node_of(base[0]), *place)
                )
            return self._described(node, tensor)
        self.refuse(
            f"the step uses a {tensor.dtype} tensor of shape {list(tensor.shape)} that is no "
            "argument, parameter, buffer or optimizer state, and that no variable holds; a value "
            "computed before the step would be used for ever. Pass it as an argument, or make it "
            "a buffer of a module"
        )
        return self._constant(tensor)

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        """A tensor that the step makes of Python numbers: a new copy in each replay."""
        place = len(self.seen.constants)
        self.seen.constants.append(tensor.detach().clone())
        held = self._placeholder(f"constants[{place}]", "a constant", self.seen.constants[-1])
        return self._described(self.graph.call_function(aten.clone.default, (held,)), tensor)

    def _memory(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The number of a tensor's storage, and its bytes."""
        storage = tensor.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is None:
            # A weak reference keeps the address from being given to another storage.
            found = len(self._storages), StorageWeakRef(storage)
            self._storages[storage._cdata] = found
        return found[0], storage.nbytes()

    def _described(
        self, node: fx.Node, tensor: torch.Tensor, place: tuple[str, int] | None = None
    ) -> fx.Node:
        if not self._facts:
            return node
        meta = node.meta
        meta["val"] = tuple(tensor.shape), tensor.stride(), tensor.dtype
        meta["device"], meta["memory"] = tensor.device, self._memory(tensor)
        meta["line"] = place or self._place()
        return node

    def _argument(self, value: Any) -> Any:
        """An argument of a call as an argument of a node."""
        if isinstance(value, torch.Tensor):
            return self._node(value) or self.node_of(value)
        if isinstance(value, (list, tuple)):
            return type(value)([self._argument(each) for each in value])
        number = self.stand_ins.number(value) if type(value) is float else None
        if number is not None:
            self.used.add(id(number))
            return number.fx_node
        return value

    def add_call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """Add a call to the graph."""
        return add_node(self.graph, f"n{next(self._names)}", target, args, kwargs or {})

    def computed(self, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        key = function, *[each if isinstance(each, fx.Node) else repr(each) for each in args]
        node = self._computed.get(key)
        if node is None:
            node = self._computed[key] = self.add_call(function, args)
        return node

    # --- calls ---------------------------------------------------------------------------------

    @untraced
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for kind in types:
            if _dispatches(kind):
                self._keep_place()
                return NotImplemented  # a DTensor: its local tensors come here again
        kwargs = kwargs or {}
        given, named = self.stand_ins.hints((args, kwargs))
        facts = _facts.get(id(func)) or _facts_of(func)
        if self._off or facts.is_ignored:
            return func(*given, **named)
        if facts.draws:
            self._before_draw(named.get("generator"))
        out = func(*given, **named)
        if _is_meta(args, out):
            return out
        if func is _LIFT and self._node(args[0]) is None:
            self._keep_node(out, self._constant(out))
            return out
        if facts.communicates or facts.reads_shape:
            self._refuse_call(func, facts, args)
        for at, name in facts.writes:
            self._write(args[at] if at < len(args) else kwargs.get(name))
        nodes = tuple([self._argument(each) for each in args])
        node = self.add_call(
            func, nodes, kwargs and {n: self._argument(v) for n, v in kwargs.items()}
        )
        place = self._set_place(node)
        node.meta["grad"] = torch.is_grad_enabled()
        self._keep_place(place)
        if facts.draws:
            self._note_state(node, True)
        return self._result(func, node, out, place)

    def _result(self, func: Any, node: fx.Node, out: Any, line: tuple[str, int] | None) -> Any:
        """The result of a call, with its node; a float that is read becomes a symbol."""
        if isinstance(out, torch.Tensor):
            if self._node(out) is None:  # else it was written in place
                self._keep_node(out, self._described(node, out, line))
        elif isinstance(out, (list, tuple)):
            for place, each in enumerate(out):
                if isinstance(each, torch.Tensor) and self._node(each) is None:
                    item = self.add_call(operator.getitem, (node, place))
                    self._keep_node(each, self._described(item, each, line))
        elif func in _ITEMS and type(out) is float:
            if self.gives_number:
                return Symbol(Number(self, node, out, False))
            self.refuse("the step turns a value of a tensor into a Python number")
        elif out is not None and node.all_input_nodes:
            self.refuse(f"the step reads a value of a tensor (by {func})")
        return out

    def _refuse_call(self, func: Any, facts: _Facts, args: Sequence[Any]) -> None:
        if facts.communicates:
            self.refuse(
                f"the step calls a collective of torch.distributed itself ({func}). Let DTensors "
                "communicate: x.redistribute(...) or x.full_tensor()"
            )
        if facts.reads_shape:
            masks = func is not aten.index.Tensor or any(
                isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
                for each in args[1]
            )
            if masks:
                self.refuse(f"the shape of what {func} gives depends on values")

    def _write(self, value: Any) -> None:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                self.seen.written.add(memory_of(each))

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Record a call of a recordable function."""
        if self._off:
            return function(*args)
        draws: bool = function.draws  # type: ignore[attr-defined]
        if draws:
            self._before_draw(next((a for a in args if isinstance(a, torch.Generator)), None))
        for place in function.writes:  # type: ignore[attr-defined]
            self._write(args[place])
        nodes = tuple([self._argument(a) for a in args])
        with self.paused():
            made = function(*self.stand_ins.hints(tuple(args)))
        node = self.add_call(function, nodes)
        self._set_place(node)
        if draws:
            self._note_state(node, True)
        return None if made is None else partial(self._wait, made, node, [])

    def _wait(self, wait: Callable[[], None], node: fx.Node, done: list[bool]) -> None:
        with self.paused():
            wait()
        if not done:
            self._set_place(self.add_call(finish, (node,)))
            done.append(True)

    # --- random numbers ------------------------------------------------------------------------

    def _note_state(self, node: fx.Node, draws: bool) -> None:
        """Remember the state of the generator as it is after a node."""
        self._state = self._random_state()
        self._states.setdefault(self._state, (node, True))
        self.seen.draws |= draws

    def _random_state(self) -> bytes:
        with self.paused():
            return torch.get_rng_state().numpy().tobytes()

    def _before_draw(self, generator: torch.Generator | None) -> None:
        """Record that the state was set since the last draw, as activation checkpointing does."""
        if generator is not None:
            if all(generator is not each for each in self.seen.generators):
                self.seen.generators.append(generator)
            return
        self.restore_state()

    def restore_state(self) -> None:
        """Record that somebody has set the generator's state, if it is not what draws have left."""
        now = self._random_state()
        if now == self._state:
            return
        node, _ = self._states.get(now, (None, True))
        if node is None:
            state = self._constant(torch.get_rng_state())
        else:
            with self.graph.inserting_after(node):
                state = self.graph.call_function(torch.get_rng_state)
        self.graph.call_function(set_random_state, (state,))
        self._state = now
        self.seen.draws = True


def _begin() -> None:
    """The first node: what is found out about the state before the step is put after it."""


class _Facts(NamedTuple):
    """The properties of an operator; `writes` are places and names of arguments."""

    operator: Any
    is_ignored: bool
    draws: bool
    communicates: bool
    reads_shape: bool
    writes: Sequence[tuple[int, str]]


_facts: dict[int, _Facts] = {}
"""By the id of an operator, which lives as long as its facts: no other gets its id."""


def _facts_of(func: Any) -> _Facts:
    found = _facts[id(func)] = _Facts(
        operator=func,
        is_ignored=func.namespace == "profiler",
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        communicates=func.namespace in ("c10d", "_c10d_functional"),
        reads_shape=torch.Tag.dynamic_output_shape in func.tags,
        writes=[
            (place, argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ],
    )
    return found


@cache
def _dispatches(kind: type) -> bool:
    """True for a class of tensors with operators of its own."""
    own = [each for each in kind.__mro__ if each not in torch.Tensor.__mro__]
    return any("__torch_dispatch__" in vars(each) for each in own)


def _is_meta(args: Sequence[Any], out: Any) -> bool:
    """True for a call that asks for shapes only."""
    first = out[0] if isinstance(out, (list, tuple)) and out else out
    if isinstance(first, torch.Tensor):
        return first.is_meta
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta


class _Functions(TorchFunctionMode):
    """Gives PyTorch's functions stand-ins for symbols, and sees what reads values."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder, name = self._recorder, getattr(func, "__name__", "")
        if recorder._off or name == "__get__":  # most calls are of attributes
            return func(*args, **kwargs)
        if name in _READS:
            recorder.refuse(f"the step reads values of a tensor (by {name})")
        (given, named), numbers = recorder.stand_ins.put((args, kwargs))
        for number in numbers:
            recorder.used.discard(id(number))
        recorder.gives_number = name == "item"
        made = func(*given, **named)
        recorder.gives_number = False
        if type(made) is torch.SymFloat:  # a symbol that went through C++
            made = Symbol(made.node)
        for number in numbers:
            if id(number) not in recorder.used:
                recorder.refuse(f"a number goes into {name}, which does not pass it on")
        return made


@contextmanager
def recording(known: Known, facts: bool) -> Iterator[Recorder]:
    """Record what this thread does, with facts about nodes or without."""
    if recorder() is not None:
        raise CaptureError(
            "a captured step was called while another one is recorded. Call the function itself "
            "inside a captured step, and capture the outermost one alone."
        )
    made = Recorder(known, facts)

    def heard(*event: Any) -> None:
        if not made.is_paused:
            made.seen.events.append(event)

    listeners.append(heard)
    set_recorder(made)
    try:
        with ExitStack() as stack:
            for each in (_Functions(made), made):
                stack.enter_context(each)
            yield made
            made.restore_state()
    finally:
        set_recorder(None)
        listeners.remove(heard)
        for number in made.numbers:
            number.ledger = None
