"""The methods of a DTensor that `torch.compile` calls."""

from __future__ import annotations

from functools import cache, partial
from hashlib import sha256
from secrets import token_hex
from typing import Any
from weakref import WeakValueDictionary

import torch

from .._torch import memory_of, mode_of_fakes, untraced
from ..dispatch.views import root_of
from ..layout.spec import DTensorSpec
from ..storage.wrapper import Cell, share_cell, wrap

_PROCESS = token_hex()
_cells: WeakValueDictionary[int, Cell] = WeakValueDictionary()
"""The version cells of tensors given to compiled programs, by memory. A result in the same memory
is an alias and shares the cell, so that writes into one are known to the other."""


class CompileProtocol:
    """Flattening, guards and layouts of gradients, for `torch.compile`."""

    _spec: DTensorSpec

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The names of the local tensors, and the layout. Guards call this on each rank in its own
        order, so it must not communicate."""
        return _names_of_parts(len(self._spec.slots)), self._spec

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], spec: Any, size: Any, stride: Any) -> Any:
        parts = tuple(inner.values())
        kept = type(parts[0]) is torch.Tensor if parts else False
        return wrap(spec, parts, _cells.get(memory_of(parts[0])) if kept else None)

    @untraced
    def __coerce_tangent_metadata__(self: Any) -> Any:
        """The gradient in the layout that a compiled backward takes: no gradient is partial."""
        return self.redistribute(placements=self._spec.reduced.placements)

    @untraced
    def __coerce_same_metadata_as_tangent__(self: Any, spec: Any, kind: Any = None) -> Any:
        """A gradient in the layout that a backward takes; None if it takes no DTensor."""
        if not isinstance(spec, DTensorSpec):
            return None
        return self.redistribute(spec.mesh, spec.placements, cuts=spec.cuts)

    @classmethod
    def __metadata_guard__(cls, compiled: DTensorSpec, given: DTensorSpec) -> bool:
        """True if a graph compiled for one layout serves another: only the same one."""
        return compiled is given

    def _stable_hash_for_caching(self: Any) -> str:
        """The key of a graph in the compiler's cache, valid in this process only.

        Graphs differ by rank, and depend on registered rules, which have no stable names.
        """
        parts = [(part.shape, part.stride(), part.dtype, part.device) for part in self._locals]
        mesh = self._spec.topology
        where = mesh.device_type, mesh.shape, mesh.ranks, mesh.coordinate, id(mesh)
        text = repr((_PROCESS, where, self._spec, self._spec.stride, self.cuts, parts))
        return sha256(f"{text}{self.requires_grad}".encode()).hexdigest()


@cache
def _names_of_parts(count: int) -> list[str]:
    """The names of local tensors, which DTensors have as properties from now on.

    A `__getattr__` would need none, and make every other attribute of a DTensor slower.
    """
    names = [f"_local{index}" for index in range(count)]
    for index, name in enumerate(names):
        if not hasattr(CompileProtocol, name):
            setattr(CompileProtocol, name, property(partial(_part, index)))
    return names


def _part(index: int, tensor: Any) -> Any:
    root: Any = root_of(tensor)
    with mode_of_fakes(root):
        part = tensor._locals[index]
    if type(part) is torch.Tensor:
        _cells[memory_of(part)] = cell = share_cell(root)
        cell.writes += 1  # a compiled program may write into it, where nobody counts
        cell.in_graph = True
    return part
