"""The buffer of a collective: how much a rank may hold beside the tensors it moves from and to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product

import torch

from .._torch import is_tracing
from ..errors import CommunicationError
from ..geometry import Box, box_numel
from .lane import here

__all__ = ["Rooms", "buffer_size", "chunks", "exchange_buffer", "give_back"]


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


def give_back(parts: Iterable[torch.Tensor], kept: Iterable[torch.Tensor] = ()) -> None:
    """Free the memory of tensors that nobody needs any more, but not that of `kept`.

    To forget them is not enough: gloo's own thread may hold what it was given a while longer than
    the wait for it, and another buffer is made meanwhile.
    """
    if is_tracing():  # a graph frees by itself
        return
    keep = {each.untyped_storage().data_ptr() for each in kept}
    for part in parts:
        memory = part.untyped_storage()
        if part.device.type != "meta" and memory.data_ptr() not in keep:
            memory.resize_(0)


class Rooms:
    """The memory into which a collective packs, round by round."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}

    def room(self, name: str, nbytes: int, device: torch.device) -> torch.Tensor:
        """Some bytes: those that had this name before, if they are enough."""
        found = self._made.pop(name, None)
        if found is None or found.numel() < nbytes:
            if found is not None:
                give_back([found])  # before more is taken
            found = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._made[name] = found
        return found[:nbytes]

    def close(self) -> None:
        """Give it back: all rounds have landed."""
        give_back(self._made.values())
        self._made.clear()


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
