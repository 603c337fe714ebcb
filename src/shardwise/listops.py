"""List operators: `_foreach_*` and `_fused_*` have one plan for the list and one local call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import policy
from ._torch import OpOverload
from .deferred import is_deferred, own_value, store_through
from .errors import LayoutError
from .infer import infer
from .mesh import Topology
from .plain import adopt, check_plain, full_local
from .plans import Element, ListPlan
from .propagate import decide
from .rules import Call, Operand
from .rules.pointwise import pointwise
from .spec import TensorMeta
from .wrapper import Wrapper

__all__ = ["run_list"]

_MOST_PLANS = 4096
_NOT_POINTWISE = ("norm", "max", "powsum")


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

    def operands(self, index: int) -> list[int]:
        """The operands of one element, in the order of the arguments."""
        own = [ids[index] for ids in self.lists.values()]
        return [*own, *self.shared.values()]


def run_list(entry: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a list operator: elements on different meshes apart, each mesh's with one plan."""
    name = entry.op._schema.name.split("::")[-1].removeprefix("_foreach_")
    if name.rstrip("_") in _NOT_POINTWISE:
        return _looped(name, args, kwargs)
    listing = _Listing(args, kwargs)
    writes = [n for n, a in enumerate(entry.op._schema.arguments) if a.alias_info is not None]
    written = [each for n in writes if n in listing.lists for each in args[n]]
    if any(map(is_deferred, written)) or _overlap(written):
        return _one_by_one(entry.op, writes, listing, args, kwargs)
    meshes: dict[Topology | None, list[int]] = {}
    for index in range(listing.length):
        meshes.setdefault(_mesh(listing, index), []).append(index)
    results: list[Any] = [None] * listing.length
    for mesh, indices in meshes.items():
        given, named = _chosen(args, kwargs, indices, listing, None)
        made = entry.op(*given, **named) if mesh is None else _run_on(entry, mesh, given, named)
        for index, value in zip(indices, made or (), strict=False):
            results[index] = value
    return results if entry.op._schema.returns else None


def _overlap(written: Sequence[Any]) -> bool:
    """Whether two written elements may be the same memory."""
    cells = [id(each._cell) for each in written if getattr(each, "_cell", None) is not None]
    return len({id(each) for each in written}) < len(written) or len(set(cells)) < len(cells)


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
            store_through(view, full_local(given[place][0]))


def _mesh(listing: _Listing, index: int) -> Topology | None:
    specs = [
        t._spec for i in listing.operands(index) if isinstance(t := listing.tensors[i], Wrapper)
    ]
    return specs[0].topology if specs else None


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
    """What of an argument enters the key: the type of a number, of each number in a list."""
    if isinstance(value, (bool, torch.dtype)):
        return value
    return tuple(map(type, value)) if isinstance(value, (list, tuple)) else type(value)


def _run_on(entry: Any, mesh: Topology, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    listing = _Listing(args, kwargs)
    operands = [t if isinstance(t, Wrapper) else adopt(t, mesh) for t in listing.tensors]
    key = (
        tuple(operand._spec for operand in operands),
        tuple(sorted((str(name), len(ids)) for name, ids in listing.lists.items())),
        tuple(map(_kind, args)),
        tuple((name, _kind(value)) for name, value in kwargs.items()),
    )
    found = entry.plans.get(key)
    if found is None:
        if policy.current().plain in ("check", "check_always"):
            check_plain(entry.op, operands)
        if len(entry.plans) >= _MOST_PLANS:
            entry.plans.clear()
        found = entry.plans[key] = _build(entry, mesh, listing, operands, args, kwargs)
    return found.run(operands, args, kwargs)


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
    metas: list[TensorMeta] = infer(op, args, kwargs, specs)[0] if returns else []
    elements = []
    for index in range(listing.length):
        ids = listing.operands(index)
        own = [specs[i] for i in ids]
        result = metas[index] if returns else own[0].meta
        symbols = [Operand(place) for place in range(len(ids))]
        call = Call(op, symbols, {}, own, [result])
        decision = decide(pointwise(call), call, None if returns else 0)
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


def _looped(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """List operators that reduce each element: one call per element."""
    if name == "norm":
        ord_ = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
        return [torch.linalg.vector_norm(each, ord_, dtype=dtype) for each in args[0]]
    if name == "max":
        return [torch.max(each) for each in args[0]]
    ord_ = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return [each.abs().pow(ord_).sum() for each in args[0]]
