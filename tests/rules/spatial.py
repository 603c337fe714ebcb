"""Sample calls of operators on images: convolution, pooling, padding, resampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .samples import Sample, call, x

__all__ = ["spatial_samples"]

aten = torch.ops.aten

# size, kernel, stride, dilation, padding, more output, groups, channels in and out, batch
_CONVOLUTIONS = (
    (7, 3, 1, 1, 1, 0, 1, 3, 4, 2),
    (8, 3, 2, 1, 1, 1, 1, 3, 2, 2),
    (6, 2, 3, 2, 0, 0, 3, 6, 3, 2),
    (3, 4, 1, 1, 2, 0, 2, 2, 4, 3),
)
_MASKS = ([True] * 3, [True, False, False], [False, True, False], [False, False, True])


def _convolutions() -> Iterator[Sample]:
    for size, kernel, stride, dilation, padding, more, groups, ci, co, n in _CONVOLUTIONS:
        for transposed in (False, True):
            image = x(n, ci, size, 2)
            channels = (ci, co // groups) if transposed else (co, ci // groups)
            weight = x(*channels, kernel, 1, shift=3)
            rest: tuple[Any, ...] = ([stride, 1], [padding, 0], [dilation, 1], transposed)
            rest = (*rest, [more if transposed else 0, 0], groups)
            yield call(aten.convolution.default, image, weight, x(co, shift=1), *rest)
            out = aten.convolution.default(image, weight, None, *rest)
            for mask in _MASKS if groups == 1 else _MASKS[:1]:
                back = aten.convolution_backward.default
                yield call(back, x(*out.shape, shift=2), image, weight, [co], *rest, mask)
    line = (x(2, 3, 5), x(4, 3, 2), None, [1], [1], [1], False, [0], 1)
    yield call(aten.convolution.default, *line)
    yield call(aten.conv_tbc.default, x(5, 3, 4), x(2, 4, 3, shift=1), x(3, shift=2), 1)


def spatial_samples() -> Iterator[Sample]:
    """All samples of operators on images."""
    yield from _convolutions()
