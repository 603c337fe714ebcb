"""Resampling of planes: interpolation and adaptive pooling.

From `size` places to `stops` places an operator does the same again and again, in blocks of as few
places as the ratio of the two allows. So a piece of whole blocks, with a few places more on each
side where interpolation reaches out of a block, is resampled as it is in the whole dim. A dim whose
ratio has no such blocks is needed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from ..layout.geometry import Interval
from ..layout.spec import DTensorSpec
from .call import Call, Operand, has_fractions
from .pooling import in_plane, scattered
from .rule import Along, Dims, Rule, Site
from .sliding import followed, in_order, narrowed, reached
from .spatial import has_planes, is_permuted, of_planes, spatial_dims

__all__ = ["READ_NUMBERS", "resampled", "resampled_backward"]

READ_NUMBERS = frozenset(("scales", "scales_d", "scales_h", "scales_w"))
"""Arguments whose values decide which dims have blocks: they tell two calls apart."""


@dataclass(frozen=True)
class _Blocks:
    """A dim of `size` places in blocks, each of which gives a block of the `stops` places."""

    size: int
    stops: int
    reach: int

    @property
    def count(self) -> int:
        return gcd(self.size, self.stops)

    @property
    def fine(self) -> int:
        """The places of a block."""
        return self.size // self.count

    @property
    def coarse(self) -> int:
        """What a block gives."""
        return self.stops // self.count

    def around(self, piece: Interval, block: int) -> Interval:
        """The blocks that a piece in blocks of `block` places needs."""
        if piece[0] >= piece[1]:
            return (0, 0)
        more = -(-self.reach // self.fine)
        first, last = piece[0] // block - more, -(-piece[1] // block) + more
        return max(first, 0), min(last, self.count)

    def reads(self, stops: Interval) -> Interval:
        first, last = self.around(stops, self.coarse)
        return first * self.fine, last * self.fine

    def readers(self, places: Interval) -> Interval:
        first, last = self.around(places, self.fine)
        return first * self.coarse, last * self.coarse


def _reach(name: str) -> int:
    """How far interpolation reads beyond a place, in places of the operand."""
    if "nearest" in name or "adaptive" in name:
        return 0
    return 2 if "cubic" in name else 1


def _blocks(call: Call, image: Sequence[int], result: Sequence[int]) -> list[_Blocks | None]:
    """How each dim of a plane can be cut; None for a dim that is needed whole."""
    return [_regular(call, *ratio) for ratio in _ratios(call, image, result)]


def _ratios(
    call: Call, image: Sequence[int], result: Sequence[int]
) -> list[tuple[int, int, float | None]]:
    """For each dim of a plane its size, that of the result, and the scale that was given."""
    spatial = spatial_dims(call)
    names = ["scales"] if spatial == 1 else ["scales_d", "scales_h", "scales_w"][-spatial:]
    scales = [call.get(name) for name in names]
    return list(zip(image[-spatial:], result[-spatial:], scales, strict=True))


def _is_alike_in_pieces(call: Call, image: Sequence[int], result: Sequence[int]) -> bool:
    """Whether a kernel takes the same places for a piece of a plane, or of channels that lie last.

    The nearest place is a rounded product. In float64 PyTorch has kernels that round to single
    and to double precision, and chooses by the sizes of the result and, if channels lie last, by
    their number. They agree if every ratio is a binary fraction.
    """
    if "nearest" not in call.name or call.specs[0].dtype is not torch.float64:
        return True
    return all(_is_binary(*ratio) for ratio in _ratios(call, image, result))


def _is_binary(size: int, stops: int, scale: float | None) -> bool:
    """Whether the ratio of the sizes is a binary fraction, and is what a kernel multiplies by."""
    block = stops // gcd(size, stops) if stops else 0
    return block & (block - 1) == 0 and (not scale or not stops or 1 / scale == size / stops)


def _regular(call: Call, size: int, stops: int, scale: float | None) -> _Blocks | None:
    """Blocks, if the ratio repeats itself."""
    if not size or not stops or call.get("align_corners") or "_aa" in call.name:
        return None  # with antialiasing the weights of a place depend on the edges of its plane
    if scale is not None and scale * size != stops:
        return None
    blocks = _Blocks(size, stops, _reach(call.name))
    exact = "nearest" not in call.name or _is_binary(size, stops, scale)
    return blocks if exact and 4 * (blocks.fine + blocks.reach) <= size else None


@dataclass(frozen=True)
class _Planes:
    """The dims of a plane, which begin at dim `first`, as blocks."""

    blocks: tuple[_Blocks | None, ...]
    first: int
    image: tuple[int, ...]
    result: tuple[int, ...]
    lead: tuple[Along | None, ...]

    @staticmethod
    def of(call: Call, image: Sequence[int], result: Sequence[int]) -> _Planes:
        alike = _is_alike_in_pieces(call, image, result)
        blocks = _blocks(call, image, result) if alike else [None] * spatial_dims(call)
        first = len(image) - len(blocks)
        apart = first if alike or not is_permuted(call) else first - 1
        lead = [Along(f"i{dim}") if dim < apart else None for dim in range(first)]
        return _Planes(tuple(blocks), first, tuple(image), tuple(result), tuple(lead))

    def _dims(self, shape: Sequence[int], own: Sequence[int]) -> Dims:
        planes = [
            None if blocks is None else followed(f"i{dim}", own[dim], shape[dim])
            for dim, blocks in enumerate(self.blocks, self.first)
        ]
        return (*self.lead, *planes)

    def dims(self, own: Sequence[int]) -> tuple[Dims, Dims]:
        """The dims of the image and of the result, along the factors of the one that is `own`."""
        return self._dims(self.image, own), self._dims(self.result, own)

    def sizes(self, own: Sequence[int]) -> dict[str, int]:
        parts = zip(own, (*self.lead, *self.blocks), strict=True)
        return {f"i{dim}": size for dim, (size, part) in enumerate(parts) if part is not None}

    def cut(self, spec: DTensorSpec) -> list[_Blocks | None]:
        """The blocks of the dims that are sharded."""
        axes = spec.dim_axes[self.first :]
        return [blocks if cut else None for blocks, cut in zip(self.blocks, axes, strict=True)]

    def reach(self, name: str) -> list[Any]:
        return [None if blocks is None else getattr(blocks, name) for blocks in self.blocks]


def _scales(call: Call, cut: Sequence[_Blocks | None]) -> list[Any]:
    """The scales of dims that are not cut; the others have the ratio of their sizes."""
    names = [a.name for a in call.op._schema.arguments if a.name in READ_NUMBERS]
    return [call.get(name) if c is None else None for name, c in zip(names, cut, strict=False)]


def _has_corners(call: Call) -> bool:
    return any(a.name == "align_corners" for a in call.op._schema.arguments)


def _corners(call: Call) -> list[bool]:
    return [call.get("align_corners")] if _has_corners(call) else []


def resampled(call: Call) -> Rule:
    """`"n c h~ w~ -> n c h~ w~"`, or with dims whole that have no blocks."""
    planes = _Planes.of(call, call.shape(0), call.results[0].shape)
    image, result = planes.dims(planes.image)

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        return {0: reached(outputs[0], inputs[0], planes.reach("reads"), planes.first)}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        cut = planes.cut(site.inputs[0])
        if not any(cut) or not has_planes(site):
            return of_planes(op, args, kwargs, site)
        box = site.out_boxes[0]
        held = [None if b is None else b.reads(box[d]) for d, b in enumerate(cut, planes.first)]
        size = [_given(b, box[dim], planes.result[dim]) for dim, b in enumerate(cut, planes.first)]
        got = op(args[0], size, *_corners(call), *_scales(call, cut))
        made = list(got) if isinstance(got, tuple) else [got]
        for index, value in enumerate(made):
            for dim, b in enumerate(cut, planes.first):
                if b is not None:
                    start, stop = b.around(box[dim], b.coarse)
                    have = (start * b.coarse, stop * b.coarse)
                    value = narrowed(value, dim, have, box[dim])
            made[index] = value
        if len(made) == 2:
            starts = [0 if piece is None else piece[0] for piece in held]
            shape = args[0].shape[planes.first :]
            made[1] = in_plane(made[1], shape, starts, planes.image[planes.first :])
        made = [in_order(v, spec) for v, spec in zip(made, site.outputs, strict=True)]
        return made[0] if isinstance(got, torch.Tensor) else tuple(made)

    linear = has_fractions(call.specs[0].dtype) and len(call.results) == 1
    return Rule(
        (image,),
        (result,) * len(call.results),
        planes.sizes(planes.image),
        reduce=None,
        linear=((0,),) if linear else (),
        local=local,
        unless=_unless(call, planes, 0),
        windows=windows,
    )


def _length(piece: Interval) -> int:
    return piece[1] - piece[0]


def _given(cut: _Blocks | None, piece: Interval, whole: int) -> int:
    """How many places of the result a local call is asked for."""
    return whole if cut is None else _length(cut.around(piece, cut.coarse)) * cut.coarse


def _unless(call: Call, planes: _Planes, operand: int) -> Any:
    permuted = is_permuted(call)

    def unless(site: Site) -> bool:
        whole = not any(planes.cut(site.inputs[operand]))
        return whole and not permuted and has_planes(site)

    return unless


def resampled_backward(call: Call) -> Rule:
    """The gradient of a piece of an image, from the blocks of the result's that it is part of."""
    grad, out = call.shape(0), call.results[0].shape
    planes = _Planes.of(call, out, grad)
    has_image = isinstance(call.get("self"), Operand)
    own = out if has_image else grad
    image, result = planes.dims(own)
    index = call.get("indices")

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        readers = planes.reach("readers")
        tables = reached(outputs[0], inputs[0], readers, planes.first)
        return {0: tables, index: tables} if isinstance(index, Operand) else {0: tables}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        cut = planes.cut(site.inputs[0])
        shape, box = site.out_shapes[0], site.out_boxes[0]
        lead = shape[: planes.first]
        if not has_planes(site) or not args[0].numel():
            return args[0].new_zeros(shape)
        if isinstance(index, Operand) and any(cut):
            made = scattered(args[0], args[-1], planes.image, box, planes.first)
            return in_order(made, site.outputs[0])
        grad = args[0]
        places = [
            (0, planes.image[dim]) if b is None else _placed(b, box[dim])
            for dim, b in enumerate(cut, planes.first)
        ]
        sizes = [*lead, *map(_length, places)]
        if has_image:
            example = grad.new_empty(()).expand(sizes) if any(cut) else args[1]
            made = op(grad, example, *args[2:])
        else:
            around = list(grad.shape[planes.first :])
            made = op(grad, around, sizes, *_corners(call), *_scales(call, cut))
        for dim, b in enumerate(cut, planes.first):
            if b is not None:
                made = narrowed(made, dim, places[dim - planes.first], box[dim])
        return in_order(made, site.outputs[0])

    operands = [result, *([image] if has_image else [])]
    operands += [result] * (len(call.specs) - len(operands))
    return Rule(
        tuple(operands),
        (image,),
        planes.sizes(own),
        reduce=None,
        linear=((0,),),
        local=local,
        windows=windows,
    )


def _placed(blocks: _Blocks, piece: Interval) -> Interval:
    first, last = blocks.around(piece, blocks.fine)
    return first * blocks.fine, last * blocks.fine
