"""Sample calls of losses that look at whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch.nn.modules.linear_cross_entropy import (
    _linear_cross_entropy_batch_chunked,
    _linear_cross_entropy_batch_chunked_no_reduction,
)

from .samples import F64, Sample, aten, call, index, positive, x


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
    for part in (_margins, _linear_cross_entropy):
        yield from part()
