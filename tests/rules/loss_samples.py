"""Sample calls of losses that look at whole rows or sequences."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch.nn.modules.linear_cross_entropy import (
    _linear_cross_entropy_batch_chunked,
    _linear_cross_entropy_batch_chunked_no_reduction,
)

from .samples import F64, Sample, aten, call, index, positive, x

__all__ = ["loss_samples"]


def _margins() -> Iterator[Sample]:
    for shape, reduction in product(((5, 4), (4,), (0, 4), (1, 4)), (0, 1, 2)):
        value, rows = x(*shape), shape[:-1]
        target = index(*rows, below=4)
        grad = x(*rows, shift=1) if reduction == 0 else x(shift=1)
        for p, weight in ((1, None), (2, positive(4))):
            if shape[0]:
                loss = aten.multi_margin_loss.default
                yield call(loss, value, target, p, 0.7, weight, reduction)
                back = aten.multi_margin_loss_backward.default
                yield call(back, grad, value, target, p, 0.7, weight, reduction)
        if shape[0]:
            labels = index(*shape, below=5) - 1
            forward = aten.multilabel_margin_loss_forward.default
            yield call(forward, value, labels, reduction)
            is_target = forward(value, labels, reduction)[1]
            back = aten.multilabel_margin_loss_backward.default
            yield call(back, grad, value, labels, reduction, is_target)


def _sequences() -> Iterator[Sample]:
    steps, batch, classes = 6, 5, 4
    value = x(steps, batch, classes).log_softmax(-1)
    inputs, lengths = [6, 4, 5, 6, 3], [2, 0, 3, 1, 1]
    matrix = index(batch, 3, below=classes - 1) + 1
    flat = torch.cat([row[:n] for row, n in zip(matrix, lengths, strict=True)])
    forward = aten._ctc_loss.default
    full = [3] * batch  # PyTorch leaves what is beyond a length as it was in memory
    for targets in (matrix, matrix.flatten()):
        yield call(forward, value, targets, [steps] * batch, full)
    for targets, zero in product((matrix, flat), (False, True)):
        loss, alpha = forward(value, targets, inputs, lengths, 0, zero)
        back = aten._ctc_loss_backward.default
        grad = x(batch, shift=1)
        yield call(back, grad, value, targets, inputs, lengths, loss, alpha, 0, zero)


def _bilinear() -> Iterator[Sample]:
    op, rows = aten._trilinear.default, 5
    for dims in (
        ([1, 3], [0], [1, 2], [2, 3]),
        ([1, 3], [0], [1, 2], [2]),
        ([1, 3], [0], [1, 2], []),
    ):
        yield call(op, x(rows, 2), x(4, 2, 3, shift=1), x(rows, 3, shift=2), *dims)
    yield call(op, x(1, 2), x(4, 2, 3, shift=1), x(rows, 3, shift=2), [1, 3], [0], [1, 2], [2, 3])


def _linear_cross_entropy() -> Iterator[Sample]:
    value, matrix, target = x(5, 3), x(4, 3, shift=1), index(5, below=4)
    for bias, weight in ((None, None), (x(4, shift=2), positive(4))):
        common = (value, matrix, target, bias, weight)
        op = _linear_cross_entropy_batch_chunked._opoverload
        for reduction, ignore in product(("sum", "mean"), (-100, 1)):
            for asked in ((True, True, bias is not None), (True, False, False), (False,) * 3):
                yield call(op, *common, reduction, ignore, 0.0, 2, "accurate", F64, True, *asked)
        rowwise = _linear_cross_entropy_batch_chunked_no_reduction._opoverload
        yield call(rowwise, *common, -100, 2, "accurate", F64)


def loss_samples() -> Iterator[Sample]:
    """All samples of this file."""
    for part in (_margins, _sequences, _bilinear, _linear_cross_entropy):
        yield from part()
