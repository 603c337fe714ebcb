"""Convolution and its gradients: batch, channels and groups are apart, spatial dims by their
edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .halo import Halo, Slide, Tables, fitted
from .language import Along, Call, Dims, Operand, Rule, Scaled, Site, has_fractions, replicated


@dataclass(frozen=True)
class _Conv:
    """The windows of a convolution, and the dims of its input, weight and result."""

    halo: Halo
    x: Dims
    weight: Dims
    result: Dims
    sizes: dict[str, int]


def _conv(call: Call, x: int, weight: int, result: Sequence[int]) -> _Conv:
    """`"n i s~, o i k! -> n o s~"`, or with groups `"n (g i) s~, (g o) i! k! -> n (g o) s~"`. A
    transposed convolution needs the spatial dims `s` whole."""
    shape, kernel, groups = call.shape(x), call.shape(weight)[2:], call.get("groups")
    transposed, count = call.get("transposed"), len(kernel)
    given = [list(call.get(name)) for name in ("stride", "dilation", "padding")]
    numbers = [own * count if len(own) == 1 else own for own in given]
    each = zip(shape[2:], result[2:], kernel, *numbers, strict=True)
    halo = Halo(tuple(Slide(*own) for own in each), 2)
    places, stops = (dims[2:] for dims in halo.dims())
    whole: Dims = (None,) * count
    sizes = {"n": shape[0]}
    if transposed:
        places = stops = whole
    else:
        sizes |= {f"i{dim}": size for dim, size in enumerate(shape[2:], 2)}
    if groups > 1:
        inner, outer = _block("g", shape[1] // groups), _block("g", result[1] // groups)
        channels: Dims = (inner if transposed else outer, None)
        sizes["g"] = groups
    else:
        inner, outer = Along("c"), Along("o")
        channels = (inner, outer) if transposed else (outer, inner)
        sizes |= {"c": shape[1], "o": result[1]}
    n = Along("n")
    return _Conv(halo, (n, inner, *places), (*channels, *whole), (n, outer, *stops), sizes)


def _block(factor: str, size: int) -> Along:
    return Along(factor, Scaled(size) if size > 1 else None)


def _is_plain(site: Site) -> bool:
    """True if the operator's own call does: no spatial dim is cut, and no channel is missing."""
    whole = all(
        spec.meta.shape[1:] == spec.local_shape(site.coord)[1:]
        for spec in (*site.inputs[:2], *site.outputs[:1])
        if spec.ndim > 1
    )
    return whole and all(prod(spec.local_shape(site.coord)) for spec in site.inputs)


