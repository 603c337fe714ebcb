"""List operators: `_foreach_*` and `_fused_*` have one plan for the list and one local call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .._torch import OpOverload
from ..comm import report
from ..errors import LayoutError
from ..layout.mesh import Topology
from ..rules import Call, Operand, Rule
from ..rules.call import LEAST, MOST
from ..rules.pointwise import pointwise
from ..storage import policy
from ..storage.plain import adopt, bring_grads_back, check_plain, full_local
from ..storage.wrapper import Plain, Wrapper
from .cache import kept, plan_bytes
from .decide import decide
from .infer import infer
from .listplan import Element, ListPlan
from .out_variants import functional_of, give_shape
from .views import is_deferred, own_value, put_back

__all__ = ["LIST_FORMS", "by_mesh", "is_list_op", "register_list_form", "run_list"]


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


def is_list_op(op: OpOverload) -> bool:
    """Whether an operator takes lists of tensors and works on each element apart."""
    name = op._schema.name.split("::")[-1]
    if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return False
    return any(str(argument.type) == "List[Tensor]" for argument in op._schema.arguments)


class _Listing:
    """Which operand stands where: a list argument has one per element, a single tensor serves
    all."""

    __slots__ = ("length", "lists", "shared", "tensors")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.lists: dict[Any, list[int]] = {}
        self.shared: dict[Any, int] = {}
        self.length = 0
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                self.shared[name] = len(self.tensors)
                self.tensors.append(value)
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                self.lists[name] = list(range(len(self.tensors), len(self.tensors) + len(value)))
                self.tensors.extend(value)
                self.length = max(self.length, len(value))

    def check(self) -> None:
        """All lists have one length, which is not 0."""
        if not self.lists:
            raise RuntimeError("Tensor list must have at least one tensor.")
        lengths = {len(ids) for ids in self.lists.values()}
        if len(lengths) > 1:
            given = " and ".join(map(str, (len(ids) for ids in self.lists.values())))
            raise RuntimeError(f"Tensor lists must have the same number of tensors, got {given}")

    def operands(self, index: int) -> list[int]:
        """The operands of one element, in the order of the arguments."""
        own = [ids[index] for ids in self.lists.values()]
        return [*own, *self.shared.values()]


def run_list(entry: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a list operator, and let autograd know what it wrote into."""
    made = _run_list(entry, args, kwargs)
    # Plain tensors learn of it from the operators that `_foreach_*` is made of, below this level;
    # without it a view keeps its gradient's old formula, and a saved value is not known as stale.
    if entry.writes and entry.op._schema.name.startswith("aten::_foreach_"):
        written = [t for n in entry.writes if n < len(args) for t in args[n]]
        increment_version([t for t in written if not t.is_inference()])
    return made


