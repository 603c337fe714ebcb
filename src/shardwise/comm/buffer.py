"""The buffer of a collective: how much a rank may hold beside the tensors it moves from and to."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch

from .._torch import is_tracing
from ..config import current
from ..layout.geometry import Box, box_numel

__all__ = ["Rooms", "buffer_size", "chunks", "give_back"]


def buffer_size() -> int:
    """The bytes that a collective may pack and unpack at a time."""
    return current().buffer


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
