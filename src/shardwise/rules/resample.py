"""Interpolation of planes.

A dim that becomes a whole number of times as large may be sharded: each element gives a block of
the result. Linear interpolation reads one element more on each side. Other dims of planes are
needed whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..layout.geometry import Interval, contiguous_stride
from .halo import Tables, clipped, in_proportion, narrowed, plane_dims, tables
from .language import Along, Call, Rule, Site, has_fractions, replicated, zeros_at

READ_NUMBERS = frozenset(("scales", "scales_d", "scales_h", "scales_w"))
"""Arguments whose values decide which dims may be sharded: they are part of a call's key."""


@dataclass(frozen=True)
class _Blocks:
    """A dim of `size` elements, each of which gives a block of `block` elements of the result.

    To make a block, `reach` elements on each side are read too. With `back` the gradient of the
    elements is made.
    """

    size: int
    block: int
    reach: int
    back: bool

    def _elements(self, made: Interval) -> Interval:
        """The elements that a piece of what is made belongs to, and those around them."""
        if made[0] >= made[1]:
            return 0, 0
        block = 1 if self.back else self.block
        first, last = made[0] // block - self.reach, -(-made[1] // block) + self.reach
        return clipped((first, last), self.size)

    def reads(self, made: Interval) -> Interval:
        """What is read for a piece of what is made."""
        first, last = self._elements(made)
        return (first * self.block, last * self.block) if self.back else (first, last)

    def makes(self, made: Interval) -> Interval:
        """What a local call makes of that."""
        first, last = self._elements(made)
        return (first, last) if self.back else (first * self.block, last * self.block)


def _blocks(call: Call, size: int, stops: int, scale: float | None, back: bool) -> _Blocks | None:
    """The blocks of a dim; None if it is needed whole."""
    is_nearest = "nearest" in call.name
    if not size or not stops or stops % size or call.get("align_corners"):
        return None
    block = stops // size
    if not (is_nearest or "linear" in call.name) or "_aa" in call.name:
        return None
    if scale is not None and scale * size != stops:
        return None
    if is_nearest:  # the product of an index and a binary fraction is exact
        return _Blocks(size, block, 0, back) if block & (block - 1) == 0 else None
    return _Blocks(size, block, 1, back) if size >= 8 else None


def resampled(call: Call) -> Rule:
    """`"n c h~ w~ -> n c h~ w~"`"""
    return _rule(call, back=False)


def resampled_backward(call: Call) -> Rule:
    """The gradient of a piece of an image, from the gradients of the blocks around it."""
    return _rule(call, back=True)


def _rule(call: Call, back: bool) -> Rule:
    given, made = call.shape(0), call.results[0].shape
    image, result = (made, given) if back else (given, made)
    first = len(given) - plane_dims(call)
    names = [argument.name for argument in call.op._schema.arguments]
    scales = [call.get(name) for name in names if name in READ_NUMBERS]
    each = zip(image[first:], result[first:], scales, strict=True)
    planes = [_blocks(call, *own, back) for own in each]
    if "nearest" in call.name and None in planes and call.specs[0].dtype is torch.float64:
        # How kernels round indices depends on the sizes of a plane and the order of dims.
        if call.results[0].stride != contiguous_stride(made):
            return replicated(call)
        planes = [None] * len(planes)
    lead = tuple(Along(f"i{dim}") for dim in range(first))
    cuttable = {dim: blocks for dim, blocks in enumerate(planes, first) if blocks is not None}

    def cut(site: Site) -> dict[int, _Blocks]:
        return {dim: own for dim, own in cuttable.items() if site.inputs[0].dim_axes[dim]}

    def windows(inputs: Any, outputs: Any) -> dict[int, Tables]:
        reaches = {dim: own.reads for dim, own in cuttable.items()}
        return {0: tables(outputs[0], inputs[0], reaches)}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        value, shape, box = args[0], list(site.out_shapes[0]), site.out_boxes[0]
        if not (value.numel() and prod(shape)):
            return zeros_at(call, site, value)
        spans = {dim: own.makes(box[dim]) for dim, own in cut(site).items()}
        for dim, (start, stop) in spans.items():
            shape[dim] = stop - start
        sizes = [list(value.shape[first:]), shape] if back else [shape[first:]]
        corners = [call.get("align_corners")] if "align_corners" in names else []
        # Dims that are cut have the ratio of their sizes.
        factors = [None if dim in spans else scale for dim, scale in enumerate(scales, first)]
        found = op(value, *sizes, *corners, *factors)
        for dim, span in spans.items():
            found = narrowed(found, dim, span, box[dim])
        return found

    read, stops = (
        [
            in_proportion(f"i{dim}", given[dim], shape[dim]) if dim in cuttable else None
            for dim in range(first, len(given))
        ]
        for shape in (given, made)
    )
    return Rule(
        ((*lead, *read),),
        ((*lead, *stops),),
        {f"i{dim}": given[dim] for dim in (*range(first), *cuttable)},
        reduce=None,
        linear=((0,),) if has_fractions(call.specs[0].dtype) else (),
        local=local,
        unless=lambda site: not back and not cut(site) and prod(site.out_shapes[0]) > 0,
        windows=windows,
    )
