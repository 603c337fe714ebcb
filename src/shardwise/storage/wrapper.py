"""The bare tensor: a wrapper with a global shape, a spec and local tensors, below autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .._torch import is_tracing, make_wrapper
from ..layout.spec import DTensorSpec

Locals = tuple[torch.Tensor, ...]
Memo = dict[DTensorSpec, tuple[Any, Locals]]
"""Values of a tensor in other layouts, each with the stamp of the tensor at that time."""


class Cell:
    """The version cell that aliases share.

    `writes` counts the writes of the dispatcher. `parts` are the local tensors of the first alias:
    their versions tell of other writes. `shape` is its global shape. `exposed` is True if a user
    holds any of the parts, `in_graph` if a compiled program was given them.
    """

    __slots__ = ("__weakref__", "exposed", "in_graph", "parts", "shape", "writes")

    def __init__(self, parts: Locals, shape: tuple[int, ...]) -> None:
        self.writes = 0
        self.parts = parts
        self.shape = shape
        self.exposed = False
        self.in_graph = False


class Wrapper(torch.Tensor):
    """A DTensor as the dispatcher sees it.

    `_locals` are the local tensors held by this process, in the order of `_spec.slots`. `_cell` is
    the version cell that aliases share, made when the first alias is. `_memo` caches the reduced
    value of a Partial, by layout. `_of` is what a deferred view is a view of.
    """

    _spec: DTensorSpec
    _locals: Locals
    _cell: Cell | None = None
    _memo: Memo | None = None
    _of: Any = None
    public: ClassVar[type[Wrapper]]
    watch_func_leaves: ClassVar[Callable[[], bool]]


def wrap(spec: DTensorSpec, local: Locals, cell: Cell | None = None) -> Any:
    """A DTensor of these local tensors."""
    device = local[0].device if local else torch.device(spec.topology.device_type)
    made = make_wrapper(Wrapper.public, *spec.meta, device)
    made._spec = spec  # type: ignore[attr-defined]
    made._locals = local  # type: ignore[attr-defined]
    if cell is not None:
        made._cell = cell  # type: ignore[attr-defined]
    return made


class Plain:
    """A plain tensor among the operands: it counts as replicated."""

    __slots__ = ("_cell", "_locals", "_memo", "_spec")

    def __init__(self, spec: DTensorSpec, value: torch.Tensor) -> None:
        self._spec = spec
        self._locals = (value,)
        self._cell = None
        self._memo: dict[Any, Any] | None = None


def exposed_locals(tensor: Wrapper) -> Locals:
    """The local tensors for a user, who may write into them where nobody counts.

    Those of an alias are made views of the first tensor's, so that they have its versions: what the
    dispatcher makes of a local tensor has versions of its own. Inference tensors have none: the
    user gets tensors of the same memory that have.
    """
    cell, own = share_cell(tensor), tensor._locals
    if not cell.exposed and any(map(_is_uncounted, cell.parts)):
        cell.parts = tuple(map(_with_versions, cell.parts))
        # One rank may look alone: the cached reductions, which all have, must still be good there.
        cell.writes -= sum([part._version for part in cell.parts])
    cell.exposed = True
    if cell.parts is own or len(cell.parts) != len(own) or is_tracing():
        return own
    return tuple([_view_of(base, part) for base, part in zip(cell.parts, own, strict=True)])


def _is_uncounted(part: torch.Tensor) -> bool:
    """True if a tensor has memory, but no versions."""
    return type(part) is torch.Tensor and not part.is_meta and part.is_inference()


def _with_versions(part: torch.Tensor) -> torch.Tensor:
    """An inference tensor as one that has versions, in the same memory: a view would have none."""
    if not _is_uncounted(part):
        return part
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=part.dtype, device=part.device)
        memory = part.untyped_storage()
        return made.set_(memory, part.storage_offset(), part.shape, part.stride())


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
        cell = base._cell = Cell(base._locals, base._spec.meta.shape)
    return cell
