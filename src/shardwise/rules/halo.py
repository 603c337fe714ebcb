"""Operators that read windows of planes: pooling; convolution.py uses this too.

If a dim of a plane is sharded, each rank makes its own piece of the result. It fetches the interval
that its piece reads (storage/halo.py), fills in the padding by hand, and calls the operator with
padding 0. The gradient goes the other way: a rank fetches the gradients of all windows that read
its piece, calls the operator's backward on the span of those windows, and cuts out its piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from ..layout.geometry import Box, Cuts, Interval, chunk_cuts, intervals
from ..layout.spec import DTensorSpec
from .language import Along, Call, Dims, Rule, Site, along, has_fractions, unless_empty, zeros_at

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


def narrowed(value: torch.Tensor, dim: int, have: Interval, want: Interval) -> torch.Tensor:
    """The part `want` of a tensor that holds `have` of a dim."""
    size = want[1] - want[0]
    return value if have == want else value.narrow(dim, want[0] - have[0] if size else 0, size)


def _fitted(value: torch.Tensor, dim: int, have: Interval, want: Interval) -> torch.Tensor:
    """A tensor that holds `have` of a dim, cut or filled with zeros to hold `want`."""
    if have == want:
        return value
    if min(have[1], want[1]) <= max(have[0], want[0]):
        return value.new_zeros([*value.shape[:dim], want[1] - want[0], *value.shape[dim + 1 :]])
    pads = [0, 0] * (value.ndim - 1 - dim) + [have[0] - want[0], want[1] - have[1]]
    return torch.constant_pad_nd(value, pads)


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

    def reads(self, reader: DTensorSpec, read: DTensorSpec) -> Tables:
        """What the shards of `reader`, a result, read of `read`."""
        return self._tables(reader, read, Slide.reads)

    def readers(self, reader: DTensorSpec, read: DTensorSpec) -> Tables:
        """The gradients `read` that the shards of `reader`, an image, take part in."""
        return self._tables(reader, read, Slide.readers)

    def _tables(
        self, reader: DTensorSpec, read: DTensorSpec, reach: Callable[[Slide, Interval], Interval]
    ) -> Tables:
        """The intervals of the sharded dims of `read` that the shards of `reader` reach."""
        return {
            dim: tuple(clipped(reach(slide, p), read.meta.shape[dim]) for p in reader.pieces(dim))
            for dim, slide in enumerate(self.slides, self.first)
            if read.dim_axes[dim]
        }

    def spans(self, box: Box) -> list[Interval]:
        """The elements, with padding, that the readers of a box read."""
        pieces = zip(self.slides, box[self.first :], strict=True)
        return [slide.reads(slide.readers(piece)) for slide, piece in pieces]

    def span_shape(self, shape: Sequence[int], box: Box) -> list[int]:
        """The shape of the gradient of those elements."""
        return [*shape[: self.first], *(b - a for a, b in self.spans(box))]

    def window(self, value: torch.Tensor, box: Box, fill: float = 0) -> torch.Tensor:
        """What the stops in `box` read: the fetched elements, and `fill` for the padding."""
        pads: list[int] = []
        for dim, (slide, piece) in enumerate(zip(self.slides, box[self.first :], strict=True)):
            want = slide.reads(piece)
            start, stop = clipped(want, slide.size)
            if value.shape[self.first + dim] == slide.size:  # the dim is not sharded
                value = narrowed(value, self.first + dim, (0, slide.size), (start, stop))
            before = start - want[0] if start < stop else want[1] - want[0]
            pads = [before, want[1] - stop if start < stop else 0, *pads]
        return torch.constant_pad_nd(value, pads, fill) if any(pads) else value

    def cut_out(self, made: torch.Tensor, box: Box) -> torch.Tensor:
        """The box out of a gradient of its readers' span."""
        for dim, span in enumerate(self.spans(box), self.first):
            made = _fitted(made, dim, span, box[dim])
        return made


# --- pooling ---------------------------------------------------------------------------------


def each_dim_of(call: Call, name: str, count: int, default: Sequence[int]) -> list[int]:
    """An argument with a number for each of `count` dims, or one for all."""
    given = call.get(name)
    given = [given] if isinstance(given, int) else list(given or default)
    return given * count if len(given) == 1 else given


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