def _run_list(entry: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Elements on different meshes apart, each mesh's with one plan."""
    op = entry.op
    if entry.outs:
        return _into_out(op, args, kwargs)
    form = LIST_FORMS.get(op._schema.name.split("::")[-1])
    if form is not None:
        return form(op, *args, **kwargs)
    if len(op._schema.returns) > 1:
        return _functional(op, args, kwargs)
    if op._overloadname == "Tensor" and op._schema.arguments[-1].name == "scalars":
        return _with_numbers(op, args, kwargs)
    listing = _Listing(args, kwargs)
    listing.check()
    written = [each for n in entry.writes if n in listing.lists for each in args[n]]
    if any(map(is_deferred, written)) or (written and _overlap(written, entry.writes, listing)):
        return _one_by_one(op, entry.writes, listing, args, kwargs)
    meshes = {t._spec.topology for t in listing.tensors if isinstance(t, Wrapper)}
    first = next(iter(listing.lists.values()))
    if len(meshes) == 1 and all(isinstance(listing.tensors[i], Wrapper) for i in first):
        return _run_on(entry, meshes.pop(), listing, args, kwargs)  # no list has to be cut
    results: list[Any] = [None] * listing.length
    for mesh, indices in by_mesh([_mesh(listing, i) for i in range(listing.length)]).items():
        given, named = _chosen(args, kwargs, indices, listing, None)
        given = [_at_home(op, value, mesh) for value in given]
        named = {name: _at_home(op, value, mesh) for name, value in named.items()}
        own = _Listing(given, named)
        made = op(*given, **named) if mesh is None else _run_on(entry, mesh, own, given, named)
        for index, value in zip(indices, made or (), strict=False):
            results[index] = value
    return results if op._schema.returns else None


def by_mesh(meshes: Sequence[Topology | None]) -> dict[Topology | None, list[int]]:
    """The places of each mesh in a list; None is for plain tensors."""
    found: dict[Topology | None, list[int]] = {}
    for index, mesh in enumerate(meshes):
        found.setdefault(mesh, []).append(index)
    return found


def _at_home(op: OpOverload, value: Any, mesh: Topology | None) -> Any:
    """A number that serves the whole list is known to every rank, whatever mesh it was made on."""
    if not isinstance(value, Wrapper) or value._spec.topology is mesh:
        return value
    if value._spec.ndim:
        raise LayoutError(
            f"{op}: {value._spec} serves elements that are not on its mesh. Give a 0-d tensor, or "
            "a call for each mesh."
        )
    bring_grads_back(value)
    return full_local(value)


def _into_out(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Compute without `out`, then write into its elements; they keep their layouts."""
    named = dict(kwargs)
    targets = named.pop("out")
    functional = functional_of(op)
    assert functional is not None
    made = functional(*args, **named)
    results = made[0] if len(functional._schema.returns) > 1 else made  # as PyTorch does
    for target, value in zip(targets, results, strict=True):
        give_shape(op, target, value)
        target.copy_(value)


def _in_place(op: OpOverload) -> OpOverload:
    """The overload that writes into the lists it is given."""
    packet = getattr(torch.ops.aten, op._schema.name.split("::")[-1] + "_")
    return getattr(packet, op._overloadname or "default")  # type: ignore[no-any-return]


def _functional(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The operators that update several lists are their forms in place, on copies."""
    writer = _in_place(op)
    given, made = list(args), []
    for place, argument in enumerate(writer._schema.arguments):
        if argument.alias_info is None:
            continue
        value = args[place]
        copied = value.clone() if isinstance(value, torch.Tensor) else [v.clone() for v in value]
        given[place] = copied
        made.append(copied)
    writer(*given, **kwargs)
    return tuple(made)


def _with_numbers(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A vector that holds a number for each element is read, and its numbers are given."""
    named = dict(kwargs)
    *lists, scalars = (*args, named.pop("scalars")) if "scalars" in named else args
    numbers = full_local(scalars)
    if numbers.ndim != 1 or len(numbers) != len(lists[0]):
        raise LayoutError(
            f"{op}: scalars has shape {list(numbers.shape)}, but there are {len(lists[0])} "
            "elements. Give a vector with a number for each."
        )
    return op._overloadpacket.ScalarList(*lists, numbers.tolist(), **named)


def _overlap(written: Sequence[Any], writes: Sequence[int], listing: _Listing) -> bool:
    """Whether an element may write into memory that another one writes into or reads."""
    tensors, length = listing.tensors, listing.length
    read = [ids for place, ids in listing.lists.items() if place not in writes]
    others = [tensors[operand] for ids in (*read, listing.shared.values()) for operand in ids]
    ids, cells = set(map(id, written)), _cells(written)
    apart = len(ids) == len(written) and len(set(cells)) == len(cells)
    if (
        apart
        and ids.isdisjoint(map(id, others))
        and (not cells or set(cells).isdisjoint(_cells(others)))
    ):
        return False
    # Some memory is there twice. What an element alone writes and reads is no matter.
    owner: dict[int, int] = {}
    given = [ids for place, ids in listing.lists.items() if place in writes]
    for index in range(length):
        for memory in _memory(tensors[own[index]] for own in given):
            if owner.setdefault(memory, index) != index:
                return True
    every = [*read, *([operand] * length for operand in listing.shared.values())]
    return any(
        owner.get(memory, index) != index
        for index in range(length)
        for memory in _memory(tensors[own[index]] for own in every)
    )


def _cells(tensors: Iterable[Any]) -> list[int]:
    """What tells tensors of the same memory of writes, where there are several."""
    cells = [getattr(each, "_cell", None) for each in tensors]
    return [id(cell) for cell in cells if cell is not None]


def _memory(tensors: Iterable[Any]) -> set[int]:
    """What tensors have in common with others of the same memory."""
    every = list(tensors)
    return {*map(id, every), *_cells(every)}


def _one_by_one(
    op: OpOverload,
    writes: Sequence[int],
    listing: _Listing,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    """Write into lists that hold deferred views, which may be views of one another's bases."""
    for index in range(listing.length):
        given, named = _chosen(args, kwargs, [index], listing, None)
        views = {n: given[n][0] for n in writes if n in listing.lists and is_deferred(given[n][0])}
        for place, view in views.items():
            given[place] = [own_value(op, view)]
        op(*given, **named)
        for place, view in views.items():
            put_back(view, given[place][0])


def _mesh(listing: _Listing, index: int) -> Topology | None:
    """The mesh of an element: that of its own operands, for a shared one serves all meshes."""
    own = (listing.tensors[ids[index]] for ids in listing.lists.values())
    return next((t._spec.topology for t in own if isinstance(t, Wrapper)), None)


def _chosen(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    indices: Sequence[int],
    listing: _Listing,
    local: dict[int, torch.Tensor] | None,
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with lists cut down to `indices`, tensors replaced by `local` if given."""

    def choose(name: Any, value: Any) -> Any:
        ids = listing.lists.get(name)
        if ids is not None:
            return [value[i] if local is None else local[ids[i]] for i in indices]
        if name in listing.shared and local is not None:
            return local[listing.shared[name]]
        if isinstance(value, (list, tuple)) and len(value) == listing.length:
            return [value[i] for i in indices]
        return value

    return (
        [choose(index, value) for index, value in enumerate(args)],
        {name: choose(name, value) for name, value in kwargs.items()},
    )


def _kind(value: Any) -> Any:
    """What of an argument enters the key: of a number its type and sign, and its value if that is 0
    or infinite, or may be so in single precision."""
    if isinstance(value, (bool, torch.dtype)):
        return value
    if isinstance(value, (int, float, complex)):
        if value != value:
            return type(value), "nan"  # which is equal to no other, not even to itself
        if not LEAST < abs(value) < MOST:
            return type(value), value
        return type(value), isinstance(value, complex) or value > 0
    if not isinstance(value, (list, tuple)):
        return type(value)
    if value and isinstance(value[0], torch.Tensor):  # their specs are in the key
        return len(value)
    return tuple(map(_kind, value))


def _run_on(
    entry: Any, mesh: Any, listing: _Listing, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    operands = [t if isinstance(t, Wrapper) else adopt(t, mesh) for t in listing.tensors]
    plain = tuple(i for i, operand in enumerate(operands) if isinstance(operand, Plain))
    for i in plain:
        policy.on_plain(entry.op, tuple(listing.tensors[i].shape))
    key = (
        tuple(operand._spec for operand in operands),
        plain,
        tuple(sorted((str(name), len(ids)) for name, ids in listing.lists.items())),
        tuple(map(_kind, args)),
        tuple((name, _kind(value)) for name, value in kwargs.items()),
        torch.get_default_dtype(),
    )
    found = entry.plans.get(key)
    if found is None:
        found = _build(entry, mesh, listing, operands, args, kwargs)
        kept.put(entry.plans, key, found, plan_bytes(operands))
    if plain and (not found.plain_checked or policy.current().plain == "check_always"):
        found.plain_checked = check_plain(entry.op, entry.write_only_args, operands, args, kwargs)
    try:
        return found.run(operands, args, kwargs)
    except BaseException as error:
        report(error, mesh)  # as of a single operator: it is this rank's alone
        raise


def _element(
    args: Sequence[Any], kwargs: dict[str, Any], listing: _Listing, index: int
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of one element, with its tensors replaced by symbols."""
    symbols = map(Operand, range(len(listing.operands(index))))

    def choose(name: Any, value: Any) -> Any:
        if name in listing.lists or name in listing.shared:
            return next(symbols)
        numbers = isinstance(value, (list, tuple)) and len(value) == listing.length
        return value[index] if numbers else value

    given = [choose(place, value) for place, value in enumerate(args)]
    return given, {name: choose(name, value) for name, value in kwargs.items()}


def _sharing(rule: Rule, own: int) -> Rule:
    """A rule in which operands after the first `own`, which serve all elements, are never
    pending."""
    return replace(rule, linear=tuple(group for group in rule.linear if max(group) < own))


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
    returns = bool(op._schema.returns)
    metas = infer(op, args, kwargs, specs)[0] if returns else ()
    elements = []
    for index in range(listing.length):
        ids = listing.operands(index)
        own = [specs[i] for i in ids]
        result = metas[index] if returns else own[0].meta
        call = Call(op, *_element(args, kwargs, listing, index), own, [result])
        rule = _sharing(pointwise(call), len(listing.lists))
        decision = decide(rule, call, None if returns else 0)
        outputs = decision.outputs if returns else ()
        elements.append(Element(ids, decision.inputs, outputs, own))
    arguments = op._schema.arguments
    written = frozenset(
        i
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for i in listing.lists.get(place, ())
        if isinstance(operands[i], Wrapper)
    )

    listing.tensors = []  # the plan outlives the call: it keeps where operands stand, no more

    def build(
        args: Sequence[Any], kwargs: dict[str, Any], indices: Sequence[int], local: Any
    ) -> tuple[list[Any], dict[str, Any]]:
        return _chosen(args, kwargs, indices, listing, local)

    return ListPlan(op, elements, specs, written=written, returns=returns, build=build)
