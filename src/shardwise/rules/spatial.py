"""Images: operators that work on each plane of a batch and a channel apart.

`planes` is the family of them all. Where only the edges of a plane's shards are needed, an operator
has a rule of its own, here or in `convolution.py`, `pooling.py` and `padding.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..layout.geometry import Cuts, Interval, contiguous_stride
from .call import Call, Family, Operand, has_fractions
from .rule import Along, Dims, Link, Rule, Scaled, Site, along, anywhere
from .sliding import Slide, fitted, followed, in_order, margins, padded, reached

__all__ = [
    "affine_grid",
    "channel_shuffle",
    "col2im",
    "grid_sampler",
    "grid_sampler_backward",
    "im2col",
    "pixel_shuffle",
    "pixel_unshuffle",
    "planes",
    "unfold",
    "unfold_backward",
]

aten = torch.ops.aten


def spatial_dims(call: Call) -> int:
    """How many dims a plane has, by the operator's name."""
    found = re.search(r"([123])d", call.op._schema.name)
    assert found is not None
    return int(found.group(1))


def planes(*, linear: bool = True) -> Family:
    """`"n c ... -> n c ..."` with the dims of a plane whole; `linear` in the first operand."""

    def family(call: Call) -> Rule:
        result = call.results[0].shape
        free = len(result) - spatial_dims(call)
        lead: list[str | None] = [f"i{dim}" for dim in range(free)]
        inputs = [along([*lead, *[None] * (spec.ndim - free)]) for spec in call.specs]
        samples = call.get("random_samples")
        if isinstance(samples, Operand):
            inputs[samples] = along([lead[0] if free > 1 else None, lead[-1], None])
        sums = linear and has_fractions(call.specs[0].dtype)
        return Rule(
            tuple(inputs),
            tuple(along([*lead, *[None] * (len(r.shape) - free)]) for r in call.results),
            {f"i{dim}": size for dim, size in enumerate(result[:free])},
            reduce=None,
            linear=((0,),) if sums else (),
            local=of_planes,
            unless=None if is_permuted(call) else has_planes,
        )

    return family


def is_permuted(call: Call) -> bool:
    """Whether a result's dims are not in their natural order in memory."""
    return any(result.stride != contiguous_stride(result.shape) for result in call.results)


def has_planes(site: Site) -> bool:
    """Whether this rank has something to do."""
    return all(map(prod, site.out_shapes))


@anywhere
def of_planes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """PyTorch refuses images without channels, and guesses the order of dims if there is one."""
    if not has_planes(site):
        specs = zip(site.outputs, site.out_shapes, strict=True)
        made = [args[0].new_zeros(shape, dtype=spec.dtype) for spec, shape in specs]
        return made[0] if len(made) == 1 else tuple(made)
    got = op(*args, **kwargs)
    if isinstance(got, torch.Tensor):
        return in_order(got, site.outputs[0])
    return tuple(in_order(value, spec) for value, spec in zip(got, site.outputs, strict=True))


# --- grids -----------------------------------------------------------------------------------


def _points(spatial: int) -> list[str | None]:
    return ["n", *(f"p{d}" for d in range(spatial)), None]


def grid_sampler(call: Call) -> Rule:
    """`"n c h! w!, n p q _ -> n c p q"`"""
    image, points, out, sizes = _sampled(call, call.shape(0), call.shape(1))
    return Rule((image, points), (out,), sizes, reduce=None, linear=((0,),))


def grid_sampler_backward(call: Call) -> Rule:
    """`"n c p q, n c h! w!, n p q _ -> n c h! w!, n p q _"`, as far as they are given: the second
    is given unasked."""
    image, points, out, sizes = _sampled(call, call.shape(1), call.shape(2))
    given = zip((image, points), call.structure, strict=True)
    results = tuple(dims for dims, place in given if isinstance(place, int))
    return Rule((out, image, points), results, sizes, linear=((0,),))


def _sampled(
    call: Call, image: Sequence[int], grid: Sequence[int]
) -> tuple[Dims, Dims, Dims, dict[str, int]]:
    points = _points(len(image) - 2)
    sizes = {name: size for name, size in zip(points, grid, strict=True) if name}
    whole = along(["n", "c", *[None] * (len(image) - 2)])
    return whole, along(points), along(["n", "c", *points[1:-1]]), {**sizes, "c": image[1]}


