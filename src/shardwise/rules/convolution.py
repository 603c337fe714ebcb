"""Convolution and its gradients: batch, channels, groups, and spatial dims by their edges.

A convolution reads places of a fine dim into stops of a coarse one; a transposed convolution goes
the other way, and each is the other's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from ..layout.geometry import Interval
from ..layout.spec import DTensorSpec
from .call import Call, Operand, has_fractions
from .rule import Along, Dims, Rule, Scaled, Site
from .sliding import (
    Slide,
    clipped,
    fitted,
    followed,
    hull,
    in_order,
    margins,
    narrowed,
    padded,
    reached,
)

__all__ = ["convolution", "convolution_backward"]

aten = torch.ops.aten


@dataclass(frozen=True)
class _Conv:
    """The numbers of a convolution: a slide for each spatial dim, and its arguments."""

    slides: tuple[Slide, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    channels: int  # of the input

    @staticmethod
    def of(call: Call, x: int, weight: int, result: tuple[int, ...]) -> _Conv:
        shape, kernel = call.shape(x), call.shape(weight)[2:]
        spatial = len(shape) - 2

        def each(name: str) -> tuple[int, ...]:
            given = tuple(call.get(name))
            return given * spatial if len(given) == 1 else given

        transposed = bool(call.get("transposed"))
        fine, coarse = (result, shape) if transposed else (shape, result)
        stride, padding, dilation = each("stride"), each("padding"), each("dilation")
        sizes = zip(fine[2:], coarse[2:], kernel, stride, dilation, padding, strict=True)
        return _Conv(
            tuple(Slide(*numbers) for numbers in sizes),
            stride,
            padding,
            dilation,
            transposed,
            each("output_padding"),
            call.get("groups"),
            shape[1],
        )

    def arguments(self, x: torch.Tensor, cut: list[bool]) -> tuple[Any, ...]:
        """What follows the tensors in a local call: padding is done by hand on dims that are
        cut."""
        own = [0 if c else p for c, p in zip(cut, self.padding, strict=True)]
        more = [0 if c else p for c, p in zip(cut, self.output_padding, strict=True)]
        groups = x.shape[1] * self.groups // self.channels if self.groups > 1 else 1
        return (self.stride, own, self.dilation, self.transposed, more, groups)

    def dims(self, size_of: tuple[int, ...], result: tuple[int, ...]) -> _Dims:
        """How the dims of input, weight, bias and result walk along factors."""
        spatial = range(2, len(size_of))
        places = [Along(f"s{d}") for d in spatial]
        stops = [followed(f"s{d}", size_of[d], result[d]) for d in spatial]
        sizes = {"n": size_of[0], **{f"s{d}": size_of[d] for d in spatial}}
        whole = [None] * len(self.slides)
        if self.groups > 1:
            per_in, per_out = size_of[1] // self.groups, result[1] // self.groups
            inner, outer = _block("g", per_in), _block("g", per_out)
            first = inner if self.transposed else outer
            weight: Dims = (first, None, *whole)
            sizes["g"] = self.groups
        else:
            inner, outer = Along("i"), Along("o")
            weight = (inner, outer, *whole) if self.transposed else (outer, inner, *whole)
            sizes |= {"i": size_of[1], "o": result[1]}
        n = Along("n")
        return _Dims((n, inner, *places), weight, (outer,), (n, outer, *stops), sizes)


@dataclass(frozen=True)
class _Dims:
    x: Dims
    weight: Dims
    bias: Dims
    result: Dims
    sizes: dict[str, int]


def _block(factor: str, size: int) -> Along:
    return Along(factor, Scaled(size) if size > 1 else None)


def _cut(spec: DTensorSpec) -> list[bool]:
    """Which spatial dims are sharded."""
    return [bool(axes) for axes in spec.dim_axes[2:]]


def _is_plain(site: Site) -> bool:
    """Whether the operator's own call does: no spatial dim is cut, and no channel is missing."""
    whole = all(
        spec.meta.shape[1:] == spec.local_shape(site.coord)[1:]
        for spec in (*site.inputs[:2], *site.outputs[:1])
        if spec.ndim > 1
    )
    return whole and all(prod(spec.local_shape(site.coord)) for spec in site.inputs)


# --- forward ---------------------------------------------------------------------------------


