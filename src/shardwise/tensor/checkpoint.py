"""The methods of a DTensor that `torch.distributed.checkpoint` (DCP) calls.

A rank writes and reads one chunk for each box that it holds: one box, several if a dim has
`Shard(split=...)`, none if its shard is empty. Replicas name the same chunks; DCP writes each once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import torch

from ..dispatch.views import DeferredView
from ..errors import LayoutError, ShardwiseError
from ..layout.geometry import Interval
from ..layout.spec import DTensorSpec
from ..layout.split_dims import held_of
from ..storage.operands import in_layout
from ..storage.wrapper import Locals, exposed_locals


class Chunk(NamedTuple):
    """A box of the global tensor, and where it starts in a local tensor of this process."""

    slot: int
    offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    size: tuple[int, ...]


def chunks(spec: DTensorSpec) -> list[Chunk]:
    """The boxes that this process holds of a tensor, after Partial axes are reduced.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.arange(8), mesh, [Shard(0, split=2)])
    >>> [(chunk.offset, chunk.size) for chunk in chunks(x._spec)]
    [((0,), (2,)), ((4,), (2,)), ((2,), (2,)), ((6,), (2,))]
    """
    spec = spec.reduced
    if not spec.slots:
        return []  # this rank is not in the mesh
    if not prod(spec.shape):  # without a chunk DCP would not know the tensor
        zeros = (0,) * spec.ndim
        return [Chunk(0, zeros, zeros, tuple(spec.shape))]
    found = []
    for slot, coord in enumerate(spec.slots):
        for runs in product(*map(_runs, held_of(spec, coord))):
            offset, local_offset, size = zip(*runs, strict=True) if runs else ((), (), ())
            # DCP would keep the offset of an empty chunk, which another chunk has too.
            if prod(size):
                found.append(Chunk(slot, offset, local_offset, size))
    return found


Run = tuple[int, int, int]
"""Consecutive indices of a dim: the first of them, its place in the local tensor, their number."""


def _runs(held: Sequence[Interval]) -> list[Run]:
    """The intervals of a dim that a rank holds, as runs; they lie one after another."""
    places = accumulate([stop - start for start, stop in held], initial=0)
    return [(a, place, b - a) for (a, b), place in zip(held, places, strict=False)]


class CheckpointProtocol:
    """Chunks of a tensor, in the two forms that versions of DCP ask for."""

    _spec: DTensorSpec

    def __create_write_items__(self: Any, fqn: str, object: Any) -> list[Any]:
        """The chunks that this process offers to write. All ranks call this, so a Partial is
        reduced here, not when one rank writes."""
        from torch.distributed.checkpoint import metadata, planner

        parts = _parts_to_write(self, fqn)
        items = []
        for chunk, stored in zip(chunks(self._spec), _stored(self._spec), strict=True):
            data = planner.TensorWriteData(
                chunk=stored,
                properties=metadata.TensorProperties.create_from_tensor(parts[chunk.slot]),
                size=self.size(),
            )
            index = metadata.MetadataIndex(fqn, stored.offsets)
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self: Any) -> list[Any]:
        """The chunks that this process reads. DCP writes into the local tensors."""
        # These are no ValueErrors, which DCP would catch.
        if self._spec.sums:
            raise ShardwiseError(
                f"load: {self._spec} is Partial, and a checkpoint has whole values. Load into a "
                "tensor with Replicate() or Shard(dim) in its place."
            )
        if isinstance(self, DeferredView):
            raise ShardwiseError(
                f"load: {self._spec} is a view whose elements other ranks hold. Load into a tensor "
                "of its own, and copy_ that into the view."
            )
        exposed_locals(self)
        return _stored(self._spec)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """The part of a local tensor that a chunk is written from, or read into."""
        found = chunks(self._spec)
        if index.offset is not None:
            found = [chunk for chunk in found if chunk.offset == tuple(index.offset)]
        if len(found) != 1:
            raise LayoutError(
                f"{index.fqn}: this rank holds no chunk at {index.offset} of {self._spec}."
            )
        return local_part(self, found[0])

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self._spec.shape)

    @property
    def global_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Where the boxes that this process holds start in the tensor."""
        return tuple([chunk.offset for chunk in chunks(self._spec)])

    @property
    def local_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Where the boxes that this process holds start in its local tensor."""
        return tuple([chunk.local_offset for chunk in chunks(self._spec)])

    @property
    def local_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of the boxes that this process holds."""
        return tuple([chunk.size for chunk in chunks(self._spec)])


def local_part(tensor: Any, chunk: Chunk) -> torch.Tensor:
    """The part of a local tensor that is a chunk."""
    part = _parts_here(tensor)[chunk.slot]
    if not prod(chunk.size):
        return part.new_empty(chunk.size)  # of the whole tensor, which has no elements
    for dim, (start, size) in enumerate(zip(chunk.local_offset, chunk.size, strict=True)):
        if size != part.shape[dim]:
            part = part.narrow(dim, start, size)
    return part


def _stored(spec: DTensorSpec) -> list[Any]:
    """The chunks as DCP stores them."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(chunk.offset), sizes=torch.Size(chunk.size))
        for chunk in chunks(spec)
    ]


def _parts_to_write(tensor: Any, fqn: str) -> Locals:
    moves = bool(tensor._spec.sums) or isinstance(tensor, DeferredView)
    background = threading.current_thread() is not threading.main_thread()
    # A copy that DCP made in order to save it later has the attributes of a view, not its class.
    copied = not moves and not vars(tensor).keys().isdisjoint(("_of", "_ready"))
    if copied or (moves and background):
        raise LayoutError(
            f"{fqn}: {tensor._spec} has to be reduced or moved before it is saved, which needs all "
            "ranks and cannot be done in the background. Give async_save a tensor that holds its "
            "value: x.redistribute(placements=...), or x.clone() of a view."
        )
    if not moves:
        return tensor._locals  # type: ignore[no-any-return]
    tensor._to_write = parts = in_layout(tensor, tensor._spec.reduced)
    return parts


def _parts_here(tensor: Any) -> Locals:
    """The local tensors as they are: only some ranks call this, so nothing may move."""
    to_write: Locals | None = vars(tensor).get("_to_write")
    if to_write is not None:
        return to_write
    exposed = tensor._cell is not None and tensor._cell.exposed
    return exposed_locals(tensor) if exposed else tensor._locals
