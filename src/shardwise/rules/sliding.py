"""Windows that slide over a dim, as those of convolutions and pooling do: who reads what.

A sharded dim is no obstacle: each rank computes its own piece of the result, and reads the edges of
its neighbours' pieces. The arithmetic of kernel, stride, dilation and padding is here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..layout.geometry import Cuts, Interval, chunk_cuts, intervals, memory_order
from ..layout.spec import DTensorSpec
from ..redistribute import ordered
from .rule import Along

__all__ = [
    "Reach",
    "Slide",
    "clipped",
    "fitted",
    "followed",
    "hull",
    "in_order",
    "margins",
    "narrowed",
    "padded",
    "reached",
]

Reach = Callable[[Interval], Interval]
"""From a piece of one dim to the interval of another that it reads."""


@dataclass(frozen=True)
class Slide:
    """A window of `kernel` places, `dilation` apart, that moves by `stride` over a padded dim.

    The dim has `size` places, and the window stops at `stops`.
    """

    size: int
    stops: int
    kernel: int
    stride: int
    dilation: int
    pad: int

    def reads(self, stops: Interval) -> Interval:
        """The places that these stops read; in the padding they are outside of the dim.

        >>> Slide(size=8, stops=8, kernel=3, stride=1, dilation=1, pad=1).reads((0, 4))
        (-1, 5)
        """
        first, last = stops
        start = first * self.stride - self.pad
        if last <= first:
            return start, start
        return start, (last - 1) * self.stride - self.pad + (self.kernel - 1) * self.dilation + 1

    def readers(self, places: Interval) -> Interval:
        """The stops whose windows reach over some of these places.

        >>> Slide(size=8, stops=4, kernel=2, stride=2, dilation=1, pad=0).readers((3, 5))
        (1, 3)
        """
        reach = (self.kernel - 1) * self.dilation
        first = -(-(places[0] + self.pad - reach) // self.stride)
        last = (places[1] - 1 + self.pad) // self.stride + 1
        return clipped((first, last), self.stops) if places[0] < places[1] else (0, 0)


@dataclass(frozen=True)
class InProportion:
    """Cuts of a dim of another size: as `torch.chunk` cuts if the factor is cut so, else in
    proportion."""

    size: int
    other: int

    def to_factor(self, cuts: Cuts) -> Cuts | None:
        return None

    def from_factor(self, cuts: Cuts, counts: tuple[int, ...]) -> Cuts:
        if cuts == chunk_cuts(self.size, counts):
            return chunk_cuts(self.other, counts)
        ends = [0, *(stop * self.other // max(self.size, 1) for _, stop in intervals(cuts))]
        return tuple(b - a for a, b in pairwise([*ends[:-1], self.other]))


def followed(factor: str, size: int, other: int) -> Along:
    """A dim of size `other` that walks along a factor of size `size`."""
    return Along(factor, None if size == other else InProportion(size, other))


def clipped(piece: Interval, size: int) -> Interval:
    """What of an interval lies in a dim of `size` places."""
    start = min(max(piece[0], 0), size)
    return start, min(max(piece[1], start), size)


def hull(*pieces: Interval) -> Interval:
    """The smallest interval that holds all that are not empty."""
    filled = [piece for piece in pieces if piece[0] < piece[1]] or [pieces[0]]
    return min(start for start, _ in filled), max(stop for _, stop in filled)


def reached(
    reader: DTensorSpec, read: DTensorSpec, reaches: Sequence[Reach | None], dim: int
) -> dict[int, tuple[Interval, ...]]:
    """The intervals of `read` for each shard of `reader`, on the dims from `dim` on."""
    tables = {}
    for at, reach in enumerate(reaches, dim):
        if reach is not None and read.dim_axes[at]:
            size = read.meta.shape[at]
            tables[at] = tuple(clipped(reach(piece), size) for piece in reader.pieces(at))
    return tables


# --- tensors --------------------------------------------------------------------------------------


def margins(want: Interval, size: int) -> Interval:
    """How many places before and after a dim of `size` an interval has that begins before its end
    or is all outside."""
    start, stop = clipped(want, size)
    if start == stop:
        return want[1] - want[0], 0
    return start - want[0], want[1] - stop


def padded(
    value: torch.Tensor, dim: int, edges: Sequence[Interval], fill: float = 0
) -> torch.Tensor:
    """`value` with places before and after each dim from `dim` on; negative numbers take away."""
    if not any(any(edge) for edge in edges):
        return value
    pads = [width for edge in reversed(edges) for width in edge]
    assert dim + len(edges) == value.ndim
    return torch.constant_pad_nd(value, pads, fill)


def fitted(value: torch.Tensor, dim: int, have: Interval, want: Interval) -> torch.Tensor:
    """A tensor that holds `have` of a dim, cut or filled with zeros to hold `want`."""
    if have == want:
        return value
    if have[0] >= have[1] or min(have[1], want[1]) <= max(have[0], want[0]):
        shape = list(value.shape)
        shape[dim] = want[1] - want[0]
        return value.new_zeros(shape)
    edges = [(0, 0)] * (value.ndim - 1 - dim)
    return padded(value, dim, [(have[0] - want[0], want[1] - have[1]), *edges])


def narrowed(value: torch.Tensor, dim: int, have: Interval, want: Interval) -> torch.Tensor:
    """The part `want` of a tensor that holds `have` of a dim."""
    if have == want:
        return value
    size = want[1] - want[0]
    return value.narrow(dim, want[0] - have[0] if size else 0, size)


def in_order(value: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """A local result with its dims in memory as the global result has them."""
    return ordered(value, memory_order(spec.meta.stride))
