"""Factories: `zeros`, `ones`, `full`, `empty`, `rand` and `randn` on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypedDict, Unpack

import torch

from ..errors import LayoutError
from ..layout.geometry import contiguous_stride
from ..layout.mesh import AnyMesh, topology
from ..layout.spec import (
    DTensorSpec,
    Placements,
    TensorMeta,
    checked_placements,
    default_placements,
)
from ..storage.wrapper import Locals, wrap
from .dtensor import DTensor


class _Where(TypedDict, total=False):
    """The keyword arguments of every factory."""

    device_mesh: AnyMesh
    placements: Placements | None
    dtype: torch.dtype | None
    requires_grad: bool


Generator = torch.Generator | None


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    """A size, given as numbers or as one sequence of them."""
    found = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    if not all(isinstance(number, SupportsIndex | torch.SymInt) for number in found):
        raise LayoutError(f"a size must be made of whole numbers, but got {found!r}.")
    return found


def _check_names(where: _Where) -> None:
    known = _Where.__annotations__
    for name in where:
        if name not in known:
            raise TypeError(
                f"unexpected keyword argument {name!r}: a factory takes {', '.join(known)}."
            )


def _made(
    name: str, shape: tuple[int, ...], where: _Where, fill: Callable[[DTensorSpec], Locals]
) -> DTensor:
    """A tensor whose ranks make their local tensors; a Partial one is made replicated first."""
    _check_names(where)
    mesh = topology(where.get("device_mesh"))
    kind = where.get("dtype") or torch.get_default_dtype()
    meta = TensorMeta(shape, contiguous_stride(shape), kind)
    places = checked_placements(name, mesh, where.get("placements"), len(shape))
    target = DTensorSpec(mesh, places, meta)
    spec = DTensorSpec(mesh, default_placements(mesh), meta) if target.sums else target
    made: DTensor = wrap(spec, fill(spec))
    if spec is not target:
        made = made.redistribute(placements=places)
    return made.requires_grad_(where.get("requires_grad", False))


def zeros(*size: Any, **where: Unpack[_Where]) -> DTensor:
    """Zeros on a mesh; each rank makes only what it holds.

    >>> import shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> zeros(3, 2, device_mesh=mesh, placements=[shardwise.Shard(0)])
    DTensor([[0., 0.],
             [0., 0.],
             [0., 0.]], float32[3@0, 2] on (2))
    """
    return _made("zeros", _sizes(size), where, _local(torch.zeros))


def ones(*size: Any, **where: Unpack[_Where]) -> DTensor:
    """Ones on a mesh; each rank makes only what it holds."""
    return _made("ones", _sizes(size), where, _local(torch.ones))


def _local(make: Callable[..., torch.Tensor]) -> Callable[[DTensorSpec], Locals]:
    """A function that makes the local tensors with a factory of PyTorch."""

    def fill(spec: DTensorSpec) -> Locals:
        kind: Any = {"dtype": spec.dtype, "device": spec.topology.device_type}
        return tuple(make(spec.local_shape(coord), **kind) for coord in spec.slots)

    return fill


def full(size: Sequence[int], fill_value: Any, **where: Unpack[_Where]) -> DTensor:
    """One value everywhere, on a mesh; the dtype is the value's, as in `torch.full`.

    >>> import shardwise
    >>> full((2,), 7, device_mesh=shardwise.init_device_mesh("cpu", (2,))).dtype
    torch.int64
    """
    where["dtype"] = where.get("dtype") or torch.full((), fill_value).dtype
    return _made("full", _sizes((size,)), where, _local(partial(torch.full, fill_value=fill_value)))


def empty(*size: Any, **where: Unpack[_Where]) -> DTensor:
    """Uninitialized memory on a mesh."""
    return _made("empty", _sizes(size), where, _local(torch.empty))


def _random(
    fill: str, numbers: Sequence[Any], size: Any, generator: Generator, where: _Where
) -> DTensor:
    requires_grad = where.pop("requires_grad", False)
    made = empty(size, **where)
    getattr(made, fill)(*numbers, generator=generator)
    return made.requires_grad_(requires_grad)


def rand(*size: Any, generator: Generator = None, **where: Unpack[_Where]) -> DTensor:
    """Uniform random numbers on a mesh: those of `torch.rand` with the same seed, in any layout.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> _ = torch.manual_seed(0); x = rand(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    >>> _ = torch.manual_seed(0); torch.equal(x.full_tensor(), torch.rand(4))
    True
    """
    return _random("uniform_", (), _sizes(size), generator, where)


def randn(*size: Any, generator: Generator = None, **where: Unpack[_Where]) -> DTensor:
    """Normal random numbers on a mesh: those of `torch.randn` with the same seed, in any layout."""
    return _random("normal_", (), _sizes(size), generator, where)
