"""Operators that read windows of a dim: pooling, padding with a number, unfold; convolution.py uses
this too.

If such a dim is sharded, each rank makes its own piece of the result. It fetches the interval that
its piece reads (storage/halo.py), fills in the padding by hand, and calls the operator with padding
0. The gradient goes the other way: a rank fetches the gradients of all windows that read its piece,
calls the operator's backward on the span of those windows, and cuts out its piece.
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
from .language import (
    Along,
    Call,
    Dims,
    Rule,
    Site,
    has_fractions,
    named,
    replicated,
    zeros_at,
)
from .reductions import wide

Tables = dict[int, tuple[Interval, ...]]
"""For some dims an interval for each shard."""

Reach = Callable[[Interval], Interval]
"""From a piece of one dim to the interval of another that it reads."""


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

    @property
    def is_identity(self) -> bool:
        """True if each stop reads the element at its own index."""
        return self == Slide(self.size, self.size)

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


def in_proportion(factor: str, size: int, other: int) -> Along:
    """A dim of size `other` that walks along a factor of size `size`."""
    return Along(factor, None if size == other else InProportion(size, other))


def clipped(piece: Interval, size: int) -> Interval:
    """The part of an interval that lies in a dim of this size."""
    start = min(max(piece[0], 0), size)
    return start, min(max(piece[1], start), size)


def tables(
    reader: DTensorSpec,
    read: DTensorSpec,
    reaches: Sequence[Callable[[Interval], Interval]],
    at: int,
) -> Tables:
    """The intervals of `read` that the shards of `reader` reach, for the sharded dims from `at`
    on."""
    return {
        dim: tuple(clipped(reach(piece), read.meta.shape[dim]) for piece in reader.pieces(dim))
        for dim, reach in enumerate(reaches, at)
        if read.dim_axes[dim]
    }


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

    def dims(self, by_stops: bool = False) -> tuple[Dims, Dims]:
        """The dims of what is read and of the result; the factors have the sizes of the first, or
        with `by_stops` of the second."""
        lead = tuple(Along(f"i{dim}") for dim in range(self.first))
        sizes = [(s.size, s.stops) for s in self.slides]
        places, stops = (
            tuple(
                in_proportion(f"i{dim}", each[by_stops], each[side])
                for dim, each in enumerate(sizes, self.first)
            )
            for side in (0, 1)
        )
        return (*lead, *places), (*lead, *stops)

    def is_cut(self, spec: DTensorSpec) -> bool:
        """True if a dim with windows is sharded."""
        pairs = zip(spec.dim_axes[self.first :], self.slides, strict=False)
        return any(axes and not slide.is_identity for axes, slide in pairs)

    def reads(self, reader: DTensorSpec, read: DTensorSpec) -> Tables:
        return tables(reader, read, [slide.reads for slide in self.slides], self.first)

    def readers(self, reader: DTensorSpec, read: DTensorSpec) -> Tables:
        return tables(reader, read, [slide.readers for slide in self.slides], self.first)

    def stops(self, box: Box) -> list[Interval]:
        """The stops that read a box."""
        pieces = zip(self.slides, box[self.first :], strict=False)
        return [slide.readers(piece) for slide, piece in pieces]

    def spans(self, box: Box) -> list[Interval]:
        """The elements, with padding, that the readers of a box read."""
        pairs = zip(self.slides, self.stops(box), strict=True)
        return [slide.reads(stops) for slide, stops in pairs]

    def span_shape(self, shape: Sequence[int], box: Box) -> list[int]:
        """The shape of the gradient of those elements."""
        own = list(shape)
        own[self.first : self.first + len(self.slides)] = [b - a for a, b in self.spans(box)]
        return own

    def window(self, value: torch.Tensor, box: Box, fill: float = 0) -> torch.Tensor:
        """What the stops in `box` read: the fetched elements, and `fill` for the padding."""
        pads: list[int] = []
        for dim, (slide, piece) in enumerate(zip(self.slides, box[self.first :], strict=False)):
            want = slide.reads(piece)
            start, stop = clipped(want, slide.size)
            if value.shape[self.first + dim] == slide.size:  # the dim is not sharded
                value = narrowed(value, self.first + dim, (0, slide.size), (start, stop))
            before = start - want[0] if start < stop else want[1] - want[0]
            pads = [before, want[1] - stop if start < stop else 0, *pads]
        pads = [0, 0] * (value.ndim - self.first - len(self.slides)) + pads
        return torch.constant_pad_nd(value, pads, fill) if any(pads) else value

    def cut_out(self, made: torch.Tensor, box: Box) -> torch.Tensor:
        """The box out of a gradient of its readers' span."""
        for dim, span in enumerate(self.spans(box), self.first):
            made = _fitted(made, dim, span, box[dim])
        return made


Windowed = Callable[[Any, torch.Tensor, Site], Any]
"""A local call on a window with padding: `run(op, window, site)`."""