def _usual(weight: torch.Tensor) -> torch.Tensor:
    """A weight with its dims in an order that all kernels take: which one is chosen depends on the
    shape."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.ndim)
    usual = form is not None and weight.is_contiguous(memory_format=form)
    return weight if usual else weight.contiguous()


def _all_whole(call: Call) -> Rule:
    """Of no channels PyTorch makes results that have none either, whatever the weight has."""
    inputs = tuple((None,) * spec.ndim for spec in call.specs)
    return Rule(inputs, tuple((None,) * len(meta.shape) for meta in call.results), {}, reduce=None)


def convolution(call: Call) -> Rule:
    """`"n i s~, o i k!, o -> n o s~"`, or with groups `"n (g i) s~, (g o) i! k!, (g o) -> ..."`"""
    if not call.shape(0)[1]:
        return _all_whole(call)
    result = call.results[0].shape
    conv = _Conv.of(call, 0, 1, result)
    dims = conv.dims(call.shape(0), result)
    biased = isinstance(call.get("bias"), Operand)
    reaches = [s.readers if conv.transposed else s.reads for s in conv.slides]

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        return {0: reached(outputs[0], inputs[0], reaches, 2)}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        x, weight, bias = args[0], _usual(args[1]), args[2] if biased else None
        shape = site.out_shapes[0]
        if 0 in shape or not x.numel() or not weight.numel():
            made = x.new_zeros(shape)
            made = made if bias is None else made + bias.view(-1, *[1] * len(conv.slides))
        elif conv.transposed:
            made = _spread(conv, x, weight, bias, site)
        else:
            cut = _cut(site.inputs[0])
            x = _window(conv, x, site.out_boxes[0][2:], cut)
            made = aten.convolution.default(x, weight, bias, *conv.arguments(x, cut))
        return in_order(made, site.outputs[0])

    return Rule(
        (dims.x, dims.weight, *([dims.bias] if biased else [])),
        (dims.result,),
        dims.sizes,
        added=frozenset([2] if biased else []),
        linear=((0, 2), (1, 2)) if biased else ((0,), (1,)),
        averages=has_fractions(call.results[0].dtype),
        local=local,
        unless=_is_plain,
        windows=windows,
    )


def _window(
    conv: _Conv, value: torch.Tensor, stops: tuple[Interval, ...], cut: list[bool]
) -> torch.Tensor:
    """What was fetched of the fine dims that are cut, with the padding that these stops read."""
    edges = [
        margins(slide.reads(piece), slide.size) if c else (0, 0)
        for slide, piece, c in zip(conv.slides, stops, cut, strict=True)
    ]
    return padded(value, 2, edges)


def _spread(conv: _Conv, x: Any, weight: Any, bias: Any, site: Site) -> torch.Tensor:
    """The piece of a transposed convolution that the fetched stops reach, cut to its box."""
    cut = _cut(site.inputs[0])
    wide = None if any(cut) else bias  # where no stop reaches, the bias still counts
    made = aten.convolution.default(x, weight, wide, *conv.arguments(x, cut))
    made = _boxed(conv, made, site.out_boxes[0][2:], cut)
    return made if wide is bias else made + bias.view(-1, *[1] * len(cut))


def _boxed(
    conv: _Conv, made: torch.Tensor, boxes: tuple[Interval, ...], cut: list[bool]
) -> torch.Tensor:
    """The places of a box out of all that its readers reach."""
    for d, (slide, piece, c) in enumerate(zip(conv.slides, boxes, cut, strict=True)):
        if c:
            made = fitted(made, d + 2, slide.reads(slide.readers(piece)), piece)
    return made


# --- backward --------------------------------------------------------------------------------


def convolution_backward(call: Call) -> Rule:
    """Gradients of input, weight and bias, as far as they are asked for."""
    if not call.shape(1)[1]:
        return _all_whole(call)
    mask = tuple(call.get("output_mask"))
    result = call.shape(0)
    conv = _Conv.of(call, 1, 2, result)
    dims = conv.dims(call.shape(1), result)
    kinds = ((dims.x, mask[0]), (dims.weight, mask[1]), (dims.bias, mask[2]))
    linear: list[tuple[int, ...]] = [(0,)]
    if mask == (False, True, False):
        linear.append((1,))
    if mask == (True, False, False):
        linear.append((2,))
    back = _Gradients(conv, mask)

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        made = back(args[0], args[1], _usual(args[2]), site)
        specs = iter(site.outputs)
        return [None if value is None else in_order(value, next(specs)) for value in made]

    return Rule(
        (dims.result, dims.x, dims.weight),
        tuple(kind for kind, asked in kinds if asked),
        dims.sizes,
        linear=tuple(linear),
        averages=has_fractions(call.specs[0].dtype),
        local=local,
        unless=_is_plain,
        windows=back.windows,
        same=frozenset([(sum(mask) - 1, "i")] if mask[2] else []),
    )


@dataclass(frozen=True)
class _Gradients:
    """The gradients of a convolution on one rank, of which some are asked for."""

    conv: _Conv
    mask: tuple[bool, ...]

    def windows(self, inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        grad, x = inputs[:2]
        grads, places = {}, {}
        for dim, slide in enumerate(self.conv.slides, 2):
            if not x.dim_axes[dim]:
                continue
            mine, theirs = x.pieces(dim), grad.pieces(dim)
            grads[dim] = tuple(map(partial(self._held, slide), mine, theirs))
            if self.mask[1] and not self.conv.transposed:
                places[dim] = tuple(clipped(slide.reads(piece), slide.size) for piece in theirs)
        return {0: grads, 1: places}

    def _needed(self, slide: Slide, mine: Interval) -> Interval:
        """The interval of the result's gradient on which a piece of the input depends."""
        if self.conv.transposed:
            asked = self.mask[0] or self.mask[1]
            return clipped(slide.reads(mine), slide.size) if asked else (0, 0)
        return slide.readers(mine) if self.mask[0] else (0, 0)

    def _held(self, slide: Slide, mine: Interval, own: Interval) -> Interval:
        """The interval of the gradient that is fetched: what is needed, and this rank's own."""
        return hull(own, self._needed(slide, mine))

    def __call__(self, grad: Any, x: Any, weight: Any, site: Site) -> list[Any]:
        cut = _cut(site.inputs[1])
        owned, needed = self._parts(grad, site, cut)
        made: list[Any] = [None] * 3
        if self.mask[2]:
            made[2] = owned.sum([0, *range(2, owned.ndim)])
        args = (None, *self.conv.arguments(x, cut))
        if self.conv.transposed:
            made[:2] = self._both(needed, x, weight, args, site)
            return made
        shapes = iter(site.out_shapes)
        if self.mask[0]:
            made[0] = self._of_input(needed, x, weight, args, site, next(shapes))
        if self.mask[1]:
            made[1] = self._of_weight(owned, x, weight, args, site, next(shapes))
        return made

    def _parts(self, grad: Any, site: Site, cut: list[bool]) -> tuple[Any, Any]:
        """This rank's own part of the gradient, and the part that its input depends on."""
        owned = needed = grad
        boxes = zip(self.conv.slides, site.box(1)[2:], site.box(0)[2:], cut, strict=True)
        for dim, (slide, mine, own, c) in enumerate(boxes, 2):
            if c:
                held = self._held(slide, mine, own)
                owned = narrowed(owned, dim, held, own)
                needed = narrowed(needed, dim, held, self._needed(slide, mine))
        return owned, needed

    def _both(self, grad: Any, x: Any, weight: Any, args: Any, site: Site) -> list[Any]:
        """A transposed convolution: one call on the window of the gradient."""
        asked = [*self.mask[:2], False]
        if not any(asked):
            return [None, None]
        if not (x.numel() and weight.numel()):
            wanted = zip((x, weight), self.mask[:2], strict=True)
            return [torch.zeros_like(value) if asked else None for value, asked in wanted]
        wide = _window(self.conv, grad, site.box(1)[2:], _cut(site.inputs[1]))
        return list(aten.convolution_backward.default(wide, x, weight, *args, asked)[:2])

    def _of_input(
        self, grad: Any, x: Any, weight: Any, args: Any, site: Site, shape: tuple[int, ...]
    ) -> Any:
        if not (grad.numel() and weight.numel() and prod(shape)):
            return x.new_zeros(shape)
        cut, boxes = _cut(site.inputs[1]), site.box(1)[2:]
        spans = [
            b - a if c else mine[1]
            for slide, mine, c in zip(self.conv.slides, boxes, cut, strict=True)
            for a, b in [slide.reads(slide.readers(mine))]
        ]
        example = x.new_empty((*shape[:2], *spans))
        only = [True, False, False]
        made = aten.convolution_backward.default(grad, example, weight, *args, only)[0]
        return _boxed(self.conv, made, boxes, cut)

    def _of_weight(
        self, grad: Any, x: Any, weight: Any, args: Any, site: Site, shape: tuple[int, ...]
    ) -> Any:
        if not (grad.numel() and weight.numel()):
            return weight.new_zeros(shape)
        wide = _window(self.conv, x, site.box(0)[2:], _cut(site.inputs[1]))
        only = [False, True, False]
        return aten.convolution_backward.default(grad, wide, weight, *args, only)[1]
