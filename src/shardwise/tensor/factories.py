"""Factories: `zeros`, `randn`, `arange` and others, with the tensor on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypedDict, Unpack

import torch

from ..errors import ArgumentError, LayoutError, need, public
from ..layout.geometry import contiguous_stride
from ..layout.mesh import AnyMesh, topology
from ..layout.spec import (
    DTensorSpec,
    Placements,
    TensorMeta,
    checked_placements,
    default_placements,
)
from ..random import permuted
from ..storage.wrapper import Locals, wrap
from .dtensor import DTensor, distribute_tensor


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
            raise ArgumentError(
                f"unexpected keyword argument {name!r}: a factory takes {', '.join(known)}."
            )


def _made(
    name: str, shape: tuple[int, ...], where: _Where, fill: Callable[[DTensorSpec], Locals]
) -> DTensor:
    """A tensor whose ranks make their local tensors; a Partial one is made replicated first."""
    _check_names(where)
    need(name, where.get("dtype"), torch.dtype | None, "a dtype")
    need(name, where.get("requires_grad", False), bool, "True or False as requires_grad")
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


@public
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


@public
def ones(*size: Any, **where: Unpack[_Where]) -> DTensor:
    """Ones on a mesh; each rank makes only what it holds."""
    return _made("ones", _sizes(size), where, _local(torch.ones))


def _local(make: Callable[..., torch.Tensor]) -> Callable[[DTensorSpec], Locals]:
    """A function that makes the local tensors with a factory of PyTorch."""

    def fill(spec: DTensorSpec) -> Locals:
        kind: Any = {"dtype": spec.dtype, "device": spec.topology.device_type}
        return tuple(make(spec.local_shape(coord), **kind) for coord in spec.slots)

    return fill


@public
def full(size: Sequence[int], fill_value: Any, **where: Unpack[_Where]) -> DTensor:
    """One value everywhere, on a mesh; the dtype is the value's, as in `torch.full`.

    >>> import shardwise
    >>> full((2,), 7, device_mesh=shardwise.init_device_mesh("cpu", (2,))).dtype
    torch.int64
    """
    where["dtype"] = where.get("dtype") or torch.full((), fill_value).dtype
    return _made("full", _sizes((size,)), where, _local(partial(torch.full, fill_value=fill_value)))


@public
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


@public
def rand(*size: Any, generator: Generator = None, **where: Unpack[_Where]) -> DTensor:
    """Uniform random numbers on a mesh: those of `torch.rand` with the same seed, in any layout.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> _ = torch.manual_seed(0); x = rand(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    >>> _ = torch.manual_seed(0); torch.equal(x.full_tensor(), torch.rand(4))
    True
    """
    return _random("uniform_", (), _sizes(size), generator, where)


@public
def randn(*size: Any, generator: Generator = None, **where: Unpack[_Where]) -> DTensor:
    """Normal random numbers on a mesh: those of `torch.randn` with the same seed, in any layout."""
    return _random("normal_", (), _sizes(size), generator, where)


@public
def randint(*bounds: Any, generator: Generator = None, **where: Unpack[_Where]) -> DTensor:
    """Random integers on a mesh: `randint(high, size)` or `randint(low, high, size)`.

    >>> import shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> randint(3, 4, (5,), device_mesh=mesh, placements=[shardwise.Shard(0)])
    DTensor([3, 3, 3, 3, 3], int64[5@0] on (2))
    """
    if len(bounds) not in (2, 3):
        raise LayoutError(
            f"randint: {len(bounds)} arguments were given. Write randint(high, size) or "
            "randint(low, high, size)."
        )
    *limits, size = bounds
    low, high = (0, *limits) if len(limits) == 1 else limits
    for each in (low, high):
        need("randint", each, SupportsIndex, "an int for each bound")
    where["dtype"] = where.get("dtype") or torch.int64
    return _random("random_", (low, high), _sizes((size,)), generator, where)


@public
def randperm(n: int, *, generator: Generator = None, **where: Unpack[_Where]) -> DTensor:
    """The numbers below `n` in random order, on a mesh.

    >>> import shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> randperm(5, device_mesh=mesh, placements=[shardwise.Shard(0)]).sort()[0].tolist()
    [0, 1, 2, 3, 4]
    """
    where["dtype"] = where.get("dtype") or torch.int64
    return _made("randperm", (n,), where, lambda spec: permuted(spec, generator))


@public
def arange(start: Any, end: Any = None, step: Any = 1, **where: Unpack[_Where]) -> DTensor:
    """Numbers in steps, on a mesh: those of `torch.arange`, of which each rank keeps its part.

    >>> import shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> arange(5, device_mesh=mesh, placements=[shardwise.Shard(0)]).tolist()
    [0, 1, 2, 3, 4]
    """
    first, last = (0, start) if end is None else (start, end)
    return _kept(where, torch.arange, first, last, step)


@public
def linspace(start: Any, end: Any, steps: int, **where: Unpack[_Where]) -> DTensor:
    """Numbers at equal distances, on a mesh: those of `torch.linspace`.

    >>> import shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> linspace(0, 1, 5, device_mesh=mesh, placements=[shardwise.Shard(0)]).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    return _kept(where, torch.linspace, start, end, steps)


@public
def logspace(
    start: Any, end: Any, steps: int, base: float = 10.0, **where: Unpack[_Where]
) -> DTensor:
    """Numbers at equal ratios, on a mesh: those of `torch.logspace`."""
    return _kept(where, torch.logspace, start, end, steps, base)


def _kept(where: _Where, make: Callable[..., torch.Tensor], *args: Any) -> DTensor:
    """A tensor that every rank makes whole, of which it keeps its part."""
    _check_names(where)
    whole = make(*args, dtype=where.get("dtype"))
    mesh, placements = where.get("device_mesh"), where.get("placements")
    made = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return made.requires_grad_(where.get("requires_grad", False))


@public
def eye(n: int, m: int | None = None, **where: Unpack[_Where]) -> DTensor:
    """Ones on the diagonal, on a mesh; each rank makes only what it holds.

    >>> import shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> eye(3, device_mesh=mesh, placements=[shardwise.Shard(0)]).sum().item()
    3.0
    """
    requires_grad = where.pop("requires_grad", False)
    made = zeros(n, n if m is None else m, **where)
    made.diagonal().fill_(1)
    return made.requires_grad_(requires_grad)
