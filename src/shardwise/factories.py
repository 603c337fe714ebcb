"""Factories: tensors made in place on a mesh, as `torch.zeros` and its like make them on a
device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .geometry import contiguous_stride
from .mesh import AnyMesh, topology
from .placement import Placement
from .spec import DTensorSpec, TensorMeta, checked_placements, default_placements
from .tensor import DTensor
from .wrapper import wrap

__all__ = ["arange", "empty", "full", "ones", "rand", "randn", "zeros"]


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size


def _made(
    name: str,
    shape: tuple[int, ...],
    device_mesh: AnyMesh | None,
    placements: Sequence[Placement] | None,
    dtype: torch.dtype | None,
    requires_grad: bool,
    fill: Callable[[tuple[int, ...], torch.dtype, str], torch.Tensor],
) -> DTensor:
    from .errors import MeshError

    if device_mesh is None:
        raise MeshError(f"{name}: say on which mesh with device_mesh=.")
    mesh = topology(device_mesh)
    kind = torch.get_default_dtype() if dtype is None else dtype
    meta = TensorMeta(shape, contiguous_stride(shape), kind)
    places = checked_placements(name, mesh, placements, len(shape))
    spec = DTensorSpec(mesh, places, meta)
    if spec.sums:
        whole = DTensorSpec(mesh, default_placements(mesh), meta)
        value: DTensor = wrap(
            whole, tuple(fill(shape, kind, mesh.device_type) for _ in whole.slots)
        )
        made: DTensor = wrap(spec, value.redistribute(placements=places)._locals)
        return made.requires_grad_(requires_grad)
    local = tuple(fill(spec.local_shape(c), kind, mesh.device_type) for c in spec.slots)
    made = wrap(spec, local)
    return made.requires_grad_(requires_grad)


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    device_mesh: AnyMesh | None = None,
    placements: Sequence[Placement] | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """Zeros on a mesh; each rank makes only what it holds.

    >>> import shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> zeros(5, 2, device_mesh=mesh, placements=[shardwise.Shard(0)])
    DTensor(float32[5, 2] [S(0)] on (2), local=[[3, 2], [2, 2]])
    """
    return _made(
        "zeros",
        _sizes(size),
        device_mesh,
        placements,
        dtype,
        requires_grad,
        lambda shape, dt, device: torch.zeros(shape, dtype=dt, device=device),
    )


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    device_mesh: AnyMesh | None = None,
    placements: Sequence[Placement] | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """Ones on a mesh; each rank makes only what it holds."""
    return _made(
        "ones",
        _sizes(size),
        device_mesh,
        placements,
        dtype,
        requires_grad,
        lambda shape, dt, device: torch.ones(shape, dtype=dt, device=device),
    )


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: AnyMesh | None = None,
    placements: Sequence[Placement] | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """One value everywhere, on a mesh; the dtype is the value's, as in `torch.full`.

    >>> import shardwise
    >>> full((2,), 7, device_mesh=shardwise.init_device_mesh("cpu", (2,))).dtype
    torch.int64
    """
    kind = torch.full((), fill_value).dtype if dtype is None else dtype
    return _made(
        "full",
        tuple(size),
        device_mesh,
        placements,
        kind,
        requires_grad,
        lambda shape, dt, device: torch.full(shape, fill_value, dtype=dt, device=device),
    )


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    device_mesh: AnyMesh | None = None,
    placements: Sequence[Placement] | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """Memory on a mesh, not set to anything."""
    return _made(
        "empty",
        _sizes(size),
        device_mesh,
        placements,
        dtype,
        requires_grad,
        lambda shape, dt, device: torch.empty(shape, dtype=dt, device=device),
    )


def _random(
    fill: str,
    size: tuple[Any, ...],
    dtype: torch.dtype | None,
    device_mesh: AnyMesh | None,
    placements: Sequence[Placement] | None,
    requires_grad: bool,
    generator: torch.Generator | None,
) -> DTensor:
    shape = _sizes(size)
    made = empty(shape, dtype=dtype, device_mesh=device_mesh, placements=placements)
    getattr(made, fill)(generator=generator)
    return made.requires_grad_(requires_grad)


def rand(
    *size: Any,
    dtype: torch.dtype | None = None,
    device_mesh: AnyMesh | None = None,
    placements: Sequence[Placement] | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Uniform random numbers on a mesh: those of `torch.rand` with the same seed, in any layout.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> _ = torch.manual_seed(0); x = rand(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    >>> _ = torch.manual_seed(0); torch.equal(x.full_tensor(), torch.rand(4))
    True
    """
    return _random("uniform_", size, dtype, device_mesh, placements, requires_grad, generator)


def randn(
    *size: Any,
    dtype: torch.dtype | None = None,
    device_mesh: AnyMesh | None = None,
    placements: Sequence[Placement] | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Normal random numbers on a mesh: those of `torch.randn` with the same seed, in any layout."""
    return _random("normal_", size, dtype, device_mesh, placements, requires_grad, generator)


def arange(
    start: Any,
    end: Any = None,
    step: Any = 1,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: AnyMesh | None = None,
    placements: Sequence[Placement] | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """Numbers in steps, on a mesh: those of `torch.arange`, of which each rank keeps its part.

    >>> import shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> arange(5, device_mesh=mesh, placements=[shardwise.Shard(0)]).tolist()
    [0, 1, 2, 3, 4]
    """
    from .errors import MeshError
    from .tensor import distribute_tensor

    if device_mesh is None:
        raise MeshError("arange: say on which mesh with device_mesh=.")
    first, last = (0, start) if end is None else (start, end)
    whole = torch.arange(first, last, step, dtype=dtype)
    made = distribute_tensor(whole, device_mesh, placements, src_data_rank=None)
    return made.requires_grad_(requires_grad)
