"""Sample calls of operators on images: convolution, pooling, padding, resampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .samples import I64, Sample, call, index, x

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


def _pooling() -> Iterator[Sample]:
    tied = x(2, 3, 7, 4).round()
    low = tied.clone()
    low[:, :, :3] = float("-inf")
    low[1, 2, 4, 1] = float("nan")
    # kernel, stride, padding, dilation, ceil mode
    for image, options in (
        (tied, ([3, 2], [2, 1], [1, 0], [1, 1], False)),
        (low, ([2, 3], [1, 2], [1, 1], [2, 1], True)),
        (x(3, 5, 4, dtype=I64), ([2, 2], [], [0, 0], [1, 1], True)),
        (x(2, 2, 3, 4, 3), ([2] * 3, [2] * 3, [1] * 3, [1] * 3, False)),
    ):
        spatial = len(options[0])
        op = getattr(aten, f"max_pool{spatial}d_with_indices")
        back = getattr(aten, f"max_pool{spatial}d_with_indices_backward")
        yield call(op.default, image, *options)
        out, where = op.default(image, *options)
        if image.is_floating_point():
            yield call(back.default, x(*out.shape, shift=2), image, *options, where)
    for image, average in (
        (x(2, 3, 7, 4), ([3, 2], [2, 1], [1, 1], True, False, None)),
        (x(2, 3, 7, 4), ([3, 2], [1, 2], [1, 0], True, True, None)),
        (x(3, 5, 4), ([2, 2], [3, 2], [0, 0], False, True, 3)),
        (x(2, 3, 7, 4), ([3, 2], [1, 2], [0, 0], False, False, None)),
        (x(2, 2, 3, 4, 3), ([2] * 3, [2] * 3, [1] * 3, False, True, None)),
    ):
        spatial = len(average[0])
        pool = getattr(aten, f"avg_pool{spatial}d").default
        yield call(pool, image, *average)
        grad = x(*pool(image, *average).shape, shift=1)
        yield call(getattr(aten, f"avg_pool{spatial}d_backward").default, grad, image, *average)
    yield call(aten.avg_pool2d.default, x(2, 3, 7, 4, dtype=I64) * 3, [3, 2], [2, 1], [1, 0])


def _planes() -> Iterator[Sample]:
    image, cube, line = x(2, 3, 4, 5), x(2, 3, 4, 3, 2), x(2, 3, 4)
    regular = x(2, 2, 12, 8)
    for value, size in (
        (image, [3, 2]),
        (image[0], [5, 4]),
        (cube, [2, 2, 3]),
        (regular, [8, 2]),
    ):
        dims = f"{len(size)}d"
        average = getattr(aten, f"_adaptive_avg_pool{dims}").default
        yield call(average, value, size)
        grad = x(*average(value, size).shape, shift=1)
        yield call(getattr(aten, f"_adaptive_avg_pool{dims}_backward").default, grad, value)
        largest = getattr(aten, f"adaptive_max_pool{dims}").default
        yield call(largest, value, size)
        _, where = largest(value, size)
        yield call(getattr(aten, f"adaptive_max_pool{dims}_backward").default, grad, value, where)
    small = index(2, 3, 2, 2, below=20)
    yield call(aten.max_unpool2d.default, x(2, 3, 2, 2), small, [4, 5])
    small = index(2, 3, 2, 2, 1, below=24)
    yield call(aten.max_unpool3d.default, x(2, 3, 2, 2, 1), small, [4, 3, 2], [1] * 3, [0] * 3)
    yield from _resampled(x(2, 3, 8), [16])
    yield from _resampled(x(1, 2, 12, 8), [9, 4])
    yield from _resampled(x(1, 1, 32, 2), [48, 3])
    yield from _resampled(x(1, 1, 32, 2), [16, 1])
    yield from _resampled(x(1, 1, 41, 2), [30, 3])
    yield from _resampled(x(1, 1, 41), [60])
    for value, size in ((line, [7]), (image, [3, 8]), (cube, [5, 2, 3])):
        yield from _resampled(value, size)
        pads = [1, 0, 2, 1, 1, 3][: 2 * len(size)]
        for name in ("reflection_pad", "replication_pad"):
            op = getattr(aten, f"{name}{len(size)}d").default
            yield call(op, value, pads)
            grad = x(*op(value, pads).shape, shift=1)
            yield call(getattr(aten, f"{name}{len(size)}d_backward").default, grad, value, pads)


def _constant() -> Iterator[Sample]:
    for pads in ([1, 2], [-1, 1, 0, -2], [0, 0, 7, 0], [-2, -2, 1, 1, -1, 3], [0, 0]):
        for value in (0, 2.5):
            yield call(aten.constant_pad_nd.default, x(5, 3, 4), pads, value)
    yield call(aten.constant_pad_nd.default, x(5, dtype=I64), [1, 1], 2)
    yield call(aten.constant_pad_nd.default, x(0, 3), [0, 0, 2, 1], 1)


def _resampled(value: torch.Tensor, size: list[int]) -> Iterator[Sample]:
    dims = len(size)
    names: dict[str, tuple[Any, ...]] = {
        f"upsample_nearest{dims}d": (),
        f"_upsample_nearest_exact{dims}d": (),
        f"upsample_{('', 'bi', 'tri')[dims - 1]}linear{dims}d": (False,),
    }
    if dims == 2:
        names["upsample_bicubic2d"] = (True,)
        names["_upsample_bilinear2d_aa"] = names["_upsample_bicubic2d_aa"] = (False,)
    for name, more in names.items():
        yield call(getattr(aten, name).default, value, size, *more)
        grad = x(*value.shape[:2], *size, shift=1)
        back = getattr(aten, f"{name}_backward").default
        yield call(back, grad, size, list(value.shape), *more)


def _sampling() -> Iterator[Sample]:
    for dims in (2, 3):
        image, grid = x(2, 3, *[4, 3, 2][:dims]), x(2, *[2, 3, 3][:dims], dims, shift=1) / 3
        op = getattr(aten, f"grid_sampler_{dims}d").default
        back = getattr(aten, f"grid_sampler_{dims}d_backward").default
        for mode, border in ((0, 0), (1, 2)):
            yield call(op, image, grid, mode, border, False)
            grad = x(*op(image, grid, mode, border, False).shape, shift=2)
            for mask in ([True, True], [False, True]):
                yield call(back, grad, image, grid, mode, border, False, mask)


def _blocks() -> Iterator[Sample]:
    for lead in ((2,), ()):
        options = ([2, 2], [1, 2], [1, 0], [2, 1])
        yield call(aten.im2col.default, x(*lead, 3, 5, 4), *options)
        columns = aten.im2col.default(x(*lead, 3, 5, 4), *options)
        yield call(aten.col2im.default, columns * 2, [5, 4], *options)
    for dim, size, step in ((0, 3, 1), (1, 2, 2), (-1, 2, 3), (0, 1, 2)):
        yield call(aten.unfold.default, x(7, 3, 5), dim, size, step)
        grad = aten.unfold.default(x(7, 3, 5, shift=1), dim, size, step).clone()
        yield call(aten.unfold_backward.default, grad, [7, 3, 5], dim % 3, size, step)
    yield call(aten.unfold.default, x(), 0, 1, 1)


def spatial_samples() -> Iterator[Sample]:
    """All samples of operators on images."""
    for part in (_convolutions, _pooling, _planes, _constant, _sampling, _blocks):
        yield from part()
