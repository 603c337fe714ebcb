"""Resampling of planes: interpolation and adaptive average pooling.

If the sizes of a dim before and after have a ratio of small numbers, the dim is made of equal
blocks, each of which gives a block of the result. A rank resamples the blocks of its piece,
with some more on each side if the interpolation reads neighbours. Other dims are needed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch

from ..layout.geometry import Interval, contiguous_stride
from .halo import Tables, in_proportion, narrowed, tables
from .language import Along, Call, Dims, Operand, Rule, Site, has_fractions, zeros_at

READ_NUMBERS = frozenset(("scales", "scales_d", "scales_h", "scales_w"))
"""Arguments whose values decide which dims have blocks: they are part of a call's key."""


@dataclass(frozen=True)
class _Blocks:
    """A dim of `size` elements in blocks, each of which gives a block of `stops` elements.

    To make a block of the result, `more` blocks on each side are read too.
    """

    size: int
    stops: int
    more: int

    def _around(self, stops: Interval, of: int) -> Interval:
        count = gcd(self.size, self.stops)
        block = self.stops // count
        if stops[0] >= stops[1]:
            return 0, 0
        first, last = stops[0] // block - self.more, -(-stops[1] // block) + self.more
        return max(first, 0) * (of // count), min(last, count) * (of // count)

    def reads(self, stops: Interval) -> Interval:
        """The elements in the blocks that a piece of the result needs."""
        return self._around(stops, self.size)

    def makes(self, stops: Interval) -> Interval:
        """The piece of the result that those blocks give."""
        return self._around(stops, self.stops)


Ratio = tuple[int, int, float | None]
"""The size of a dim, its size in the result, and the scale that was given."""


def _ratios(call: Call, image: Sequence[int], result: Sequence[int]) -> list[Ratio]:
    count = next(n for n in (1, 2, 3) if f"{n}d" in call.name)
    names = ["scales"] if count == 1 else ["scales_d", "scales_h", "scales_w"][-count:]
    scales = [call.get(name) for name in names]
    return list(zip(image[-count:], result[-count:], scales, strict=True))


def _is_binary(size: int, stops: int, scale: float | None) -> bool:
    """True if the ratio is a binary fraction, so that the product with an index is exact."""
    block = stops // gcd(size, stops) if stops else 0
    return block & (block - 1) == 0 and (not scale or not stops or 1 / scale == size / stops)


def _blocks(call: Call, ratio: Ratio, back: bool) -> _Blocks | None:
    """The blocks of a dim; None if it is needed whole."""
    size, stops, scale = ratio
    if not size or not stops or call.get("align_corners") or "_aa" in call.name:
        return None  # with antialiasing the weights of an element depend on the edges of its plane
    if scale is not None and scale * size != stops:
        return None
    is_nearest = "nearest" in call.name
    reach = 0 if is_nearest or "adaptive" in call.name else 2 if "cubic" in call.name else 1
    block = size // gcd(size, stops)
    if (is_nearest and not _is_binary(*ratio)) or 4 * (block + reach) > size:
        return None
    more = -(-reach // block)
    return _Blocks(stops, size, more) if back else _Blocks(size, stops, more)


@dataclass(frozen=True)
class _Planes:
    """The dims of a plane, which begin at dim `first`, as blocks; and the dims before."""

    blocks: tuple[_Blocks | None, ...]
    lead: Dims

    @staticmethod
    def of(call: Call, image: Sequence[int], result: Sequence[int], back: bool) -> _Planes:
        ratios = _ratios(call, image, result)
        first = len(image) - len(ratios)
        lead = [Along(f"i{dim}") for dim in range(first)]
        if "nearest" not in call.name or call.specs[0].dtype is not torch.float64:
            pass
        elif not all(_is_binary(*ratio) for ratio in ratios):
            # Kernels round indices to single or double precision. The sizes of the result decide,
            # and if channels lie last their number.
            shape = call.results[0].shape
            is_last = call.results[0].stride != contiguous_stride(shape)
            free = lead[:-1] if is_last else lead
            return _Planes((None,) * len(ratios), (*free, *[None] * (first - len(free))))
        return _Planes(tuple(_blocks(call, ratio, back) for ratio in ratios), tuple(lead))

    @property
    def first(self) -> int:
        return len(self.lead)

    def dims(self, shape: Sequence[int], own: Sequence[int]) -> Dims:
        """The dims of a tensor of this shape, along factors that have the sizes `own`."""
        planes = [
            None if blocks is None else in_proportion(f"i{dim}", own[dim], shape[dim])
            for dim, blocks in enumerate(self.blocks, self.first)
        ]
        return (*self.lead, *planes)

    def sizes(self, own: Sequence[int]) -> dict[str, int]:
        parts = zip(own, (*self.lead, *self.blocks), strict=True)
        return {f"i{dim}": size for dim, (size, part) in enumerate(parts) if part is not None}

    def cut(self, site: Site) -> list[tuple[int, _Blocks]]:
        """The dims of planes that are sharded."""
        axes = site.inputs[0].dim_axes
        every = enumerate(self.blocks, self.first)
        return [(dim, blocks) for dim, blocks in every if blocks is not None and axes[dim]]


def resampled(call: Call) -> Rule:
    """`"n c h~ w~ -> n c h~ w~"`, or with dims whole that have no blocks."""
    return _rule(call, call.shape(0), call.results[0].shape, back=False)


def resampled_backward(call: Call) -> Rule:
    """The gradient of a piece of an image, from the gradients of the blocks that it is part of."""
    return _rule(call, call.results[0].shape, call.shape(0), back=True)


def _rule(call: Call, image: Sequence[int], result: Sequence[int], back: bool) -> Rule:
    planes = _Planes.of(call, image, result, back)
    has_image = back and isinstance(call.get("self"), Operand)
    given, made = (result, image) if back else (image, result)
    own = image if has_image else given

    def windows(inputs: Any, outputs: Any) -> dict[int, Tables]:
        reaches = [(lambda piece: piece) if b is None else b.reads for b in planes.blocks]
        return {0: tables(outputs[0], inputs[0], reaches, planes.first)}

    def unless(site: Site) -> bool:
        return not back and not planes.cut(site) and prod(site.out_shapes[0]) > 0

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        value, box = args[0], site.out_boxes[0]
        if not (value.numel() and prod(site.out_shapes[0])):
            return zeros_at(call, site, value)
        cut = planes.cut(site)
        pieces = {dim: blocks.makes(box[dim]) for dim, blocks in cut}
        sizes = [*site.out_shapes[0][: planes.first], *made[planes.first :]]
        for dim, (start, stop) in pieces.items():
            sizes[dim] = stop - start
        if has_image:
            found = op(value, value.new_empty(()).expand(sizes) if cut else args[1])
        else:
            wanted = [list(value.shape[planes.first :]), sizes] if back else [sizes[planes.first :]]
            found = op(value, *wanted, *_options(call, [dim - planes.first for dim, _ in cut]))
        for dim, piece in pieces.items():
            found = narrowed(found, dim, piece, box[dim])
        return found

    return Rule(
        (planes.dims(given, own), *([planes.dims(image, own)] if has_image else [])),
        (planes.dims(made, own),),
        planes.sizes(own),
        reduce=None,
        linear=((0,),) if has_fractions(call.specs[0].dtype) else (),
        local=local,
        unless=unless,
        windows=windows,
    )


def _options(call: Call, cut: Sequence[int]) -> list[Any]:
    """`align_corners` and the scales; dims that are cut have the ratio of their sizes."""
    names = [argument.name for argument in call.op._schema.arguments]
    scales = [name for name in names if name in READ_NUMBERS]
    given = [None if dim in cut else call.get(name) for dim, name in enumerate(scales)]
    return [*([call.get("align_corners")] if "align_corners" in names else []), *given]
