"""The bare tensor: a wrapper with a global shape, a spec and local tensors, below autograd."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ._torch import disabled_torch_function, make_wrapper
from .spec import DTensorSpec

__all__ = ["Plain", "Wrapper", "wrap"]

Locals = tuple[torch.Tensor, ...]


class Wrapper(torch.Tensor):
    """What the dispatcher knows of a DTensor.

    `_locals` are the local tensors held by this process, in the order of `_spec.slots`. `_cell` is
    the version
    cell that aliases share, made when the first alias is. `_memo` keeps reduced values of a
    partial; `_picked` says where the elements of one come from, if each comes from one rank.
    """

    _spec: DTensorSpec
    _locals: Locals
    _cell: list[int] | None = None
    _memo: dict[DTensorSpec, tuple[Any, Locals]] | None = None
    _picked: Any = None
    public: ClassVar[type[Wrapper]]

    __torch_function__ = disabled_torch_function

    def _resolve(self) -> Wrapper:
        """A tensor with local tensors that are up to date: itself, but for a deferred view."""
        return self


def wrap(spec: DTensorSpec, local: Locals, cell: list[int] | None = None) -> Any:
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


def expose(tensor: Wrapper) -> None:
    """Note that the user holds the local tensors, and may write into them where nobody counts."""
    cell = share_cell(tensor)
    if len(cell) == 1:
        cell.append(1)


def share_cell(base: Wrapper) -> list[int]:
    """The version cell of a tensor, made now if this is its first alias."""
    cell = base._cell
    if cell is None:
        cell = base._cell = [0]
    return cell
