"""Padding: each rank makes its piece of the result, and reads what it lacks of its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ..geometry import Box, Interval
from .call import Call, has_fractions
from .rule import Along, Dims, Rule, Site
from .sliding import Slide, followed, in_order, reached
from .spatial import has_planes, is_permuted, of_planes, spatial_dims

__all__ = ["constant_pad", "mirrored_pad", "mirrored_pad_backward"]


def _edges(pads: Sequence[int], ndim: int) -> list[Interval]:
    """The padding before and after each dim; `pads` begin with the last dim."""
    pairs = [(pads[at], pads[at + 1]) for at in range(0, len(pads), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


def constant_pad(call: Call) -> Rule:
    """`"m~ ... -> m~ ..."`: a number around, or less of the tensor."""
    shape, out = call.shape(0), call.results[0].shape
    edges = _edges(call.get("pad"), len(shape))
    slides = [
        Slide(size, stops, 1, 1, 1, before)
        for size, stops, (before, _) in zip(shape, out, edges, strict=True)
    ]

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        return {0: reached(outputs[0], inputs[0], [slide.reads for slide in slides], 0)}

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        value, spec = args[0], site.inputs[0]
        pads: list[int] = []
        for dim in reversed(range(value.ndim)):
            before, after = edges[dim]
            if spec.dim_axes[dim]:
                start, stop = site.out_boxes[0][dim]
                before = min(max(edges[dim][0] - start, 0), stop - start)
                after = stop - start - before - value.shape[dim]
            pads += [before, after]
        return in_order(op(value, pads, *args[2:], **kwargs), site.outputs[0])

    return Rule(
        (tuple(Along(f"i{dim}") for dim in range(len(shape))),),
        (_followed(slides, 0),),
        {f"i{dim}": size for dim, size in enumerate(shape)},
        reduce=None,
        linear=((0,),) if call.get("value") == 0 else (),
        averages=has_fractions(call.specs[0].dtype),
        local=local,
        unless=None if is_permuted(call) else _is_whole,
        windows=windows,
    )


def _is_whole(site: Site) -> bool:
    return not site.inputs[0].is_sharded()


def _followed(slides: Sequence[Slide], first: int) -> Dims:
    lead = [Along(f"i{dim}") for dim in range(first)]
    return (
        *lead,
        *(followed(f"i{dim}", s.size, s.stops) for dim, s in enumerate(slides, first)),
    )


# --- reflection and replication --------------------------------------------------------------


@dataclass(frozen=True)
class _Mirror:
    """One dim of a plane: which place each place of the padded dim repeats."""

    size: int
    before: int
    stops: int
    reflects: bool

    def source(self, place: int) -> int:
        at = place - self.before
        if self.reflects:
            at = abs(at)
            return at if at < self.size else 2 * (self.size - 1) - at
        return min(max(at, 0), self.size - 1)

    def sources(self, piece: Interval) -> tuple[int, ...]:
        return _sources(self, piece)

    def reads(self, piece: Interval) -> Interval:
        """The places that a piece of the padded dim repeats."""
        if piece[0] >= piece[1]:
            return (0, 0)
        found = self.sources(piece)
        return min(found), max(found) + 1

    def repeats(self, piece: Interval) -> tuple[int, ...]:
        """The places of the padded dim that repeat some of a piece."""
        return _repeats(self, piece)

    def readers(self, piece: Interval) -> Interval:
        found = self.repeats(piece)
        return (found[0], found[-1] + 1) if found else (0, 0)


@lru_cache(maxsize=1024)
def _sources(mirror: _Mirror, piece: Interval) -> tuple[int, ...]:
    return tuple(mirror.source(place) for place in range(*piece))


@lru_cache(maxsize=1024)
def _repeats(mirror: _Mirror, piece: Interval) -> tuple[int, ...]:
    every = enumerate(_sources(mirror, (0, mirror.stops)))
    return tuple(at for at, source in every if piece[0] <= source < piece[1])


@dataclass(frozen=True)
class _Mirrors:
    dims: tuple[_Mirror, ...]
    first: int
    pads: tuple[int, ...]

    @staticmethod
    def of(call: Call, image: Sequence[int], padded: Sequence[int]) -> _Mirrors:
        spatial = spatial_dims(call)
        first = len(image) - spatial
        pads = tuple(call.get("padding"))
        edges = _edges(pads, spatial)
        reflects = "reflection" in call.name
        sizes = zip(image[first:], edges, padded[first:], strict=True)
        dims = tuple(_Mirror(size, edge[0], stops, reflects) for size, edge, stops in sizes)
        return _Mirrors(dims, first, pads)

    @property
    def places(self) -> Dims:
        return tuple(Along(f"i{dim}") for dim in range(self.first + len(self.dims)))

    @property
    def stops(self) -> Dims:
        slides = [Slide(dim.size, dim.stops, 1, 1, 1, 0) for dim in self.dims]
        return _followed(slides, self.first)

    def rest(self, cut: Sequence[bool]) -> list[int]:
        """The padding of the dims that are not cut."""
        last_first = list(reversed(cut))
        return [0 if last_first[at // 2] else pad for at, pad in enumerate(self.pads)]


def _cut(spec: Any, first: int) -> list[bool]:
    return [bool(axes) for axes in spec.dim_axes[first:]]


def mirrored_pad(call: Call) -> Rule:
    """`"n c h~ w~ -> n c h~ w~"`: what lies at an edge, again, in order or mirrored."""
    image = call.shape(0)
    mirrors = _Mirrors.of(call, image, call.results[0].shape)

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        reaches = [dim.reads for dim in mirrors.dims]
        return {0: reached(outputs[0], inputs[0], reaches, mirrors.first)}

    def local(op: Any, args: tuple[Any, ...], site: Site, cut: list[bool]) -> Any:
        value = args[0]
        box: Box = site.out_boxes[0]
        for dim, (mirror, here) in enumerate(zip(mirrors.dims, cut, strict=True), mirrors.first):
            if here:
                start = mirror.reads(box[dim])[0]
                places = [place - start for place in mirror.sources(box[dim])]
                value = value.index_select(dim, torch.tensor(places, device=value.device))
        return value if all(cut) else op(value, mirrors.rest(cut))

    rule = _mirrored(call, mirrors, 0, local)
    return replace(
        rule,
        inputs=(mirrors.places,),
        outputs=(mirrors.stops,),
        windows=windows,
    )


def mirrored_pad_backward(call: Call) -> Rule:
    """Each place gets the gradients of all places that repeat it."""
    mirrors = _Mirrors.of(call, call.shape(1), call.shape(0))

    def windows(inputs: Any, outputs: Any) -> dict[int, dict[int, tuple[Interval, ...]]]:
        reaches = [dim.readers for dim in mirrors.dims]
        return {0: reached(inputs[1], inputs[0], reaches, mirrors.first)}

    def local(op: Any, args: tuple[Any, ...], site: Site, cut: list[bool]) -> Any:
        grad = args[0]
        if not all(cut):
            shape = list(site.out_shapes[0])
            for dim, here in enumerate(cut, mirrors.first):
                shape[dim] = grad.shape[dim] if here else shape[dim]
            grad = op(grad, grad.new_empty(()).expand(shape), mirrors.rest(cut))
        box: Box = site.out_boxes[0]
        for dim, (mirror, here) in enumerate(zip(mirrors.dims, cut, strict=True), mirrors.first):
            if here:
                grad = _gathered(grad, dim, mirror, box[dim])
        return grad

    rule = _mirrored(call, mirrors, 1, local)
    return replace(
        rule, inputs=(mirrors.stops, mirrors.places), outputs=(mirrors.places,), windows=windows
    )


def _gathered(grad: torch.Tensor, dim: int, mirror: _Mirror, piece: Interval) -> torch.Tensor:
    """Gradients of the places of a piece out of those of the places that repeat them."""
    start = mirror.readers(piece)[0]
    found = mirror.repeats(piece)
    take = torch.tensor([at - start for at in found], dtype=torch.int64, device=grad.device)
    into = torch.tensor([mirror.source(at) - piece[0] for at in found]).to(take)
    shape = list(grad.shape)
    shape[dim] = piece[1] - piece[0]
    return grad.new_zeros(shape).index_add_(dim, into, grad.index_select(dim, take))


def _mirrored(call: Call, mirrors: _Mirrors, image: int, local: Any) -> Rule:
    """The parts that both directions share; operand `image` has the places."""

    def somewhere(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        cut = _cut(site.inputs[image], mirrors.first)
        if not any(cut) or not has_planes(site):
            return of_planes(op, args, kwargs, site)
        return in_order(local(op, args, site, cut), site.outputs[0])

    permuted = is_permuted(call)
    return Rule(
        (),
        (),
        {f"i{dim}": size for dim, size in enumerate(call.shape(image))},
        reduce=None,
        linear=((0,),),
        averages=has_fractions(call.specs[0].dtype),
        local=somewhere,
        unless=lambda site: (
            not permuted and has_planes(site) and not any(_cut(site.inputs[image], mirrors.first))
        ),
    )
