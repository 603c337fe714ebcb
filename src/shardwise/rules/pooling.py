"""Pooling by sliding windows: batch and channels apart, planes by the edges of their shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..layout.geometry import Box, Interval, box_shape
from ..layout.spec import DTensorSpec
from .call import Call, has_fractions
from .rule import Along, Dims, Rule, Site
from .sliding import Reach, Slide, fitted, followed, in_order, margins, padded, reached
from .spatial import has_planes, is_permuted, of_planes, spatial_dims

__all__ = [
    "avg_pool",
    "avg_pool_backward",
    "in_plane",
    "max_pool",
    "max_pool_backward",
    "scattered",
]


@dataclass(frozen=True)
class _Pool:
    """The windows of a pooling: one slide for each dim of a plane, which begin at dim `first`."""

    slides: tuple[Slide, ...]
    first: int

    @staticmethod
    def of(call: Call, image: Sequence[int], result: Sequence[int]) -> _Pool:
        spatial = spatial_dims(call)

        def each(name: str, default: Any) -> Sequence[int]:
            given = call.get(name, default)
            given = [given] if isinstance(given, int) else list(given or default)
            return given * spatial if len(given) == 1 else given

        kernel = each("kernel_size", [])
        first = len(image) - spatial
        numbers = zip(
            image[first:],
            result[first:],
            kernel,
            each("stride", kernel),
            each("dilation", [1]),
            each("padding", [0]),
            strict=True,
        )
        return _Pool(tuple(Slide(*each) for each in numbers), first)

    @property
    def kernel(self) -> list[int]:
        return [slide.kernel for slide in self.slides]

    @property
    def stride(self) -> list[int]:
        return [slide.stride for slide in self.slides]

    @property
    def places(self) -> Dims:
        """The dims of an image."""
        return tuple(Along(f"i{dim}") for dim in range(self.first + len(self.slides)))

    @property
    def stops(self) -> Dims:
        """The dims of what is pooled from it."""
        planes = [
            followed(f"i{dim}", slide.size, slide.stops)
            for dim, slide in enumerate(self.slides, self.first)
        ]
        return (*self.places[: self.first], *planes)

    def is_whole(self, image: DTensorSpec) -> bool:
        """Whether no dim of the planes is sharded."""
        return not any(image.dim_axes[self.first :])

    def window(self, value: torch.Tensor, box: Box, fill: float) -> torch.Tensor:
        """What the stops in `box` read of an image: fetched places, and `fill` for the padding."""
        pieces = zip(self.slides, box[self.first :], strict=True)
        edges = [margins(slide.reads(piece), slide.size) for slide, piece in pieces]
        return padded(value, self.first, edges, fill)

    def reach(self, name: str) -> list[Reach]:
        return [getattr(slide, name) for slide in self.slides]

    def readers(self, box: Box) -> tuple[Interval, ...]:
        """The stops that read a box of an image."""
        pieces = zip(self.slides, box[self.first :], strict=True)
        return tuple(slide.readers(piece) for slide, piece in pieces)


def _pooled(
    call: Call, pool: _Pool, operands: Sequence[Dims], out: Dims, image: int, **more: Any
) -> Rule:
    """A rule with the parts that all pooling has; operand `image` has the places, or the result."""
    local = more.pop("local")

    def somewhere(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        spec = site.inputs[image]
        if pool.is_whole(spec) or not has_planes(site):
            return of_planes(op, args, kwargs, site)
        made = local(op, args, site)
        if isinstance(made, torch.Tensor):
            return in_order(made, site.outputs[0])
        return tuple(in_order(v, s) for v, s in zip(made, site.outputs, strict=True))

    shape = call.shape(image)
    permuted = is_permuted(call)
    return Rule(
        tuple(operands),
        (out,) * len(call.results),
        {f"i{dim}": size for dim, size in enumerate(shape)},
        reduce=None,
        local=somewhere,
        unless=lambda site: not permuted and pool.is_whole(site.inputs[image]) and has_planes(site),
        **more,
    )


# --- averages --------------------------------------------------------------------------------


def _divisor(call: Call, pool: _Pool, stops: Sequence[Interval], like: torch.Tensor) -> Any:
    """By what the sums of these stops are divided: one number, or one for each."""
    if call.get("divisor_override") is not None:
        return call.get("divisor_override")
    total = torch.ones((), dtype=torch.int64, device=like.device)
    for slide, piece in zip(pool.slides, stops, strict=True):
        start = torch.arange(*piece, device=like.device) * slide.stride - slide.pad
        stop = torch.clamp(start + slide.kernel, max=slide.size + slide.pad)
        if not call.get("count_include_pad"):
            start, stop = start.clamp(min=0), stop.clamp(max=slide.size)
        total = total.unsqueeze(-1) * (stop - start)
    return total.to(like.dtype)


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Sums of narrow floats are made in wider ones, as PyTorch does."""
    narrow = value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value


def avg_pool(call: Call) -> Rule:
    """`"n c h~ w~ -> n c h~ w~"`: sums of windows, divided by what each window holds."""
    pool = _Pool.of(call, call.shape(0), call.results[0].shape)

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        return {0: reached(outputs[0], inputs[0], pool.reach("reads"), pool.first)}

    def local(op: Any, args: tuple[Any, ...], site: Site) -> Any:
        box = site.out_boxes[0]
        wide = _wide(pool.window(args[0], box, 0))
        none = [0] * len(pool.slides)
        total = op(wide, pool.kernel, pool.stride, none, False, True, 1)
        by = _divisor(call, pool, box[pool.first :], total)
        mode = None if total.is_floating_point() else "trunc"
        return torch.div(total, by, rounding_mode=mode).to(args[0].dtype)

    linear = ((0,),) if has_fractions(call.specs[0].dtype) else ()
    return _pooled(
        call, pool, [pool.places], pool.stops, 0, linear=linear, windows=windows, local=local
    )


