"""Windows of planes, for convolution.py; and pooling, padding and interpolation of whole planes.

If a dim of a plane is sharded, each rank makes its own piece of the result. It fetches the interval
that its piece reads (storage/halo.py), fills in the padding by hand, and calls the operator with
padding 0. The gradient goes the other way: a rank fetches the gradients of all windows that read
its piece, calls the operator's backward on the span of those windows, and cuts out its piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..layout.geometry import Box, Cuts, Interval, chunk_cuts, contiguous_stride, intervals
from ..layout.spec import DTensorSpec
from .language import Along, Call, Dims, Rule, along, has_fractions, replicated, unless_empty

Tables = dict[int, tuple[Interval, ...]]
"""For some dims an interval for each shard."""


@dataclass(frozen=True)
class Slide:
    """A window of `kernel` elements, `dilation` apart, that moves by `stride` over a padded dim.

    The dim has `size` elements; the result has one for each of `stops` positions of the window.
    """

    size: int
    stops: int
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    pad: int = 0

    def reads(self, stops: Interval) -> Interval:
        """The elements that these stops read; padding is outside of the dim.

        >>> Slide(size=8, stops=8, kernel=3, pad=1).reads((0, 4))
        (-1, 5)
        """
        first, last = stops
        start = first * self.stride - self.pad
        if last <= first:
            return start, start
        return start, (last - 1) * self.stride - self.pad + (self.kernel - 1) * self.dilation + 1

    def readers(self, piece: Interval) -> Interval:
        """The stops whose windows reach over some of these elements; all stops for the whole dim.

        >>> Slide(size=8, stops=4, kernel=2, stride=2).readers((3, 5))
        (1, 3)
        """
        if piece == (0, self.size):
            return 0, self.stops
        reach = (self.kernel - 1) * self.dilation
        first = -(-(piece[0] + self.pad - reach) // self.stride)
        last = (piece[1] - 1 + self.pad) // self.stride + 1
        return clipped((first, last), self.stops) if piece[0] < piece[1] else (0, 0)

    def touching(self, piece: Interval, own: Interval) -> Interval:
        """The stops from the first to the last of `own` and of the readers of these elements."""
        filled = [each for each in (own, self.readers(piece)) if each[0] < each[1]] or [own]
        return min(start for start, _ in filled), max(stop for _, stop in filled)


@dataclass(frozen=True)
class InProportion:
    """Cuts of a dim of another size than its factor: those of `torch.chunk` if the factor is cut
    so, else in proportion."""

    size: int
    other: int

    def to_factor(self, cuts: Cuts) -> Cuts | None:
        return None

    def from_factor(self, cuts: Cuts, counts: tuple[int, ...]) -> Cuts:
        if cuts == chunk_cuts(self.size, counts):
            return chunk_cuts(self.other, counts)
        ends = [0, *(stop * self.other // max(self.size, 1) for _, stop in intervals(cuts))]
        return tuple(b - a for a, b in pairwise([*ends[:-1], self.other]))


def clipped(piece: Interval, size: int) -> Interval:
    """The part of an interval that lies in a dim of this size."""
    start = min(max(piece[0], 0), size)
    return start, min(max(piece[1], start), size)


def fitted(value: torch.Tensor, have: Sequence[Interval], want: Sequence[Interval]) -> torch.Tensor:
    """A tensor that holds `have` of its last dims, cut or filled with zeros to hold `want`."""
    pairs = list(zip(have, want, strict=True))
    if all(a == b for a, b in pairs):
        return value
    if any(min(a[1], b[1]) <= max(a[0], b[0]) for a, b in pairs):
        lead = value.shape[: value.ndim - len(pairs)]
        return value.new_zeros([*lead, *(stop - start for start, stop in want)])
    ends = ((a[0] - b[0], b[1] - a[1]) for a, b in reversed(pairs))
    return torch.constant_pad_nd(value, [pad for each in ends for pad in each])


@dataclass(frozen=True)
class Halo:
    """The windows of a call: one slide for each dim from `first` on. The dims before are apart."""

    slides: tuple[Slide, ...]
    first: int

    def dims(self) -> tuple[Dims, Dims]:
        """The dims of what is read and of the result."""
        places = [Along(f"i{dim}") for dim in range(self.first + len(self.slides))]
        stops = [
            Along(at.factor, None if own.size == own.stops else InProportion(own.size, own.stops))
            for at, own in zip(places[self.first :], self.slides, strict=True)
        ]
        return tuple(places), (*places[: self.first], *stops)

    def is_cut(self, spec: DTensorSpec) -> bool:
        """True if a dim with windows is sharded."""
        return any(spec.dim_axes[self.first :])

    def tables(self, result: DTensorSpec, read: DTensorSpec) -> Tables:
        """The intervals of the sharded dims of `read` that the shards of a result read."""
        return {
            dim: tuple(clipped(slide.reads(p), slide.size) for p in result.pieces(dim))
            for dim, slide in enumerate(self.slides, self.first)
            if read.dim_axes[dim]
        }

    def window(self, value: torch.Tensor, box: Box) -> torch.Tensor:
        """The input of the stops in `box`: the fetched elements, and zeros for the padding."""
        want = [s.reads(piece) for s, piece in zip(self.slides, box[self.first :], strict=True)]
        each = zip(self.slides, want, value.shape[self.first :], strict=True)
        # A dim that is not sharded is there as a whole.
        have = [(0, s.size) if n == s.size else clipped(own, s.size) for s, own, n in each]
        return fitted(value, have, want)


# --- whole planes ----------------------------------------------------------------------------


def plane_dims(call: Call) -> int:
    """How many dims a plane has, by the operator's name."""
    return next(count for count in (1, 2, 3) if f"{count}d" in call.name)


def whole_planes(call: Call) -> Rule:
    """`"n c _ _ -> n c _ _"`: pooling, padding and their gradients, with planes needed whole."""
    shape = call.shape(0)
    lead = [f"i{dim}" for dim in range(len(shape) - plane_dims(call))]
    dims = along([*lead, *[None] * plane_dims(call)])
    linear = has_fractions(call.specs[0].dtype) and (
        "max_pool" not in call.name or "backward" in call.name
    )
    return Rule(
        (dims,) * len(call.specs),
        (dims,) * len(call.results),
        dict(zip(lead, shape, strict=False)),
        reduce=None,
        linear=((0,),) if linear else (),
        **unless_empty(call),
    )


def resampled(call: Call) -> Rule:
    """Interpolation: `"n c _ _ -> n c _ _"`"""
    made = call.results[0]
    nearest = "nearest" in call.name and made.dtype is torch.float64
    if nearest and made.stride != contiguous_stride(made.shape):
        return replicated(call)  # how kernels round indices depends on the sizes of a shard
    return whole_planes(call)


def resampled_backward(call: Call) -> Rule:
    """The gradient of an image; the kernel is told the shape of its shard."""
    return replace(resampled(call), shape_arg=call.position("input_size"))