def _forward(call: Call, halo: Halo, run: Windowed, fill: Any = 0, **traits: Any) -> Rule:
    """The rule of an operator on windows of its first operand; `fill` is a number for the padding,
    or the name of the argument that has it."""

    def windows(inputs: Any, outputs: Any) -> dict[int, Tables]:
        return {0: halo.reads(outputs[0], inputs[0])}

    def unless(site: Site) -> bool:
        return not halo.is_cut(site.inputs[0]) and all(map(prod, site.out_shapes))

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        if unless(site):
            return op(*args, **kwargs)
        if not all(map(prod, site.out_shapes)):
            return zeros_at(call, site, args[0])
        number = named(op, args, kwargs)[fill] if isinstance(fill, str) else fill
        return run(op, halo.window(args[0], site.out_boxes[0], number), site)

    places, stops = halo.dims()
    return Rule(
        (places,),
        (stops,) * len(call.results),
        {f"i{dim}": size for dim, size in enumerate(call.shape(0))},
        reduce=None,
        local=local,
        unless=unless,
        windows=windows,
        **{"averages": has_fractions(call.specs[0].dtype), **traits},
    )


def _backward(
    call: Call, halo: Halo, run: Callable[[Any, Sequence[Any], Site], Any], has_image: bool = True
) -> Rule:
    """The rule of a gradient: `run(op, args, site)` gives that of the span of a box's readers.

    The operands are the gradient of the result, what was read if `has_image`, and indices.
    """

    def windows(inputs: Any, outputs: Any) -> dict[int, Tables]:
        return {i: halo.readers(outputs[0], inputs[i]) for i in (0, 2) if i < len(inputs)}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        if not (args[0].numel() and prod(site.out_shapes[0])):
            return zeros_at(call, site, args[0])
        if has_image and not halo.is_cut(site.outputs[0]):
            return op(*args, **kwargs)
        return halo.cut_out(run(op, args, site), site.out_boxes[0])

    places, stops = halo.dims(by_stops=not has_image)
    shape = call.shape(int(has_image))
    return Rule(
        (stops, places, stops)[: len(call.specs)],
        (places,),
        {f"i{dim}": size for dim, size in enumerate(shape[: len(places)])},
        reduce=None,
        linear=((0,),),
        averages=has_fractions(call.specs[0].dtype),
        local=local,
        windows=windows,
    )


# --- padding and unfold ----------------------------------------------------------------------