def _usual(weight: torch.Tensor) -> torch.Tensor:
    """A weight with its dims in an order that all kernels take: which one is chosen depends on the
    shape."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.ndim)
    usual = form is not None and weight.is_contiguous(memory_format=form)
    return weight if usual else weight.contiguous()


def _local_groups(call: Call, x: int, value: torch.Tensor) -> int:
    groups: int = call.get("groups")
    return value.shape[1] * groups // call.shape(x)[1] if groups > 1 else 1


def convolution(call: Call) -> Rule:
    """The result of a convolution; spatial dims read the edges of neighbouring shards."""
    if not call.shape(0)[1]:  # PyTorch's result has no channels either, whatever the weight has
        return replicated(call)
    biased = isinstance(call.get("bias"), Operand)
    other = call.get("transposed") and call.shape(0)[1] != call.shape(1)[0]
    if other or (biased and call.shape(2) != call.results[0].shape[1:2]):
        return replicated(call)  # the kernel refuses it, the meta kernel does not
    conv = _conv(call, 0, 1, call.results[0].shape)
    halo = conv.halo

    def windows(inputs: Any, outputs: Any) -> dict[int, Tables]:
        return {0: halo.tables(outputs[0], inputs[0])}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        x, weight, bias, stride, pad, *rest, _ = args
        if not (x.numel() and weight.numel() and prod(site.out_shapes[0])):
            made = x.new_zeros(site.out_shapes[0])
            return made if bias is None else made + bias.view(-1, *[1] * len(halo.slides))
        if halo.is_cut(site.inputs[0]):
            x, pad = halo.window(x, site.out_boxes[0]), [0] * len(halo.slides)
        return op(x, _usual(weight), bias, stride, pad, *rest, _local_groups(call, 0, x))

    return Rule(
        (conv.x, conv.weight, *([conv.result[1:2]] if biased else [])),
        (conv.result,),
        conv.sizes,
        added=frozenset([2] if biased else []),
        linear=((0, 2), (1, 2)) if biased else ((0,), (1,)),
        averages=has_fractions(call.results[0].dtype),
        local=local,
        unless=_is_plain,
        windows=windows,
    )


def convolution_backward(call: Call) -> Rule:
    """Gradients of input, weight and bias, as far as they are asked for."""
    if not call.shape(1)[1]:
        return replicated(call)
    mask = tuple(call.get("output_mask"))
    conv = _conv(call, 1, 2, call.shape(0))
    kinds = zip((conv.x, conv.weight, conv.result[1:2]), mask, strict=True)
    linear: list[tuple[int, ...]] = [(0,)]
    linear += [(1,)] if mask == (False, True, False) else []
    linear += [(2,)] if mask == (True, False, False) else []
    gradients = _Gradients(call, conv.halo, mask)
    return Rule(
        (conv.result, conv.x, conv.weight),
        tuple(dims for dims, asked in kinds if asked),
        conv.sizes,
        linear=tuple(linear),
        averages=has_fractions(call.specs[0].dtype),
        local=gradients.local,
        unless=_is_plain,
        windows=gradients.windows,
        same=frozenset([(sum(mask) - 1, "c")] if mask[2] else []),
    )


@dataclass(frozen=True)
class _Gradients:
    """The gradients of a convolution on one rank.

    A rank fetches the gradients of all windows that read its piece of the input, beside those of
    its own windows. With zeros in place of the input's other elements they give the gradient of the
    piece, and this rank's part of the gradient of the weight. If only the weight's is asked for, a
    rank fetches what its own windows read.
    """

    call: Call
    halo: Halo
    mask: tuple[bool, ...]

    def windows(self, inputs: Any, outputs: Any) -> dict[int, Tables]:
        grad, x = inputs[:2]
        if not self.mask[0]:
            return {1: self.halo.tables(grad, x) if self.mask[1] else {}}
        return {
            0: {
                dim: tuple(map(slide.touching, x.pieces(dim), grad.pieces(dim)))
                for dim, slide in enumerate(self.halo.slides, 2)
                if x.dim_axes[dim]
            }
        }

    def local(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        grad, x, weight, _, stride, pad, *rest, _, _ = args
        weight, groups = _usual(weight), _local_groups(self.call, 1, x)
        own, slides = grad, self.halo.slides
        spans = box = site.box(1)[2:]
        if self.halo.is_cut(site.inputs[1]):
            pad, stops = [0] * len(pad), site.box(0)[2:]
            if self.mask[0]:
                held = [s.touching(*each) for s, *each in zip(slides, box, stops, strict=True)]
                spans = tuple(s.reads(each) for s, each in zip(slides, held, strict=True))
                x, own = fitted(x, box, spans), fitted(grad, held, stops)
            elif self.mask[1]:
                x = self.halo.window(x, site.box(0))
        if any(self.mask[:2]) and grad.numel() and x.numel() and weight.numel():
            asked = [*self.mask[:2], False]
            made = list(op(grad, x, weight, None, stride, pad, *rest, groups, asked)[:2])
        else:
            pairs = zip((x, weight), self.mask, strict=False)
            made = [torch.zeros_like(value) if asked else None for value, asked in pairs]
        if self.mask[0]:
            made[0] = fitted(made[0], spans, box)
        return [*made, own.sum([0, *range(2, own.ndim)]) if self.mask[2] else None]
