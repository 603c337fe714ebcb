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
from ..comm.failures import report
from ..errors import LayoutError
from ..layout.mesh import Topology
from ..layout.spec import DTensorSpec
from ..redistribute.execute import Run, run_all
from ..redistribute.prepare import prepared
from ..rules import Call, Operand
from ..rules.pointwise import pointwise
from ..storage import policy
from ..storage.operands import (
    all_in_layout,
    announce_moves,
    mark_written,
    mark_written_in_layout,
)
from ..storage.plain import adopt_all, bring_number, check_plain
from ..storage.wrapper import Locals, Plain, Wrapper, wrap
from .cache import kept, number_key, plan_bytes
from .decide import decide
from .fallback import fallback_form
from .infer import infer
from .out_variants import out_form
from .plans import Plan, filled, tensors_in
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


def list_form(op: OpOverload, outs: Sequence[str]) -> ListForm | None:
    """The function that runs instead of a list operator that is not pointwise; None if it is."""
    if outs:
        return partial(_run_out, out_form(op, outs))
    found = LIST_FORMS.get(op._schema.name.split("::")[-1])
    if found is not None:
        return partial(found, op)
    by_vector = op._overloadname == "Tensor" and op._schema.arguments[-1].name == "scalars"
    if by_vector or len(op._schema.returns) > 1:  # nobody's optimizer
        return fallback_form(op)
    return None


def _run_out(run: ListForm, *args: Any, **kwargs: Any) -> None:
    run(*args, **kwargs)


def is_list_op(op: OpOverload) -> bool:
    """True if an operator takes lists of tensors and works on each element by itself."""
    name = op._schema.name.split("::")[-1]
    if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return False
    return any(str(argument.type) == "List[Tensor]" for argument in op._schema.arguments)


