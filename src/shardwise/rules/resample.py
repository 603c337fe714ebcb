"""Interpolation of planes, which are needed whole.

But a dim that the nearest neighbour makes larger by a power of two may be sharded: each element
gives a block of the result.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ..layout.geometry import contiguous_stride
from .halo import plane_dims
from .language import NOWHERE, Along, Call, Rule, Scaled, Site, has_fractions, replicated, zeros_at

READ_NUMBERS = frozenset(("scales", "scales_d", "scales_h", "scales_w"))
"""Arguments whose values decide which dims may be sharded: they are part of a call's key."""


def resampled(call: Call) -> Rule:
    """`"n c h w -> n c (h a) (w b)"`"""
    return _rule(call, back=False)


def resampled_backward(call: Call) -> Rule:
    """The gradient of an image, from the gradients of the blocks."""
    return _rule(call, back=True)


def _block(call: Call, size: int, stops: int, scale: float | None) -> int | None:
    """How many elements of the result each of `size` elements gives; None if the dim is needed
    whole. The product of an index and a power of two is exact."""
    if "nearest" not in call.name or not size or not stops or stops % size:
        return None
    block = stops // size
    is_exact = block & (block - 1) == 0 and (scale is None or scale * size == stops)
    return block if is_exact else None


def _rule(call: Call, back: bool) -> Rule:
    given, made = call.shape(0), call.results[0].shape
    image, result = (made, given) if back else (given, made)
    first = len(given) - plane_dims(call)
    names = [argument.name for argument in call.op._schema.arguments]
    scales = [call.get(name) for name in names if name in READ_NUMBERS]
    each = zip(image[first:], result[first:], scales, strict=True)
    planes = [_block(call, *own) for own in each]
    if "nearest" in call.name and None in planes and call.specs[0].dtype is torch.float64:
        # How kernels round indices depends on the sizes of a plane and the order of dims.
        if call.results[0].stride != contiguous_stride(made):
            return replicated(call)
        planes = [None] * len(planes)
    scales = [None if block else scale for block, scale in zip(planes, scales, strict=True)]
    corners = [call.get("align_corners")] if "align_corners" in names else []

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        value, shape = args[0], site.out_shapes[0]
        if not (value.numel() and prod(shape)):
            return zeros_at(call, site, value)
        sizes = [value.shape[first:], shape] if back else [shape[first:]]
        return op(value, *sizes, *corners, *scales)

    def unless(site: Site) -> bool:
        return not (back or any(site.inputs[0].dim_axes[first:])) and prod(site.out_shapes[0]) > 0

    lead = tuple(Along(f"i{dim}") for dim in range(first))
    each_plane = list(enumerate(planes, first))
    elements = [Along(f"i{dim}") if block else None for dim, block in each_plane]
    blocks = [Along(f"i{dim}", Scaled(block)) if block else None for dim, block in each_plane]
    ins, outs = (blocks, elements) if back else (elements, blocks)
    cuttable = [*range(first), *(dim for dim, block in each_plane if block)]
    return Rule(
        ((*lead, *ins),),
        ((*lead, *outs),),
        {f"i{dim}": image[dim] for dim in cuttable},
        reduce=None,
        linear=((0,),) if has_fractions(call.specs[0].dtype) else (),
        local=local,
        unless=unless,
        placed=NOWHERE,
    )
