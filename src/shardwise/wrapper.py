"""The bare tensor: a wrapper with a global shape, a spec and local tensors, below autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from ._torch import disabled_torch_function, make_wrapper
from .spec import DTensorSpec

__all__ = ["Origin", "Plain", "Wrapper", "wrap"]

Locals = tuple[torch.Tensor, ...]
Memo = dict[DTensorSpec, tuple[Any, Locals]]
"""What is there of a tensor in other layouts, each with the stamp of the tensor then."""


class Cell:
    """The version cell that aliases share.

    `writes` counts the writes of the dispatcher. `parts` are the local tensors of the first alias:
    their versions tell of other writes. `exposed` says whether a user holds any of them. Inference
    tensors have no versions: `to_local` hands out tensors of the same memory that have, `handed`.
    """

    __slots__ = ("__weakref__", "exposed", "handed", "parts", "writes")

    def __init__(self, parts: Locals) -> None:
        self.writes = 0
        self.parts = parts
        self.exposed = False
        self.handed: Locals | None = None


class Origin(NamedTuple):
    """How a view was made: of which tensor, by which call, and the layouts that both had."""

    base: Twin | Wrapper
    call: Callable[[Any], Any]
    before: DTensorSpec
    after: DTensorSpec


class Twin:
    """What plans read of a tensor, without its history: a detached loss must not hold the
    activations."""

    __slots__ = (
        "_cell",
        "_lanes",
        "_locals",
        "_memo",
        "_of",
        "_origin",
        "_picked",
        "_spec",
        "_views",
    )

    def __init__(
        self,
        spec: DTensorSpec,
        local: Locals,
        cell: Cell | None = None,
        memo: Memo | None = None,
        lanes: Any = None,
        views: Any = None,
        picked: Any = None,
        origin: Origin | None = None,
    ) -> None:
        self._spec = spec
        self._locals = local
        self._cell = cell
        self._memo = memo
        self._lanes = lanes
        self._views = views
        self._picked = picked
        self._origin = origin
        self._of = None


class Wrapper(torch.Tensor):
    """What the dispatcher knows of a DTensor.

    `_locals` are the local tensors held by this process, in the order of `_spec.slots`. `_cell` is
    the version
    cell that aliases share, made when the first alias is. `_memo` keeps reduced values of a
    partial that all ranks have, `_lanes` those that only ranks along some axes know of
    (`infinite.py`); `_picked` says where the elements of one come from, if each comes from one
    rank; `_origin` says of what a view of a partial is a view, so that both are reduced as one, and
    `_views` keeps what is reduced of its own views, should they be made again.
    """

    _spec: DTensorSpec
    _locals: Locals
    _cell: Cell | None = None
    _memo: Memo | None = None
    _lanes: dict[tuple[int, ...], tuple[Any, Any]] | None = None
    _views: dict[Any, Any] | None = None
    _picked: Any = None
    _origin: Origin | None = None
    _of: Any = None
    public: ClassVar[type[Wrapper]]

    __torch_function__ = disabled_torch_function


def tell_origin(view: Any, base: Any, call: Callable[[Any], Any], key: Any) -> None:
    """Let a view of a pending sum know what it is made of: it is reduced once for all.

    Views of one `key` are the same view, made again: they share what is reduced of it.
    """
    if base._memo is None:
        base._memo = {}
    if base._lanes is None:
        base._lanes = {}
    if base._views is None:
        base._views = {}
    twin = base
    if base._of is None:  # a deferred view is held anyway, and is not made real for this
        kept = base._memo, base._lanes, base._views, base._picked, base._origin
        twin = Twin(base._spec, base._locals, base._cell, *kept)
    view._origin = Origin(twin, call, base._spec, view._spec)
    if key is not None:
        found = base._views.get(key)
        if found is None:
            if len(base._views) >= _MOST_VIEWS:
                base._views.clear()
            found = base._views[key] = {}, {}, {}
        view._memo, view._lanes, view._views = found


_MOST_VIEWS = 64


def view_key(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None, spec: DTensorSpec
) -> Any:
    """What is equal for a view that is made again; None if that cannot be told."""
    key: list[Any] = [id(op), place, spec, *kwargs]
    for value in (*args, *kwargs.values()) if kwargs else args:  # in one pass: views are cheap
        kind = type(value)
        if kind is list:
            key.append(tuple(value))
        elif kind is int or not isinstance(value, torch.Tensor):
            key.append(value)
        else:
            return None
    return tuple(key)


def tell_layout(made: Any, tensor: Any) -> None:
    """Let a pending sum in another layout, into which nobody writes, know the tensor: what is
    reduced for one is reduced for both."""
    if made._spec.sums and type(tensor) is Wrapper.public:
        made._cell = share_cell(tensor)
        tell_origin(made, tensor, lambda value: value, made._spec)


def wrap(spec: DTensorSpec, local: Locals, cell: Cell | None = None) -> Any:
    """A DTensor of these local tensors."""
    shape, stride, dtype = spec.meta
    made = make_wrapper(
        Wrapper.public, shape, strides=stride, dtype=dtype, device=device_of(spec, local)
    )
    made._spec = spec  # type: ignore[attr-defined]
    made._locals = local  # type: ignore[attr-defined]
    if cell is not None:
        made._cell = cell  # type: ignore[attr-defined]
    return made


def device_of(spec: DTensorSpec, local: Locals) -> torch.device:
    """The device of the local tensors; of the mesh if this rank holds none."""
    return local[0].device if local else torch.device(spec.topology.device_type)


class Plain:
    """A plain tensor among the operands: it counts as replicated."""

    __slots__ = ("_cell", "_locals", "_memo", "_picked", "_spec")

    def __init__(self, spec: DTensorSpec, value: torch.Tensor) -> None:
        self._spec = spec
        self._locals = (value,)
        self._cell = None
        self._memo: dict[Any, Any] | None = None
        self._picked = None


def exposed_locals(tensor: Wrapper) -> Locals:
    """The local tensors for a user, who may write into them where nobody counts.

    Those of an alias are made views of the first tensor's, so that they have its versions: what the
    dispatcher makes of a local tensor has versions of its own.
    """
    cell, own = share_cell(tensor), tensor._locals
    if not cell.exposed and _has_inference(cell.parts):
        cell.handed = handed = tuple(map(_with_versions, cell.parts))
        # One rank may look alone: what all have made of it must still be good on this one.
        cell.writes -= sum([part._version for part in handed])
    cell.exposed = True
    bases = cell.parts if cell.handed is None else cell.handed
    if bases is own or len(bases) != len(own):
        return own
    return tuple([_view_of(base, part) for base, part in zip(bases, own, strict=True)])


def _with_versions(part: torch.Tensor) -> torch.Tensor:
    """An inference tensor as one that has versions, in the same memory: a view would have none."""
    if not part.is_inference():
        return part
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=part.dtype, device=part.device)
        memory = part.untyped_storage()
        return made.set_(memory, part.storage_offset(), part.shape, part.stride())


def _has_inference(parts: Locals) -> bool:
    """Whether some are plain tensors in memory that have no versions."""
    values = all(type(part) is torch.Tensor and not part.is_meta for part in parts)
    return values and any(part.is_inference() for part in parts)


def _view_of(base: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`part` as a view of `base`, if it lies in its memory."""
    memory = [t.untyped_storage().data_ptr() for t in (base, part)]
    if base is part or base.dtype is not part.dtype or memory[0] != memory[1]:
        return part
    return base.as_strided(part.shape, part.stride(), part.storage_offset())


def share_cell(base: Wrapper) -> Cell:
    """The version cell of a tensor, made now if this is its first alias."""
    cell = base._cell
    if cell is None:
        cell = base._cell = Cell(base._locals)
    return cell
