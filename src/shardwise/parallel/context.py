"""`context_parallel`: tensors that are sharded along their sequence while a block runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from math import gcd
from typing import Any

import torch
from torch import nn

from .._torch import pytree, swap_contents
from ..errors import LayoutError, MeshError, need, public
from ..layout.make_mesh import is_virtual
from ..layout.mesh import AnyMesh, topology, whole_mesh
from ..layout.placement import Placement, Replicate, Shard
from ..storage.plain import check_equal
from ..tensor.autograd import as_gradient
from ..tensor.dtensor import DTensor

_BLOCKS = 8
"""Every rank has a part of each block of a sequence: causal work is then even within an eighth."""


@public
def context_parallel(
    mesh: AnyMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: AbstractSet[torch.Tensor] | None = None,
) -> AbstractContextManager[None]:
    """Shard tensors along their sequence, in place, while the block runs.

    `buffers` are inputs, targets and tables of positions, and `buffer_seq_dims` their dims of the
    sequence. In the block they are DTensors whose sequence is sharded over `mesh`, which has one
    axis. It may be a part of a mesh: a plain tensor, which must be equal on all ranks, is then
    replicated over the other axes. After the block they are what they were before it, but for
    `no_restore_buffers`, which stay sharded.

    The signature is that of PyTorch's. Here shapes stay global, and nothing is patched: attention
    works in the same way on any DTensor whose sequence is sharded.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    >>> tokens = torch.arange(32).view(2, 16)
    >>> with shardwise.context_parallel(mesh["cp"], buffers=[tokens], buffer_seq_dims=[1]):
    ...     print(tokens.shape, tokens.placements)
    torch.Size([2, 16]) (S(1, split=8), R)
    >>> type(tokens)
    <class 'torch.Tensor'>
    """
    given = _listed("buffers", buffers, torch.Tensor, "a list of tensors")
    dims = _listed("buffer_seq_dims", buffer_seq_dims, int, "a list of dims")
    kept = _listed("no_restore_buffers", no_restore_buffers, torch.Tensor, "a set of tensors")
    _check(mesh, given, dims, kept)
    return _sharded_inside(mesh, given, dims, kept)


@contextmanager
def _sharded_inside(
    mesh: AnyMesh, given: list[Any], dims: list[Any], kept: list[Any]
) -> Iterator[None]:
    sharded = [_sharded(buffer, mesh, dim) for buffer, dim in zip(given, dims, strict=True)]
    pairs = list(zip(given, sharded, strict=True))
    for buffer, other in pairs:
        swap_contents(buffer, other)
    try:
        yield
    finally:
        for buffer, other in pairs:
            if not any(buffer is each for each in kept):
                swap_contents(buffer, other)


def check_axis(mesh: AnyMesh, axis: str) -> None:
    """An error if sequences cannot be sharded over an axis of this name."""
    names = topology(mesh).names
    if axis not in names:
        raise MeshError(
            f"shard_module: context_parallel={axis!r} is no axis of mesh {topology(mesh)}. Give "
            f"one of {', '.join(map(repr, names))}."
        )


def shard_sequences(model: nn.Module, mesh: AnyMesh, axis: str) -> None:
    """Let a model shard dim 1 of its inputs over an axis, where it is as long as that of the first
    input."""

    def lay_out(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        sequences = [x for x in leaves if isinstance(x, torch.Tensor) and x.ndim > 1]
        length = sequences[0].shape[1] if sequences else 0
        given = {id(x): _sharded(x, mesh[axis], 1) for x in sequences if x.shape[1] == length}
        return pytree.tree_unflatten([given.get(id(leaf), leaf) for leaf in leaves], tree)

    model.register_forward_pre_hook(lay_out, with_kwargs=True)


def _listed(name: str, given: Any, kind: type, words: str) -> list[Any]:
    """An argument with several values of one class as a list."""
    what = f"context_parallel: {name}"
    need(what, given, Sequence | AbstractSet | None, words)
    for each in given or ():
        need(what, each, kind, words)
    return list(given or ())


def _check(
    mesh: AnyMesh, buffers: list[torch.Tensor], dims: list[int], kept: list[torch.Tensor]
) -> None:
    where = topology(mesh)
    if where.ndim != 1:
        raise MeshError(
            f"context_parallel: the sequence is sharded over one axis, but mesh {where} has "
            f"{where.ndim}. Give one of them, such as mesh[{where.names[0]!r}]."
        )
    if len(buffers) != len(dims):
        raise LayoutError(
            f"context_parallel: {len(buffers)} buffers, but {len(dims)} buffer_seq_dims were "
            "given. Give the dim of the sequence for each buffer."
        )
    if not all(any(each is buffer for buffer in buffers) for each in kept):
        raise LayoutError("context_parallel: no_restore_buffers must be some of the buffers.")
    for at, buffer in enumerate(buffers):
        if isinstance(buffer, nn.Parameter) or buffer.requires_grad:
            raise LayoutError(
                f"context_parallel: buffer {at} requires a gradient. Parameters are placed by "
                "shard_module, and other tensors by distribute_tensor."
            )
        if any(buffer is other for other in buffers[:at]):
            raise LayoutError(f"context_parallel: buffer {at} is given twice.")


def _sharded(buffer: Any, mesh: AnyMesh, dim: int) -> DTensor:
    """A tensor with its sequence sharded over the axis of `mesh`."""
    axis = topology(mesh).names[0]
    whole = buffer.device_mesh if isinstance(buffer, DTensor) else whole_mesh(mesh)
    names = topology(whole).names
    if axis not in names:
        raise MeshError(
            f"context_parallel: a buffer is on mesh {topology(whole)}, which has no axis {axis!r}."
        )
    places: list[Placement] = [Replicate()] * len(names)
    if isinstance(buffer, DTensor):
        places = list(buffer.placements)
    places[names.index(axis)] = _shard(buffer.shape, dim, topology(mesh).shape[0])
    if isinstance(buffer, DTensor):
        return buffer.redistribute(placements=places)
    if not is_virtual(whole):
        check_equal("context_parallel", topology(whole), buffer)
    here = buffer.to(topology(whole).device_type)
    return as_gradient(here, topology(whole)).redistribute(placements=places)  # type: ignore[no-any-return]


def _shard(shape: Sequence[int], dim: int, ranks: int) -> Shard:
    """The sequence in blocks, of which each rank has a part; consecutive if there are too few
    positions.

    >>> _shard((2, 24), 1, 4), _shard((2, 24), 1, 2), _shard((2, 15), -1, 4)
    (S(1, split=4), S(1, split=8), S(-1))
    """
    at = dim % max(len(shape), 1)
    blocks = gcd(shape[at], _BLOCKS) if -len(shape) <= dim < len(shape) else 1
    while blocks > 1 and shape[at] < blocks * ranks:
        blocks //= 2
    return Shard(dim, blocks)
