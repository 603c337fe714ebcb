"""Padding with a number: each rank makes its piece of the result, and reads what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layout.geometry import Interval
from .call import Call, has_fractions
from .rule import Along, Rule, Site
from .sliding import Slide, followed, in_order, reached
from .spatial import is_permuted

__all__ = ["constant_pad"]


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
        (tuple(followed(f"i{dim}", s.size, s.stops) for dim, s in enumerate(slides)),),
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