def affine_grid(call: Call) -> Rule:
    """`"n _ _ -> n ..."`: a grid for each matrix."""

    def tail(site: Site) -> tuple[Any, ...]:
        size = [site.out_shapes[0][0], *call.get("size")[1:]]
        return (size, call.get("align_corners"))

    ndim = len(call.results[0].shape)
    return Rule(
        (along(["n", None, None]),),
        (along(["n", *[None] * (ndim - 1)]),),
        {"n": call.shape(0)[0]},
        reduce=None,
        linear=((0,),),
        tail=tail,
    )


# --- shuffles --------------------------------------------------------------------------------


def pixel_shuffle(call: Call) -> Rule:
    """`"... (c r r) h w -> ... c (h r) (w r)"`"""
    return _shuffled(call, call.shape(0), call.results[0].shape, call.get("upscale_factor"), False)


def pixel_unshuffle(call: Call) -> Rule:
    """`"... c (h r) (w r) -> ... (c r r) h w"`"""
    return _shuffled(call, call.results[0].shape, call.shape(0), call.get("downscale_factor"), True)


def _shuffled(
    call: Call, deep: Sequence[int], wide: Sequence[int], factor: int, back: bool
) -> Rule:
    lead = [Along(f"i{dim}") for dim in range(len(deep) - 3)]
    of_deep = (*lead, _scaled("c", factor * factor), Along("h"), Along("w"))
    of_wide = (*lead, Along("c"), _scaled("h", factor), _scaled("w", factor))
    sizes = {f"i{dim}": size for dim, size in enumerate(deep[:-3])}
    sizes |= {"c": wide[-3], "h": deep[-2], "w": deep[-1]}
    return Rule(
        (of_wide if back else of_deep,),
        (of_deep if back else of_wide,),
        sizes,
        reduce=None,
        linear=((0,),),
        averages=has_fractions(call.specs[0].dtype),
        local=of_planes,
        unless=None if is_permuted(call) else has_planes,
    )


def _scaled(name: str, block: int) -> Along:
    return Along(name, Scaled(block) if block > 1 else None)


def channel_shuffle(call: Call) -> Rule:
    """Channels in another order: they are needed whole, and nothing else is."""
    shape = call.shape(0)
    names: list[str | None] = [f"i{dim}" for dim in range(len(shape))]
    names[1] = None
    return Rule(
        (along(names),),
        (along(names),),
        {f"i{dim}": size for dim, size in enumerate(shape) if dim != 1},
        reduce=None,
        linear=((0,),),
        averages=has_fractions(call.specs[0].dtype),
        local=of_planes,
        unless=None if is_permuted(call) else has_planes,
    )


