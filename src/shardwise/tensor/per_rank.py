"""`PerRank`: the local tensors of all ranks of a virtual mesh, where this process is every rank.

Every call is mapped over the ranks, each with its own autograd. Code written for one rank's local
tensor runs on it unchanged. Shapes and Python numbers can be read if all ranks agree on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import LayoutError, MeshError, need, public
from ..layout.geometry import flat_index
from ..layout.mesh import AnyMesh, Coord, Topology, topology
from ..storage.wrapper import Wrapper


@public
class PerRank:
    """One value per rank of a virtual mesh; calls map over the ranks.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.per_rank(mesh, lambda coord: torch.full((2,), float(coord[0])))
    >>> (x + 1).parts
    (tensor([1., 1.]), tensor([2., 2.]))
    """

    __slots__ = ("axes", "mesh", "parts")

    def __init__(self, mesh: Topology, axes: Sequence[int], parts: Sequence[Any]) -> None:
        need("PerRank", mesh, Topology, "the topology of a mesh (per_rank makes one of these)")
        self.mesh = mesh
        self.axes = tuple(axes)
        self.parts = tuple(parts)

    def at(self, coord: Coord) -> Any:
        """The value of the rank at `coord`."""
        words = isinstance(coord, tuple | list) and [type(each) for each in coord]
        if words != [int] * self.mesh.ndim:
            raise LayoutError(
                f"PerRank.at: a coordinate on mesh {self.mesh} is needed, but got {coord!r}."
            )
        return self.parts[flat_index(coord, self.mesh.shape, self.axes)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _same_or_mapped(self.mesh, self.axes, [getattr(part, name) for part in self.parts])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return mapped(_call, self, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return mapped(func, *args, **(kwargs or {}))

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Each rank's backward, in one pass."""
        torch.autograd.backward(self.parts, *args, **kwargs)

    def item(self) -> Any:
        """The number, if it is the same on all ranks."""
        return self._agreed("item()", [part.item() for part in self.parts])

    def __bool__(self) -> bool:
        return bool(self._agreed("bool()", [bool(part) for part in self.parts]))

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __len__(self) -> int:
        return int(self._agreed("len()", [len(part) for part in self.parts]))

    def _agreed(self, what: str, values: list[Any]) -> Any:
        if any(value != values[0] for value in values):
            raise LayoutError(
                f"{what} of a local tensor that differs between ranks: {values}. "
                "This process is every rank, so there is no single answer. Use parts for all of "
                "them, or make a DTensor with DTensor.from_local and ask that."
            )
        return values[0]

    def __repr__(self) -> str:
        lines = [f"  {index}: {part!r}" for index, part in enumerate(self.parts)]
        return "PerRank(\n" + "\n".join(lines) + "\n)"


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def mapped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` for every rank, with each `PerRank` argument replaced by the rank's value."""
    found = [v for v in _flat((*args, *kwargs.values())) if isinstance(v, PerRank)]
    meshes = {each.mesh for each in found}
    if len(meshes) > 1:
        raise MeshError("local tensors of different meshes in one call.")
    differ = any(len(each.parts) > 1 for each in found)
    if differ and any(isinstance(v, Wrapper) for v in _flat((*args, *kwargs.values()))):
        raise LayoutError(
            "a local tensor is mixed with a DTensor. A local tensor is one rank's part, a DTensor "
            "is the whole. Use to_local() of both, or make the parts a DTensor with "
            "DTensor.from_local(local, mesh, placements)."
        )
    mesh = found[0].mesh
    axes = sorted({axis for each in found for axis in each.axes})
    values = []
    for coord in mesh.coords_here(axes):
        given = [_at(value, coord) for value in args]
        named = {name: _at(value, coord) for name, value in kwargs.items()}
        values.append(function(*given, **named))
    return _same_or_mapped(mesh, axes, values)


def _flat(values: Sequence[Any]) -> list[Any]:
    flat = []
    for value in values:
        flat.extend(_flat(value) if isinstance(value, (list, tuple)) else [value])
    return flat


def _at(value: Any, coord: Coord) -> Any:
    if isinstance(value, PerRank):
        return value.at(coord)
    if isinstance(value, (list, tuple)):
        return type(value)(_at(each, coord) for each in value)
    return value


def _same_or_mapped(mesh: Topology, axes: Sequence[int], values: list[Any]) -> Any:
    """One value if it is no tensor and all ranks agree on it, else one per rank."""
    first = values[0]
    if isinstance(first, tuple) and not isinstance(first, torch.Size):
        return tuple(_same_or_mapped(mesh, axes, list(c)) for c in zip(*values, strict=True))
    if isinstance(first, list):
        return [_same_or_mapped(mesh, axes, list(c)) for c in zip(*values, strict=True)]
    if not isinstance(first, torch.Tensor) and not callable(first):
        if all(value == first for value in values):
            return first
        if isinstance(first, (torch.Size, int)):
            raise LayoutError(
                f"the local tensors differ between ranks in a shape or size: {values}. "
                "Use parts, or ask the DTensor for its global shape."
            )
    return PerRank(mesh, axes, values)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: PerRank, *args: Any) -> Any:
        return mapped(lambda part, *rest: getattr(part, name)(*rest), self, *args)

    method.__name__ = name
    return public(method)


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow matmul rmatmul neg pos abs "
    "and or xor invert eq ne lt le gt ge getitem setitem iadd isub imul itruediv"
)
for _name in _OPERATORS.split():
    setattr(PerRank, f"__{_name}__", _operator(f"__{_name}__"))
PerRank.__hash__ = object.__hash__  # type: ignore[method-assign]


@public
def per_rank(device_mesh: AnyMesh, fn: Callable[[Coord], Any]) -> Any:
    """A value that differs by rank: `fn(coordinate)` for this rank, or for every rank if virtual.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> batch = per_rank(mesh, lambda coord: torch.arange(2) + 2 * coord[0])
    >>> shardwise.DTensor.from_local(batch, mesh, [shardwise.Shard(0)]).full_tensor()
    tensor([0, 1, 2, 3])
    """
    mesh = topology(device_mesh)
    need("per_rank", fn, Callable, "a function of a coordinate")
    if not mesh.virtual:
        if mesh.coordinate is None:
            raise MeshError(f"per_rank: this rank is not in mesh {mesh}.")
        return fn(mesh.coordinate)
    axes = range(mesh.ndim)
    return PerRank(mesh, axes, [fn(coord) for coord in mesh.coords_here(axes)])


@public
def is_first_rank() -> bool:
    """True if this process should print: on the first rank, and in a single process.

    >>> is_first_rank()
    True
    """
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
