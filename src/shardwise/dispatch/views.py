"""Deferred views: views whose elements live on other ranks than their base's.

`x[3]` of a sharded dim, or a `view` that regroups shards, cannot share memory with `x`. Such a view
holds the memory of its base (spec, local tensors and version cell) and how it was made. It is made
real when it is read, and again after the base was written; a write into it goes through to whoever
holds the elements. So a write is never lost and a read is never stale. It does not hold the base
itself, which may have other memory tomorrow (`x.data = y`) or another shape (`x.t_()`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import OpOverload, make_wrapper, memory_of
from ..comm.dtypes import identity
from ..errors import LayoutError
from ..layout.geometry import contiguous_stride
from ..layout.spec import DTensorSpec
from ..rules.pointwise import pointwise
from ..storage.operands import in_layout, mark_written, own_copy, version_stamp
from ..storage.plain import full_local
from ..storage.wrapper import Cell, Locals, Wrapper, share_cell, wrap
from .plans import Plan

_SAME_ORDER = frozenset(
    f"aten::{name}"
    for name in ("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten")
) | {"aten::detach", "aten::alias"}
"""Views with the elements of their base in the order of their base."""
_CONJ, _NEG = "aten::_conj", "aten::_neg_view"
_OVERWRITES = frozenset(("aten::copy_", "aten::fill_", "aten::zero_"))


class _Read:
    """The last value of a deferred view, and the stamp of its root at that time."""

    __slots__ = ("seen", "value")

    def __init__(self) -> None:
        self.seen: object = None
        self.value: Locals = ()


class DeferredView:
    """Mixed into the public class: local tensors are made from the base when they are asked for.

    `_of` is the memory of the base as a tensor that nobody else has.
    """

    _of: Any
    _how: tuple[OpOverload, Plan, tuple[Any, ...], dict[str, Any], int | None]
    _spec: DTensorSpec
    _read: _Read

    @property
    def _locals(self) -> Locals:
        read, now = self._read, version_stamp(root_of(self))
        if read.seen != now:
            _, plan, args, kwargs, place = self._how
            # `view_as`, whole in inference mode, has a second operand.
            others = [value for value in args if isinstance(value, torch.Tensor)]
            made = plan.run((self._of, *others), (self._of, *args), kwargs)
            made = made if place is None else made[place]
            # If the base was reduced meanwhile, a form may give another layout than at first.
            read.value, read.seen = in_layout(made, self._spec), now
        return read.value


def is_deferred(tensor: object) -> bool:
    """True if a tensor is a deferred view."""
    return isinstance(tensor, DeferredView)


def root_of(view: Any) -> Any:
    """The tensor at the bottom of a chain of deferred views: the one that has memory."""
    while isinstance(view, DeferredView):
        view = view._of
    return view


def defer(
    op: OpOverload, plan: Plan, base: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """A view of `base` that is made real when it is read."""
    held = bare(base)
    rest = tuple([bare(value) if isinstance(value, Wrapper) else value for value in args[1:]])

    def view(spec: DTensorSpec, place: int | None = None) -> Any:
        made = _view(spec, held._cell)
        made._of, made._how = held, (op, plan, rest, kwargs, place)
        return made

    if not plan.outs:  # the layout is known only when the value is
        value = plan.run((base,), args, kwargs)
        made = view(value._spec)
        made._read.seen, made._read.value = version_stamp(root_of(held)), value._locals
        return made
    if isinstance(plan._shape, tuple):  # type: ignore[attr-defined]
        return [view(spec, place) for place, spec in enumerate(plan.outs)]
    return view(plan.outs[0])


def bare(tensor: Any) -> Any:
    """Another tensor with the memory of a tensor, without its history."""
    if tensor._spec.sums and tensor._memo is None:  # what is reduced for one serves both
        tensor._memo = {}
    if isinstance(tensor, DeferredView):
        made = _view(tensor._spec, tensor._cell)  # type: ignore[attr-defined]
        made._of, made._how, made._read = tensor._of, tensor._how, tensor._read
    else:
        made = wrap(tensor._spec, tensor._locals, share_cell(tensor))
    made._memo = tensor._memo
    return made


def lay_out(view: Any, spec: DTensorSpec) -> None:
    """Let a deferred view have another layout: what is read of it is moved there."""
    view._spec, view._read, view._memo = spec, _Read(), None


_OWN = ("_spec", "_locals", "_cell", "_memo", "_of", "_how", "_read")
"""The attributes that say what memory a tensor has and in which layout."""


def become(tensor: Any, value: Any) -> None:
    """Let a tensor have the memory and the layout of another: from now on both are one memory."""
    for each in (tensor, value):
        if not isinstance(each, DeferredView):
            each._locals  # noqa: B018  # waits
    same = bare(value)
    for name in _OWN:
        tensor.__dict__.pop(name, None)
    tensor.__class__ = type(same)
    tensor.__dict__.update(same.__dict__)


def _made_by(view: Any) -> str:
    """The name of the operator that made a deferred view."""
    return view._how[0]._schema.name  # type: ignore[no-any-return]


def _count(view: Any, name: str) -> int:
    """How many of the calls that made a deferred view are of this operator."""
    count = 0
    while isinstance(view, DeferredView):
        count += _made_by(view) == name
        view = view._of
    return count


def is_negative(view: Any) -> bool:
    """True if a tensor is a view of negatives, as `torch.is_neg` says of a plain one."""
    return _count(view, _NEG) % 2 == 1


def is_conjugate(view: Any) -> bool:
    """True if a tensor is a view of conjugates, as `torch.is_conj` says of a plain one."""
    return view.is_complex() and _count(view, _CONJ) % 2 == 1


def _check_writable(op: OpOverload, view: Any) -> None:
    """An error if a view is one of conjugates or negatives, which are copies here."""
    if _count(view, _CONJ) or _count(view, _NEG):
        raise LayoutError(
            f"{op}: a write into the conjugate or negative view of {root_of(view)._spec} is not "
            "supported. Write into a copy, x.conj().resolve_conj(), or into the tensor itself."
        )


def _view(spec: DTensorSpec, cell: Cell) -> Any:
    kind = Wrapper.deferred  # type: ignore[attr-defined]
    made = make_wrapper(kind, *spec.meta, torch.device(spec.topology.device_type))
    made._spec, made._cell, made._read = spec, cell, _Read()  # type: ignore[attr-defined]
    return made


# --- writing ---------------------------------------------------------------------------------


def write_through(
    op: OpOverload,
    family: object,
    writes: Sequence[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run an operator that writes into deferred views: their bases change, and the views see it
    when they are next read. `writes` are the arguments that the operator writes into."""
    first = args[0]
    if is_deferred(first) and writes == (0,) and family is pointwise:
        base = first._of
        if _made_by(first) in _SAME_ORDER and base.dtype is first.dtype:
            op(base, *[_as_base(value, first, base) for value in args[1:]], **kwargs)
            return first
    given = list(args)
    places = [place for place in writes if place < len(args) and is_deferred(args[place])]
    for place in places:
        given[place] = own_value(op, args[place])
    made = op(*given, **kwargs)
    for place in places:
        put_back(args[place], given[place])
    views = {id(given[place]): args[place] for place in places}
    if isinstance(made, (list, tuple)):
        return type(made)([views.get(id(value), value) for value in made])
    return views.get(id(made), made)