def _pool(call: Call, image: Sequence[int], result: Sequence[int]) -> Halo | None:
    """The windows of a pooling; None if its planes are needed whole."""
    count = plane_dims(call)
    kernel = each_dim_of(call, "kernel_size", count, ())
    numbers = zip(
        image[-count:],
        result[-count:],
        kernel,
        each_dim_of(call, "stride", count, kernel),
        each_dim_of(call, "dilation", count, [1]),
        each_dim_of(call, "padding", count, [0]),
        strict=True,
    )
    slides = tuple(Slide(*each) for each in numbers)
    simple = all(image) and all(slide.dilation == 1 for slide in slides)
    return Halo(slides, len(image) - count) if simple else None


def max_pool(call: Call) -> Rule:
    """`"n c h~ w~ -> n c h~ w~, n c h~ w~"`: values, and their indices into the whole plane."""
    rule, halo = whole_planes(call), _pool(call, call.shape(0), call.results[0].shape)
    if halo is None:
        return rule
    dtype = call.specs[0].dtype
    least = float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
    kernel, stride = ([getattr(s, name) for s in halo.slides] for name in ("kernel", "stride"))

    def windows(inputs: Any, outputs: Any) -> dict[int, Tables]:
        return {0: halo.reads(outputs[0], inputs[0])}

    def unless(site: Site) -> bool:
        return not halo.is_cut(site.inputs[0]) and prod(site.out_shapes[0]) > 0

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        if unless(site):
            return op(*args, **kwargs)
        if not prod(site.out_shapes[0]):
            return zeros_at(call, site, args[0])
        window = halo.window(args[0], site.out_boxes[0], least)
        made, index = op(window, kernel, stride, [0] * len(kernel), 1, False)
        total = torch.zeros_like(index)
        shape, pieces = window.shape[halo.first :], site.out_boxes[0][halo.first :]
        for at, (slide, piece) in enumerate(zip(halo.slides, pieces, strict=True)):
            place = index // prod(shape[at + 1 :]) % shape[at] + slide.reads(piece)[0]
            # The first of equal elements is taken, which is padding if all are the least number.
            total = total * slide.size + place.clamp(min=0)
        return made, total

    places, stops = halo.dims()
    sizes = {f"i{dim}": size for dim, size in enumerate(call.shape(0))}
    rule = replace(rule, inputs=(places,), outputs=(stops, stops), sizes=sizes)
    return replace(rule, local=local, unless=unless, windows=windows)


def max_pool_backward(call: Call) -> Rule:
    """The gradient of each window goes to its largest element. The operands are the gradient of the
    result, the image, and indices."""
    rule, halo = whole_planes(call), _pool(call, call.shape(1), call.shape(0))
    if halo is None:
        return rule

    def windows(inputs: Any, outputs: Any) -> dict[int, Tables]:
        return {i: halo.readers(outputs[0], inputs[i]) for i in (0, 2)}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        grad, index, box = args[0], args[-1], site.out_boxes[0]
        if not (grad.numel() and prod(site.out_shapes[0])):
            return zeros_at(call, site, grad)
        if not halo.is_cut(site.outputs[0]):
            return op(*args, **kwargs)
        shape = halo.span_shape(site.out_shapes[0], box)
        return halo.cut_out(_scattered(grad, index, halo, shape, box), box)

    places, stops = halo.dims()
    sizes = {f"i{dim}": size for dim, size in enumerate(call.shape(1))}
    rule = replace(rule, inputs=(stops, places, stops), outputs=(places,), sizes=sizes)
    return replace(rule, local=local, unless=None, windows=windows)


def _scattered(
    grad: torch.Tensor, index: torch.Tensor, halo: Halo, shape: list[int], box: Box
) -> torch.Tensor:
    """Gradients added up where their indices into the whole plane say, on the span of a box."""
    mine = torch.zeros_like(index)
    inner = prod(slide.size for slide in halo.slides)
    for slide, (start, stop) in zip(halo.slides, halo.spans(box), strict=True):
        inner //= slide.size
        mine = mine * (stop - start) + index // inner % slide.size - start
    made = grad.new_zeros(*shape[: halo.first], prod(shape[halo.first :]))
    made.scatter_add_(-1, mine.flatten(halo.first), grad.flatten(halo.first))
    return made.view(shape)
