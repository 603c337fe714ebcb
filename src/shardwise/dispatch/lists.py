"""List operators: `_foreach_*` and `_fused_*` have one plan for the list and one local call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from math import isnan
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .._torch import OpOverload, local_function, modes_of_thread, new_wrapper, wrapper_arguments
from ..layout.mesh import Topology
from ..layout.spec import DTensorSpec
from ..rules import Call, Operand
from ..rules.pointwise import pointwise
from ..storage import policy
from ..storage.operands import (
    all_in_layout,
    announce_moves,
    mark_written,
    write_back,
)
from ..storage.plain import bring_number
from ..storage.wrapper import Plain, Wrapper, wrap
from .cache import number_key
from .decide import decide
from .fallback import fallback_form
from .infer import infer
from .plans import Plan, tensors_in
from .views import is_deferred, own_value, put_back

ListForm = Callable[..., Any]
LIST_FORMS: dict[str, ListForm] = {}
"""By name: list operators that are not pointwise on each element."""


def register_list_form(name: str) -> Callable[[ListForm], ListForm]:
    """Register a function `form(op, *args, **kwargs)` in place of all overloads of a list
    operator."""

    def register(form: ListForm) -> ListForm:
        LIST_FORMS[name] = form
        return form

    return register


def list_form(op: OpOverload) -> ListForm | None:
    """The function that runs instead of a list operator that is not pointwise; None if it is."""
    found = LIST_FORMS.get(op._schema.name.split("::")[-1])
    if found is not None:
        return partial(found, op)
    by_vector = op._overloadname == "Tensor" and op._schema.arguments[-1].name == "scalars"
    if by_vector or len(op._schema.returns) > 1:  # nobody's optimizer
        return fallback_form(op)
    return None


def is_list_op(op: OpOverload) -> bool:
    """True if an operator takes lists of tensors and works on each element by itself."""
    name = op._schema.name.split("::")[-1]
    if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return False
    return any(str(argument.type) == "List[Tensor]" for argument in op._schema.arguments)


class _Listing:
    """Where the operands are: a list argument has one per element, a single tensor serves all.

    All lists have one length, which is not 0.
    """

    __slots__ = ("length", "lists", "shared")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.lists: dict[Any, range] = {}
        self.shared: dict[Any, int] = {}
        self.length = count = 0
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                self.shared[name] = count
                count += 1
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                self.lists[name] = range(count, count + len(value))
                self.length = max(self.length, len(value))
                count += len(value)
        if not self.lists:
            raise RuntimeError("Tensor list must have at least one tensor.")
        if len({len(ids) for ids in self.lists.values()}) > 1:
            given = " and ".join(str(len(ids)) for ids in self.lists.values())
            raise RuntimeError(f"Tensor lists must have the same number of tensors, got {given}")

    def operands(self, index: int) -> list[int]:
        """The operands of one element, in the order of the arguments."""
        return [*(ids[index] for ids in self.lists.values()), *self.shared.values()]

    def chosen(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        indices: Sequence[int],
        local: Mapping[int, Any] | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with lists cut down to `indices`, tensors replaced by `local` if given."""

        def choose(name: Any, value: Any) -> Any:
            ids = self.lists.get(name)
            if ids is not None:
                return [value[i] if local is None else local[ids[i]] for i in indices]
            if name in self.shared:
                return value if local is None else local[self.shared[name]]
            if isinstance(value, (list, tuple)) and len(value) == self.length:
                return [value[i] for i in indices]
            return value

        given = [choose(index, value) for index, value in enumerate(args)]
        return given, {name: choose(name, value) for name, value in kwargs.items()}

    def element(
        self, args: Sequence[Any], kwargs: dict[str, Any], index: int
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one element, with its tensors replaced by symbols."""
        symbols = {i: Operand(place) for place, i in enumerate(self.operands(index))}
        given, named = self.chosen(args, kwargs, [index], symbols)

        def alone(value: Any) -> Any:
            return value[0] if isinstance(value, list) and len(value) == 1 else value

        return list(map(alone, given)), {name: alone(value) for name, value in named.items()}


class ListPlan(Plan):
    """The plan of a list operator: one local call on the local tensors of all elements.

    `inputs` and `outputs` are the layouts of each element's operands and results.
    """

    def __init__(
        self,
        entry: Any,
        listing: _Listing,
        specs: Sequence[DTensorSpec],
        inputs: Sequence[Sequence[DTensorSpec]],
        outputs: Sequence[DTensorSpec],
        written: frozenset[int],
    ) -> None:
        super().__init__()
        self._entry = entry
        self._op = entry.op
        self._listing = listing
        self.outs = tuple(outputs)
        self._written = written
        pairs = [
            list(zip(listing.operands(index), own, strict=True)) for index, own in enumerate(inputs)
        ]
        self._moves = [(i, dst) for own in pairs for i, dst in own if specs[i] is not dst]
        self.is_local = not self._moves
        topology = specs[0].topology
        axes = [
            {axis for spec in (*own, *outputs[i : i + 1]) for axis in spec.slot_axes}
            for i, own in enumerate(inputs)
        ]
        self._sites: list[tuple[list[int], list[tuple[int, int]]]] = []
        for coord in topology.coords_here(sorted(set().union(*axes))):
            # On a virtual mesh an element runs once for all coordinates that differ in other axes.
            indices = [
                index
                for index, own in enumerate(axes)
                if not (topology.virtual and any(c and a not in own for a, c in enumerate(coord)))
            ]
            slots = [(i, spec.slot(coord)) for index in indices for i, spec in pairs[index]]
            self._sites += [(indices, slots)] if indices else []

    def set_quick(self, operands: Sequence[Any], args: Sequence[Any]) -> None:
        """Make `quick`, if there is one local call and all operands can stay."""
        device = next(o.device for o in operands if isinstance(o, Wrapper))
        call = _local_call(self._op, device, {o._spec.dtype for o in operands}, args)
        outputs = wrappings(self.outs, device)
        every, shared = self._listing.lists, tuple(self._listing.shared)
        lists = [name for name, ids in every.items() if isinstance(operands[ids.start], Wrapper)]
        entry = self._entry
        writes = [place for place in entry.writes if place in lists]
        sums = any(operands[i]._spec.sums for i in self._written)
        named = any(isinstance(name, str) for name in (*lists, *shared))
        if not self.is_local or len(self._sites) != 1 or named:
            return

        def run(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            given = [*args]
            for place in lists:
                given[place] = [tensor._locals[0] for tensor in given[place]]
            for place in shared:
                given[place] = given[place]._locals[0]
            values = call(*given, **kwargs)
            for place in writes:
                for tensor in args[place]:
                    if tensor._cell is not None:
                        tensor._cell.writes += 1
                if sums:
                    any(map(mark_written, args[place]))
            note_writes(entry, args)
            return wrap_each(outputs, values) if outputs else None

        self.quick = run

    def run(self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        writes, tensors = self._entry.writes, list(tensors_in(args, kwargs))
        deferred = {i for i, tensor in enumerate(tensors) if is_deferred(tensor)}
        several = writes and self._listing.length > 1 and (deferred or not self.is_local)
        if deferred & self._written or (several and _share_memory(tensors)):
            return _one_by_one(self._op, writes, self._listing, args, kwargs)
        announce_moves(self._op, self._moves, operands)
        local = [operand._locals for operand in operands]
        wanted = [(operands[i], spec, i in self._written) for i, spec in self._moves]
        for (index, _), made in zip(self._moves, all_in_layout(wanted), strict=True):
            local[index] = made
        results: list[list[Any]] = [[] for _ in self.outs]
        for indices, slots in self._sites:
            here = {i: local[i][slot] for i, slot in slots}
            given, named = self._listing.chosen(args, kwargs, indices, here)
            values = self._op._op(*given, **named)
            for index, value in zip(indices, values or (), strict=False):
                results[index].append(value)
        if results:
            pairs = zip(self.outs, results, strict=True)
            return [wrap(spec, tuple(made)) for spec, made in pairs]
        moves = dict(self._moves)
        for index in sorted(self._written):
            write_back(operands[index], moves.get(index), local[index])
        return None


_NUMBERED = frozenset(
    f"aten::_foreach_{name}.{overload}"
    for name in ("add", "add_", "mul", "mul_", "div", "div_")
    for overload in ("Scalar", "ScalarList")
)
_ORDINARY = (float, (float, None))
"""The keys of numbers that are finite in single precision."""


def _local_call(
    op: OpOverload, device: torch.device, dtypes: Set[torch.dtype], args: Sequence[Any]
) -> Callable[..., Any]:
    """The function that runs a list operator on local tensors.

    On CPU PyTorch turns a number into a tensor again for each element, and casts it to the dtype of
    the element. Where all elements have one dtype that is done before, with the same values.
    """
    call: Callable[..., Any] = local_function(op)
    if device.type != "cpu" or op.name() not in _NUMBERED or len(args) != 2:
        return call
    numbers = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    ordinary = all(number_key(number) in _ORDINARY for number in numbers)
    if not ordinary or dtypes not in ({torch.float32}, {torch.float64}):
        return call
    (dtype,) = dtypes
    named = {"alpha": 1} if "_add" in op.name() else {}  # else it takes the tensor for a number

    def run(tensors: list[torch.Tensor], number: Any) -> Any:
        if modes_of_thread():  # they record numbers
            return call(tensors, number)
        made = torch.tensor(number, dtype=dtype, device=device)
        return call(tensors, made.unbind() if made.ndim else made, **named)

    return run


Wrapping = tuple[DTensorSpec, tuple[Any, ...]]


def wrappings(specs: Sequence[DTensorSpec], device: torch.device) -> list[Wrapping]:
    """The arguments of `wrap_each` for tensors of one local tensor each."""
    kind = Wrapper.public
    return [(spec, wrapper_arguments(kind, *spec.meta, device)) for spec in specs]


def wrap_each(how: Sequence[Wrapping], values: Sequence[torch.Tensor]) -> list[Any]:
    """DTensors of one local tensor each."""
    made: list[Any] = [new_wrapper(*arguments) for _, arguments in how]
    for new, (spec, _), value in zip(made, how, values, strict=True):
        new._spec = spec
        new._locals = (value,)
    return made


def run_list_form(entry: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the function that stands for a list operator."""
    made = entry.list_form(*args, **kwargs)
    note_writes(entry, args)
    return made


def note_writes(entry: Any, args: Sequence[Any]) -> None:
    """Let autograd know what a list operator wrote into.

    Plain tensors learn of it from the operators that `_foreach_*` is made of, below this level;
    without it a view keeps its gradient's old formula, and a saved value is not known as stale.
    """
    if entry.written is not None and entry.op.__name__.startswith("_foreach_"):
        increment_version(args[entry.written])


def list_key(values: Sequence[Any], kinds: Set[type]) -> Any:
    """The part of a key for a list of numbers: floats, or plain tensors that need no look. None for
    other values."""
    if kinds == {float}:
        least = number_key(min(values))
        # Numbers between two that are alike are as these are; NaN is between none.
        alike = least == number_key(max(values)) and not isnan(sum(values))
        return (len(values), least) if alike else None
    if kinds != {torch.Tensor}:
        return None
    dtypes = tuple([value.dtype for value in values])
    special = any(value.dim() or value.requires_grad for value in values)
    if special or any(dtype.is_complex for dtype in {*dtypes}):
        return None
    return Plain, dtypes, policy.current().plain == "error"


def _meshes(listing: _Listing, tensors: Sequence[Any]) -> list[Topology | None]:
    """The mesh of each element, that of its own operands: a shared one serves all meshes. None if
    they are plain."""
    found = [t._spec.topology if isinstance(t, Wrapper) else None for t in tensors]
    owns = [[found[ids[i]] for ids in listing.lists.values()] for i in range(listing.length)]
    return [next(filter(None, own), None) for own in owns]


def is_mixed(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if the elements of the lists are not all on one mesh."""
    meshes = {*_meshes(_Listing(args, kwargs), list(tensors_in(args, kwargs)))}
    return len(meshes) > 1 or None in meshes


def run_each(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run a list operator once for the elements on each mesh, and once for those that are plain."""
    listing = _Listing(args, kwargs)
    results: list[Any] = [None] * listing.length
    meshes = _meshes(listing, list(tensors_in(args, kwargs)))
    for mesh in dict.fromkeys(meshes):  # in order: all ranks take them in the same one
        indices = [i for i, own in enumerate(meshes) if own is mesh]
        given, named = listing.chosen(args, kwargs, indices)
        if mesh is None:  # a number that serves all is plain beside them
            given = [bring_number(value, mesh) for value in given]
            named = {name: bring_number(value, mesh) for name, value in named.items()}
        for index, value in zip(indices, op(*given, **named) or (), strict=False):
            results[index] = value
    return results if op._schema.returns else None


def _share_memory(tensors: Sequence[Any]) -> bool:
    """True if two of the tensors may be the same memory."""
    cells = [getattr(tensor, "_cell", None) for tensor in tensors]
    memory = {id(t if c is None else c) for t, c in zip(tensors, cells, strict=True)}
    return len(memory) < len(tensors)


def _one_by_one(
    op: OpOverload,
    writes: Sequence[int],
    listing: _Listing,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    """Write element by element into lists whose elements may share memory."""
    for index in range(listing.length):
        given, named = listing.chosen(args, kwargs, [index])
        views = {n: given[n][0] for n in writes if n in listing.lists and is_deferred(given[n][0])}
        for place, view in views.items():
            given[place] = [own_value(op, view)]
        op(*given, **named)
        for place, view in views.items():
            put_back(view, given[place][0])


def _check_shapes(op: OpOverload, shapes: Sequence[tuple[int, ...]]) -> None:
    """An error if operands do not broadcast to the first, which is written; shards still may."""
    made = tuple(torch.broadcast_shapes(*shapes))
    if made != shapes[0] and op.__name__.startswith("_foreach_"):
        raise RuntimeError(
            f"output with shape {list(shapes[0])} doesn't match the broadcast shape {list(made)}"
        )


def list_plan(
    entry: Any, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Plan:
    """The plan of a list operator, of which all operands are on one mesh."""
    op, listing = entry.op, _Listing(args, kwargs)
    specs = [operand._spec for operand in operands]
    every = [i for place in entry.writes for i in listing.lists.get(place, ())]
    written = frozenset(i for i in every if isinstance(operands[i], Wrapper))
    returns = bool(op._schema.returns)
    metas = infer(op, args, kwargs, specs)[0] if returns else ()
    inputs: list[Sequence[DTensorSpec]] = []
    outputs: list[DTensorSpec] = []
    for index in range(listing.length):
        own = [specs[i] for i in listing.operands(index)]
        result = metas[index] if returns else own[0].meta
        if not returns:
            _check_shapes(op, [spec.meta.shape for spec in own[: len(listing.lists)]])
        call = Call(op, *listing.element(args, kwargs, index), own, [result])
        rule = pointwise(call)
        # Operands that serve all elements are never Partial.
        linear = [group for group in rule.linear if max(group) < len(listing.lists)]
        decision = decide(replace(rule, linear=tuple(linear)), call, None if returns else 0)
        inputs.append(decision.inputs)
        outputs += decision.outputs if returns else ()
    made = ListPlan(entry, listing, specs, inputs, outputs, written)
    lists = [{*map(type, operands[ids.start : ids.stop])} for ids in listing.lists.values()]
    usual = all(kinds in ({Wrapper.public}, {Plain}) for kinds in lists)
    if usual and all(type(operands[i]) is Wrapper.public for i in listing.shared.values()):
        made.set_quick(operands, args)
    return made