def own_value(op: OpOverload, view: Any) -> Any:
    """A tensor of its own with the value of a view, or with none if the operator overwrites it."""
    _check_writable(op, view)
    spec = view._spec
    if spec.meta.overlaps:  # on one device several of its elements are the same memory
        return wrap(spec.whole, (own_copy(full_local(view), spec.meta),))
    if op._schema.name in _OVERWRITES:
        shapes = [spec.local_shape(coord) for coord in spec.slots]
        local = [torch.empty(shape, dtype=view.dtype, device=view.device) for shape in shapes]
    else:
        local = [part.clone() for part in view._locals]
    return wrap(spec, tuple(local))


def _as_base(value: Any, view: Any, base: Any) -> Any:
    """An operand that broadcasts into the view, in the shape of the base.

    If it is a view of a tensor in that shape, that tensor serves: `x[3] += 1` moves nothing when
    it copies `x[3]` onto itself.
    """
    inner: Any = value
    while is_deferred(inner) and _made_by(inner) in _SAME_ORDER:
        inner = inner._of
        if inner.shape == base.shape and inner.dtype is value.dtype:
            return inner
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    if value.numel() == 1:
        return value.reshape(())
    return value.expand(view.shape).reshape(base.shape)


def put_back(view: Any, value: Any) -> None:
    """Write the elements of a tensor that `own_value` made into the root of a view: every rank
    writes those in its box."""
    root = root_of(view)
    spec = root._spec.fine
    shape = spec.meta.shape
    address, whole = _elements(root, _addresses(view, root), full_local(value))
    index = [
        (address // stride) % max(size, 1)
        for size, stride in zip(shape, contiguous_stride(shape), strict=True)
    ]
    for coord, local in zip(spec.slots, root._locals, strict=True):
        here = torch.ones_like(address, dtype=torch.bool)
        box = spec.box(coord)
        for at, (start, stop) in zip(index, box, strict=True):
            here &= (at >= start) & (at < stop)
        new = whole[here]
        for axis in spec.sums:
            kind = spec.placements[axis].reduce_op
            if coord[axis] and kind != "avg":  # the average of equal values is the value
                new = torch.full_like(new, identity(kind, new.dtype))
        places = tuple([at[here] - start for at, (start, _) in zip(index, box, strict=True)])
        local.view(spec.local_shape(coord))[places] = new.to(local.dtype)
    mark_written(root)


def _elements(
    root: Any, address: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The places and the values of the elements of the root that a value at these bytes changes.

    A view as another dtype may have several of them in one of its own, or parts of them.
    """
    size, own = root.dtype.itemsize, value.dtype.itemsize
    if value.dtype is root.dtype:
        return address // size, value
    if own >= size:
        steps = torch.arange(own // size, device=address.device)
        value = value.contiguous().unsqueeze(-1).view(root.dtype)
        return (address // size).unsqueeze(-1) + steps, value
    whole = full_local(root).clone(memory_format=torch.contiguous_format).view(-1)
    whole.view(value.dtype)[address // own] = value
    changed = (address // size).unique()
    return changed, whole[changed]


def _addresses(view: Any, root: Any) -> torch.Tensor:
    """For each element of a view its first byte in the root, counted as in a contiguous tensor.

    Views go by index, so it does not matter how the root really lies in memory; only `as_strided`
    goes by memory, and needs a root that is contiguous.
    """
    chain: list[Any] = []
    while is_deferred(view):
        chain.append(view._how)
        view = view._of
    shape, stride, dtype = root._spec.meta
    meta: Any = torch.empty(shape, dtype=dtype, device="meta")
    for op, _, args, kwargs, place in reversed(chain):
        by_memory = op._schema.name == "aten::as_strided" and stride != contiguous_stride(shape)
        before = meta
        meta = op(meta, *args, **kwargs)
        meta = meta if place is None else meta[place]
        if by_memory or memory_of(meta) != memory_of(before):  # a copy is no view
            raise LayoutError(
                f"a write into the result of {op} of {root._spec}, whose elements live on other "
                "ranks, is not supported. Write into the tensor itself."
            )
    device = root._spec.topology.device_type
    address = torch.full(tuple(meta.shape), meta.storage_offset(), device=device)
    for dim, (size, step) in enumerate(zip(meta.shape, meta.stride(), strict=True)):
        steps = torch.arange(size, device=device) * step
        address = address + steps.view([size] + [1] * (meta.ndim - dim - 1))
    return address * meta.dtype.itemsize  # type: ignore[no-any-return]