def avg_pool_backward(call: Call) -> Rule:
    """Each place gets its part of the gradient of every window that reads it."""
    pool = _Pool.of(call, call.shape(1), call.shape(0))

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        return {0: reached(inputs[1], inputs[0], pool.reach("readers"), pool.first)}

    def local(op: Any, args: tuple[Any, ...], site: Site) -> Any:
        box = site.out_boxes[0]
        stops = pool.readers(box)
        grad = _wide(args[0])
        shape = list(site.out_shapes[0])
        if not grad.numel():
            return args[0].new_zeros(shape)
        grad = grad / _divisor(call, pool, stops, grad)
        spans = [slide.reads(piece) for slide, piece in zip(pool.slides, stops, strict=True)]
        shape[pool.first :] = [b - a for a, b in spans]
        none = [0] * len(pool.slides)
        example = grad.new_empty(()).expand(shape)
        made = op(grad, example, pool.kernel, pool.stride, none, False, True, 1)
        for dim, span in enumerate(spans, pool.first):
            made = fitted(made, dim, span, box[dim])
        return made.to(args[0].dtype)

    return _pooled(
        call,
        pool,
        [pool.stops, pool.places],
        pool.places,
        1,
        linear=((0,),),
        windows=windows,
        local=local,
    )


# --- largest elements ------------------------------------------------------------------------


def max_pool(call: Call) -> Rule:
    """`"n c h~ w~ -> n c h~ w~, n c h~ w~"`: values, and where they are in the whole plane."""
    pool = _Pool.of(call, call.shape(0), call.results[0].shape)

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        return {0: reached(outputs[0], inputs[0], pool.reach("reads"), pool.first)}

    def local(op: Any, args: tuple[Any, ...], site: Site) -> tuple[torch.Tensor, ...]:
        box = site.out_boxes[0]
        dtype = args[0].dtype
        least = float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
        wide = pool.window(args[0], box, least)
        dilation = [slide.dilation for slide in pool.slides]
        none = [0] * len(pool.slides)
        made, index = op(wide, pool.kernel, pool.stride, none, dilation, False)
        return made, _found(pool, index, wide.shape[pool.first :], box[pool.first :])

    return _pooled(call, pool, [pool.places], pool.stops, 0, windows=windows, local=local)


def in_plane(
    index: torch.Tensor, shape: Sequence[int], starts: Sequence[Any], sizes: Sequence[int]
) -> torch.Tensor:
    """Indices into windows of `shape` as indices into planes of `sizes`; the windows begin at
    `starts`."""
    total = torch.zeros_like(index)
    for at, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        place = index // prod(shape[at + 1 :]) % shape[at]
        total = total * size + place + start
    return total


def _found(
    pool: _Pool, index: torch.Tensor, shape: Sequence[int], stops: Sequence[Interval]
) -> torch.Tensor:
    """Indices into a padded window as indices into the whole plane.

    Of a window of nothing but the least value PyTorch takes the first place that is not padding.
    """
    total = torch.zeros_like(index)
    for at, (slide, piece) in enumerate(zip(pool.slides, stops, strict=True)):
        start = slide.reads(piece)[0]
        place = index // prod(shape[at + 1 :]) % shape[at] + start
        begin = torch.arange(*piece, device=index.device) * slide.stride - slide.pad
        steps = (-begin).clamp(min=0) + slide.dilation - 1
        begin = begin + steps // slide.dilation * slide.dilation
        begin = begin.view(-1, *[1] * (len(shape) - 1 - at))
        total = total * slide.size + torch.where(place < 0, begin, place)
    return total


def max_pool_backward(call: Call) -> Rule:
    """The gradient of each window goes to its largest element."""
    pool = _Pool.of(call, call.shape(1), call.shape(0))

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        return {
            operand: reached(inputs[1], inputs[operand], pool.reach("readers"), pool.first)
            for operand in (0, 2)
        }

    def local(op: Any, args: tuple[Any, ...], site: Site) -> Any:
        return scattered(args[0], args[-1], call.shape(1), site.out_boxes[0], pool.first)

    return _pooled(
        call,
        pool,
        [pool.stops, pool.places, pool.stops],
        pool.places,
        1,
        linear=((0,),),
        windows=windows,
        local=local,
    )


def scattered(
    grad: torch.Tensor, index: torch.Tensor, sizes: Sequence[int], box: Box, first: int
) -> torch.Tensor:
    """The box of an image to which gradients are added by their indices into whole planes, which
    begin at dim `first`."""
    here = torch.ones_like(index, dtype=torch.bool)
    mine = torch.zeros_like(index)
    for dim, (start, stop) in enumerate(box[first:], first):
        place = index // prod(sizes[dim + 1 :]) % sizes[dim] - start
        here = here & (place >= 0) & (place < stop - start)
        mine = mine * (stop - start) + place
    shape = box_shape(box)
    flat = (*shape[:first], -1)
    made = grad.new_zeros(*shape[:first], prod(shape[first:]))
    where = torch.where(here, mine, 0).reshape(flat)
    made.scatter_add_(-1, where, torch.where(here, grad, 0).reshape(flat))
    return made.view(shape)