class _Listing:
    """Where the operands are: a list argument has one per element, a single tensor serves all."""

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

    def check(self) -> None:
        """All lists have one length, which is not 0."""
        if not self.lists:
            raise RuntimeError("Tensor list must have at least one tensor.")
        if len({len(ids) for ids in self.lists.values()}) > 1:
            given = " and ".join(str(len(ids)) for ids in self.lists.values())
            raise RuntimeError(f"Tensor lists must have the same number of tensors, got {given}")

    def operands(self, index: int) -> list[int]:
        """The operands of one element, in the order of the arguments."""
        return [*(ids[index] for ids in self.lists.values()), *self.shared.values()]

    def written(self, writes: Sequence[int]) -> list[int]:
        """The operands in the lists that are the arguments at `writes`."""
        return [i for place in writes for i in self.lists.get(place, ())]

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
        op: Any,
        listing: _Listing,
        specs: Sequence[DTensorSpec],
        inputs: Sequence[Sequence[DTensorSpec]],
        outputs: Sequence[DTensorSpec],
        written: frozenset[int],
    ) -> None:
        super().__init__()
        self._op = op
        self._listing = listing
        self._outputs = tuple(outputs)
        self._written = written
        operands = [listing.operands(index) for index in range(listing.length)]
        pairs = [
            list(zip(ids, own, strict=True)) for ids, own in zip(operands, inputs, strict=True)
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

    def set_quick(
        self, operands: Sequence[Any], writes: Sequence[int], args: Sequence[Any]
    ) -> None:
        """Make `quick(args, kwargs)`, if there is one local call and all operands can stay.

        `writes` are the arguments that are written.
        """
        device = next(o.device for o in operands if isinstance(o, Wrapper))
        call = _local_call(self._op, device, {o._spec.dtype for o in operands}, args)
        outputs = wrappings(self._outputs, device)
        every, shared = self._listing.lists, tuple(self._listing.shared)
        lists = [name for name, ids in every.items() if isinstance(operands[ids.start], Wrapper)]
        writes = [place for place in writes if place in lists]
        sums = any(operands[i]._spec.sums for i in self._written)
        named = any(isinstance(name, str) for name in (*lists, *shared))
        if not self.is_local or len(self._sites) != 1 or named:
            return

        def run(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
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
            return wrap_each(outputs, values) if outputs else None

        self.quick = run

    def run(self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        announce_moves(self._op, self._moves, operands)
        local = [operand._locals for operand in operands]
        wanted = [(operands[i], spec, i in self._written) for i, spec in self._moves]
        for (index, _), made in zip(self._moves, all_in_layout(wanted), strict=True):
            local[index] = made
        results: list[list[Any]] = [[] for _ in self._outputs]
        for indices, slots in self._sites:
            here = {i: local[i][slot] for i, slot in slots}
            given, named = self._listing.chosen(args, kwargs, indices, here)
            values = self._op._op(*given, **named)
            for index, value in zip(indices, values or (), strict=False):
                results[index].append(value)
        if results:
            pairs = zip(self._outputs, results, strict=True)
            return [wrap(spec, tuple(made)) for spec, made in pairs]
        self._write_back(operands, local)
        return None

    def _write_back(self, operands: Sequence[Any], local: list[Locals]) -> None:
        """Written operands hold their results; those that were moved are moved back."""
        moves = {index: spec for index, spec in self._moves if index in self._written}
        back = run_all(
            [Run(prepared(spec, operands[i]._spec), local[i]) for i, spec in moves.items()]
        )
        for index, ready in zip(moves, back, strict=True):
            for mine, new in zip(operands[index]._locals, ready(), strict=True):
                mine.copy_(new)
            mark_written_in_layout(operands[index], moves[index], local[index])
        for index in self._written - moves.keys():
            mark_written(operands[index])


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


def run_list(entry: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a list operator, and let autograd know what it wrote into."""
    form = entry.list_form
    found = None if form is not None else entry.plans.get(_key(args, kwargs))
    if form is not None:
        made = form(*args, **kwargs)
    elif found is not None and found.quick is not None:
        try:
            made = found.quick(args, kwargs)
        except BaseException as error:
            report(error, args[0][0]._spec.topology)
            raise
    else:
        made = _run_list(entry, args, kwargs)
    # Plain tensors learn of it from the operators that `_foreach_*` is made of, below this level;
    # without it a view keeps its gradient's old formula, and a saved value is not known as stale.
    if entry.written is not None and entry.op.__name__.startswith("_foreach_"):
        increment_version(args[entry.written])
    return made


def _key(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a call: all that its plan depends on.

    No plan is kept under the key of a call with plain tensors, unless they are numbers: it is found
    once they are adopted.
    """
    return (
        torch.get_default_dtype(),
        *map(_part, args),
        *kwargs,
        *map(_part, kwargs.values()),
    )


def _part(value: Any) -> Any:
    """The part of an argument that a plan depends on."""
    kind = type(value)
    if kind is list:
        kinds = {*map(type, value)}
        if len(kinds) == 1 and Wrapper.public in kinds:
            return tuple([tensor._spec for tensor in value])
        if kinds == {float}:
            least = number_key(min(value))
            # Numbers between two that are alike are as these are; NaN is between none.
            if least == number_key(max(value)) and not isnan(sum(value)):
                return len(value), least
        numbers = _numbers(value) if kinds in ({Plain}, {torch.Tensor}) else None
        return tuple(map(_part, value)) if numbers is None else numbers
    if kind in (int, float, complex):
        return number_key(value)
    if isinstance(value, (Wrapper, Plain)):
        return kind, value._spec
    return kind if isinstance(value, torch.Tensor) else value


def _numbers(values: Sequence[Any]) -> Any:
    """The part of a key for plain tensors that are numbers, and need no look; None for others."""
    if type(values[0]) is Plain:
        values = [value._locals[0] for value in values]
    dtypes = tuple([value.dtype for value in values])
    special = any(value.dim() or value.requires_grad for value in values)
    if special or any(dtype.is_complex for dtype in {*dtypes}):
        return None
    return Plain, dtypes, policy.current().plain == "error"


def _run_list(entry: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a list operator, with one plan for the elements on each mesh."""
    op = entry.op
    listing = _Listing(args, kwargs)
    listing.check()
    tensors = list(tensors_in(args, kwargs))
    written: list[Any] = [tensors[i] for i in listing.written(entry.writes)]
    if any(map(is_deferred, written)):
        return _one_by_one(op, entry.writes, listing, args, kwargs)
    if any(isinstance(t, Wrapper) and t._spec.meta.overlaps for t in written):
        return fallback_form(op)(*args, **kwargs)  # as of a single operator: see choose.py
    found = [t._spec.topology if isinstance(t, Wrapper) else None for t in tensors]
    first = next(iter(listing.lists.values()))
    mesh = found[first.start]
    if mesh is not None and {*found} <= {mesh, None} and None not in found[: first.stop]:
        return _run_on(entry, mesh, listing, tensors, args, kwargs)
    # An element's mesh is that of its own operands, for a shared one serves all meshes.
    owns = [[found[ids[i]] for ids in listing.lists.values()] for i in range(listing.length)]
    meshes = [next(filter(None, own), None) for own in owns]
    results: list[Any] = [None] * listing.length
    for mesh, indices in _grouped(meshes).items():
        given, named = listing.chosen(args, kwargs, indices)
        given = [_at_home(op, value, mesh) for value in given]
        named = {name: _at_home(op, value, mesh) for name, value in named.items()}
        if mesh is None:
            made = op(*given, **named)
        else:
            own = _Listing(given, named)
            made = _run_on(entry, mesh, own, list(tensors_in(given, named)), given, named)
        for index, value in zip(indices, made or (), strict=False):
            results[index] = value
    return results if op._schema.returns else None


def by_mesh(tensors: Sequence[Any]) -> dict[Topology | None, list[int]]:
    """The places of the tensors of each mesh in a list; None is for plain tensors."""
    return _grouped([t._spec.topology if isinstance(t, Wrapper) else None for t in tensors])


def _grouped(meshes: Sequence[Topology | None]) -> dict[Topology | None, list[int]]:
    every = dict.fromkeys(meshes)  # in order: all ranks take them in the same one
    return {mesh: [i for i, own in enumerate(meshes) if own is mesh] for mesh in every}


def _at_home(op: OpOverload, value: Any, mesh: Topology | None) -> Any:
    """A number that serves the whole list is known to every rank, whatever mesh it was made on."""
    if not isinstance(value, Wrapper) or value._spec.topology is mesh:
        return value
    if value._spec.ndim:
        raise LayoutError(
            f"{op}: {value._spec} serves elements that are not on its mesh. Give a 0-d tensor, or "
            "a call for each mesh."
        )
    return bring_number(value, mesh)


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


def _run_on(
    entry: Any,
    mesh: Topology,
    listing: _Listing,
    tensors: Sequence[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    operands = adopt_all(entry.op, tensors, mesh)
    key = _key(*filled(args, kwargs, iter(operands)))
    found = entry.plans.get(key)
    if found is None:
        found = _build(entry, mesh, listing, operands, args, kwargs)
        kept.put(entry.plans, key, found, plan_bytes(operands))
    several = entry.writes and listing.length > 1
    reads_first = not found.is_local or any(map(is_deferred, tensors))
    if several and reads_first and _share_memory(tensors):
        return _one_by_one(entry.op, entry.writes, listing, args, kwargs)
    plain = any(isinstance(operand, Plain) for operand in operands)
    if plain and (not found.plain_checked or policy.current().plain == "check_always"):
        found.plain_checked = check_plain(entry.op, entry.write_only_args, operands, args, kwargs)
    try:
        return found.run(operands, args, kwargs)
    except BaseException as error:
        report(error, mesh)  # as of a single operator: it is this rank's alone
        raise


def _build(
    entry: Any,
    mesh: Topology,
    listing: _Listing,
    operands: Sequence[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> ListPlan:
    op = entry.op
    specs = [operand._spec for operand in operands]
    for spec in specs:
        if spec.topology is not mesh:
            raise LayoutError(f"{op}: an element has operands on different meshes: {spec}, {mesh}.")
    written = [i for i in listing.written(entry.writes) if isinstance(operands[i], Wrapper)]
    returns = bool(op._schema.returns)
    metas = infer(op, args, kwargs, specs)[0] if returns else ()
    inputs: list[Sequence[DTensorSpec]] = []
    outputs: list[DTensorSpec] = []
    for index in range(listing.length):
        own = [specs[i] for i in listing.operands(index)]
        result = metas[index] if returns else own[0].meta
        call = Call(op, *listing.element(args, kwargs, index), own, [result])
        rule = pointwise(call)
        # Operands that serve all elements are never Partial.
        linear = [group for group in rule.linear if max(group) < len(listing.lists)]
        decision = decide(replace(rule, linear=tuple(linear)), call, None if returns else 0)
        inputs.append(decision.inputs)
        outputs += decision.outputs if returns else ()
    made = ListPlan(op, listing, specs, inputs, outputs, frozenset(written))
    lists = [{*map(type, operands[ids.start : ids.stop])} for ids in listing.lists.values()]
    usual = all(kinds in ({Wrapper.public}, {Plain}) for kinds in lists)
    if usual and all(type(operands[i]) is Wrapper.public for i in listing.shared.values()):
        made.set_quick(operands, entry.writes, args)
    return made