# --- blocks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Times:
    """A link, and after it a block of places for each of its own."""

    first: Link | None
    block: int

    def to_factor(self, cuts: Cuts) -> Cuts | None:
        if any(size % self.block for size in cuts):
            return None
        own = tuple(size // self.block for size in cuts)
        return own if self.first is None else self.first.to_factor(own)

    def from_factor(self, cuts: Cuts, counts: tuple[int, ...]) -> Cuts:
        own = cuts if self.first is None else self.first.from_factor(cuts, counts)
        return tuple(size * self.block for size in own)


def _slides(call: Call, shape: Sequence[int]) -> tuple[Slide, Slide]:
    numbers = [call.get(name) for name in ("kernel_size", "stride", "dilation", "padding")]
    made = []
    for size, kernel, stride, dilation, padding in zip(shape[-2:], *numbers, strict=True):
        stops = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        made.append(Slide(size, stops, kernel, stride, dilation, padding))
    return made[0], made[1]


def im2col(call: Call) -> Rule:
    """`"n c h~ w! -> n (c k) (p q!)"`: blocks as columns, which read the edges of rows."""
    shape = call.shape(0)
    rows, columns = _slides(call, shape)
    lead = [Along("n")] if len(shape) == 4 else []
    link = followed("h", rows.size, rows.stops).link
    out = (*lead, _scaled("c", rows.kernel * columns.kernel), _times("h", link, columns.stops))
    at = len(lead) + 1

    def stops(piece: Interval) -> Interval:
        return piece[0] // max(columns.stops, 1), piece[1] // max(columns.stops, 1)

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        return {0: reached(outputs[0], inputs[0], [lambda piece: rows.reads(stops(piece))], at)}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        if 0 in site.out_shapes[0]:
            return args[0].new_zeros(site.out_shapes[0])
        if not site.inputs[0].dim_axes[at]:
            return op(*args, **kwargs)
        edges = margins(rows.reads(stops(site.out_boxes[0][at])), rows.size)
        wide = padded(args[0], at, [edges, (0, 0)])
        numbers = [call.get(name) for name in ("kernel_size", "dilation", "stride")]
        return op(wide, numbers[0], numbers[1], [0, columns.pad], numbers[2])

    return Rule(
        ((*lead, Along("c"), Along("h"), None),),
        (out,),
        dict(zip("nch", shape, strict=False)) if lead else {"c": shape[0], "h": shape[1]},
        reduce=None,
        linear=((0,),),
        local=local,
        unless=lambda site: has_planes(site) and not site.inputs[0].dim_axes[at],
        windows=windows,
    )


def _times(name: str, link: Link | None, block: int) -> Along:
    return Along(name, _Times(link, block) if block > 1 else link)


def col2im(call: Call) -> Rule:
    """`"n (c k) l! -> n c h! w!"`: columns added up where their blocks were."""
    shape, out = call.shape(0), call.results[0].shape
    lead = [Along("n")] if len(shape) == 3 else []
    return Rule(
        ((*lead, _scaled("c", prod(call.get("kernel_size"))), None),),
        ((*lead, Along("c"), None, None),),
        {"n": out[0], "c": out[1]} if lead else {"c": out[0]},
        reduce=None,
        linear=((0,),),
        local=of_planes,
        unless=has_planes,
    )


def unfold(call: Call) -> Rule:
    """`"... m~ -> ... m~ k"`: windows of one dim, each in a dim of its own."""
    shape = call.shape(0)
    names = [f"i{dim}" for dim in range(len(shape))]
    sizes = {f"i{dim}": size for dim, size in enumerate(shape)}
    if not shape:
        return Rule(((),), ((None,),), {}, reduce=None, linear=((0,),))
    dim = call.get("dimension") % len(shape)
    size, step = call.get("size"), call.get("step")
    slide = Slide(shape[dim], call.results[0].shape[dim], size, step, 1, 0)
    out = [*map(Along, names), None]
    out[dim] = followed(names[dim], slide.size, slide.stops)

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        return {0: reached(outputs[0], inputs[0], [slide.reads], dim)}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        if site.out_shapes[0][dim]:
            return op(args[0], dim, size, step)
        return args[0].new_empty(site.out_shapes[0])

    return Rule(
        (along(names),),
        (tuple(out),),
        sizes,
        reduce=None,
        linear=((0,),),
        averages=has_fractions(call.specs[0].dtype),
        local=local,
        unless=lambda site: bool(site.out_shapes[0][dim]),
        windows=windows,
    )


def unfold_backward(call: Call) -> Rule:
    """Windows added up where they were."""
    shape, sizes = call.shape(0), call.get("input_sizes")
    if not sizes:
        return Rule(((None,),), ((),), {}, reduce=None, linear=((0,),))
    dim = call.get("dim") % len(sizes)
    slide = Slide(sizes[dim], shape[dim], call.get("size"), call.get("step"), 1, 0)
    out = [Along(f"i{d}") for d in range(len(sizes))]
    out[dim] = followed(f"i{dim}", slide.stops, slide.size)

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        return {0: reached(outputs[0], inputs[0], [slide.readers], dim)}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        want = list(site.out_shapes[0])
        if not site.inputs[0].dim_axes[dim]:
            return op(args[0], want, *args[2:], **kwargs)
        piece = site.out_boxes[0][dim]
        span = slide.reads(slide.readers(piece))
        if not args[0].numel():
            return args[0].new_zeros(want)
        want[dim] = span[1] - span[0]
        return fitted(op(args[0], want, *args[2:], **kwargs), dim, span, piece)

    return Rule(
        (along([*(f"i{d}" for d in range(len(sizes))), None]),),
        (tuple(out),),
        {f"i{d}": size for d, size in enumerate(shape[:-1])},
        reduce=None,
        linear=((0,),),
        averages=has_fractions(call.specs[0].dtype),
        local=local,
        windows=windows,
    )