def constant_pad(call: Call) -> Rule:
    """A number around a tensor, or less of the tensor: a window is one element."""
    pads = call.get("pad")
    before = [0] * (len(call.shape(0)) - len(pads) // 2) + list(pads[::2][::-1])
    sizes = zip(call.shape(0), call.results[0].shape, before, strict=True)
    halo = Halo(tuple(Slide(size, stops, pad=pad) for size, stops, pad in sizes), 0)
    return _forward(
        call,
        halo,
        lambda op, window, site: op(window, []),  # a copy, even if nothing was added
        fill="value",  # it is not part of the plan's key
        linear=((0,),) if call.get("value") == 0 else (),
    )


def _unfolded(call: Call, name: str, shape: Sequence[int], stops: Sequence[int]) -> Halo:
    slides = [Slide(size, size) for size in shape]
    dim = call.get(name) % len(shape)
    slides[dim] = Slide(shape[dim], stops[dim], call.get("size"), call.get("step"))
    return Halo(tuple(slides), 0)


def unfold(call: Call) -> Rule:
    """`"... m~ -> ... m~ k"`: windows of one dim, each in a dim of its own."""
    if not call.shape(0):
        return replicated(call)
    halo = _unfolded(call, "dimension", call.shape(0), call.results[0].shape)
    numbers = [call.get(name) for name in ("dimension", "size", "step")]
    rule = _forward(call, halo, lambda op, window, site: op(window, *numbers), linear=((0,),))
    return replace(rule, outputs=((*rule.outputs[0], None),))


def unfold_backward(call: Call) -> Rule:
    """The gradients of windows, added up where the windows overlap."""
    shape = call.get("input_sizes")
    if not shape:
        return replicated(call)
    halo = _unfolded(call, "dim", shape, call.shape(0))

    def run(op: Any, args: Sequence[Any], site: Site) -> Any:
        return op(args[0], halo.span_shape(site.out_shapes[0], site.out_boxes[0]), *args[2:])

    rule = _backward(call, halo, run, has_image=False)
    return replace(rule, inputs=((*rule.inputs[0], None),))


# --- pooling ---------------------------------------------------------------------------------


def each_dim_of(call: Call, name: str, count: int, default: Sequence[int]) -> list[int]:
    """An argument with a number for each of `count` dims, or one for all."""
    given = call.get(name)
    given = [given] if isinstance(given, int) else list(given or default)
    return given * count if len(given) == 1 else given


def _pool(call: Call, image: Sequence[int], result: Sequence[int]) -> Halo:
    count = 3 if "3d" in call.name else 2
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
    return Halo(tuple(Slide(*each) for each in numbers), len(image) - count)


def _numbers(halo: Halo) -> tuple[list[int], list[int], list[int]]:
    """The kernel, the stride, and a padding of zero."""
    slides = halo.slides
    return [s.kernel for s in slides], [s.stride for s in slides], [0] * len(slides)


def _divisor(call: Call, halo: Halo, stops: Sequence[Interval], like: torch.Tensor) -> Any:
    """By what the sums of these stops are divided: one number, or one for each."""
    if call.get("divisor_override") is not None:
        return call.get("divisor_override")
    total = torch.ones((), dtype=torch.int64, device=like.device)
    for slide, piece in zip(halo.slides, stops, strict=True):
        start = torch.arange(*piece, device=like.device) * slide.stride - slide.pad
        stop = torch.clamp(start + slide.kernel, max=slide.size + slide.pad)
        if not call.get("count_include_pad"):
            start, stop = start.clamp(min=0), stop.clamp(max=slide.size)
        total = total.unsqueeze(-1) * (stop - start)
    return total.to(like.dtype)


def avg_pool(call: Call) -> Rule:
    """`"n c h~ w~ -> n c h~ w~"`: sums of windows, divided by what each window holds."""
    halo = _pool(call, call.shape(0), call.results[0].shape)

    def run(op: Any, window: torch.Tensor, site: Site) -> Any:
        total = op(window.to(wide(window.dtype)), *_numbers(halo), False, True, 1)
        by = _divisor(call, halo, site.out_boxes[0][halo.first :], total)
        mode = None if total.is_floating_point() else "trunc"
        return torch.div(total, by, rounding_mode=mode).to(window.dtype)

    return _forward(call, halo, run, linear=((0,),) if has_fractions(call.specs[0].dtype) else ())


def avg_pool_backward(call: Call) -> Rule:
    """Each element gets its part of the gradient of every window that reads it."""
    halo = _pool(call, call.shape(1), call.shape(0))

    def run(op: Any, args: Sequence[Any], site: Site) -> Any:
        box = site.out_boxes[0]
        grad = args[0].to(wide(args[0].dtype))
        grad = grad / _divisor(call, halo, halo.stops(box), grad)
        example = grad.new_empty(()).expand(halo.span_shape(site.out_shapes[0], box))
        return op(grad, example, *_numbers(halo), False, True, 1).to(args[0].dtype)

    return _backward(call, halo, run)


def max_pool(call: Call) -> Rule:
    """`"n c h~ w~ -> n c h~ w~, n c h~ w~"`: values, and their indices into the whole plane."""
    halo = _pool(call, call.shape(0), call.results[0].shape)
    dtype = call.specs[0].dtype
    least = float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min

    def run(op: Any, window: torch.Tensor, site: Site) -> Any:
        dilation = [slide.dilation for slide in halo.slides]
        made, index = op(window, *_numbers(halo), dilation, False)
        return made, _in_plane(halo, index, window.shape[halo.first :], site.out_boxes[0])

    return _forward(call, halo, run, fill=least, averages=False)


def _in_plane(halo: Halo, index: torch.Tensor, shape: Sequence[int], box: Box) -> torch.Tensor:
    """Indices into a padded window as indices into the whole plane.

    If a window holds nothing but the least value, PyTorch takes its first element that is not
    padding.
    """
    total = torch.zeros_like(index)
    for at, (slide, piece) in enumerate(zip(halo.slides, box[halo.first :], strict=True)):
        place = index // prod(shape[at + 1 :]) % shape[at] + slide.reads(piece)[0]
        begin = torch.arange(*piece, device=index.device) * slide.stride - slide.pad
        steps = (-begin).clamp(min=0) + slide.dilation - 1
        begin = begin + steps // slide.dilation * slide.dilation
        begin = begin.view(-1, *[1] * (len(shape) - 1 - at))
        total = total * slide.size + torch.where(place < 0, begin, place)
    return total


def max_pool_backward(call: Call) -> Rule:
    """The gradient of each window goes to its largest element."""
    halo = _pool(call, call.shape(1), call.shape(0))

    def run(op: Any, args: Sequence[Any], site: Site) -> Any:
        grad, index = args[0], args[-1]
        spans = halo.spans(site.out_boxes[0])
        mine = torch.zeros_like(index)
        inner = prod(slide.size for slide in halo.slides)
        for slide, (start, stop) in zip(halo.slides, spans, strict=True):
            inner //= slide.size
            mine = mine * (stop - start) + index // inner % slide.size - start
        shape = halo.span_shape(site.out_shapes[0], site.out_boxes[0])
        made = grad.new_zeros(*shape[: halo.first], prod(shape[halo.first :]))
        made.scatter_add_(-1, mine.flatten(halo.first), grad.flatten(halo.first))
        return made.view(shape)

    return _backward(call, halo, run)
