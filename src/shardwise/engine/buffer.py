"""The buffer of a collective: how much a rank may hold beside the tensors it moves from and to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

from ..errors import CommunicationError
from ..geometry import Box, box_numel
from .lane import here

__all__ = ["buffer_size", "chunks", "exchange_buffer"]


class _Buffer:
    """One for the process: a backward runs in other threads than its forward. What runs in the
    background has that of its call."""

    nbytes = 32 << 20


def buffer_size() -> int:
    """The bytes that a collective may pack and unpack at a time."""
    return _Buffer.nbytes if here.nbytes is None else here.nbytes


@contextmanager
def exchange_buffer(nbytes: int) -> Iterator[None]:
    """Let collectives use buffers of at most `nbytes`, the same on all ranks; it is 32 MiB.

    What is larger goes in rounds. A rank holds the source, the target and this, never more.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    >>> with shardwise.exchange_buffer(1 << 20):
    ...     y = x.redistribute(placements=[Shard(1)])
    """
    if not isinstance(nbytes, int) or nbytes < 1:
        raise CommunicationError(f"exchange_buffer: {nbytes!r} is no positive number of bytes.")
    before, _Buffer.nbytes = _Buffer.nbytes, nbytes
    try:
        yield
    finally:
        _Buffer.nbytes = before


def chunks(box: Box, most: int) -> list[Box]:
    """A box cut into boxes of at most `most` elements, in order; none if it is empty.

    >>> chunks(((0, 3), (0, 4)), 8)
    [((0, 2), (0, 4)), ((2, 3), (0, 4))]
    >>> chunks(((0, 2), (0, 4)), 3)
    [((0, 1), (0, 3)), ((0, 1), (3, 4)), ((1, 2), (0, 3)), ((1, 2), (3, 4))]
    """
    inner = box_numel(box)
    if inner <= most:
        return [box] if inner else []
    cut: list[list[tuple[int, int]]] = []
    for dim, (start, stop) in enumerate(box):
        inner //= stop - start
        step = max(1, most // inner) if inner <= most else 1
        cut.append([(a, min(a + step, stop)) for a in range(start, stop, step)])
        if inner <= most:
            cut += [[rest] for rest in box[dim + 1 :]]
            break
    return [tuple(each) for each in product(*cut)]
