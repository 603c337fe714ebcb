"""Sample calls of losses that have a product with the classes in them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch.nn.modules.linear_cross_entropy import (
    _linear_cross_entropy_batch_chunked,
    _linear_cross_entropy_batch_chunked_no_reduction,
)

from .samples import F64, Sample, call, index, positive, x

__all__ = ["loss_samples"]


def loss_samples() -> Iterator[Sample]:
    """Calls of the linear cross entropy."""
    value, matrix, target = x(5, 3), x(4, 3, shift=1), index(5, below=4)
    for bias, weight in ((None, None), (x(4, shift=2), positive(4))):
        common = (value, matrix, target, bias, weight)
        op = _linear_cross_entropy_batch_chunked._opoverload
        for reduction, ignore in product(("sum", "mean"), (-100, 1)):
            for asked in ((True, True, bias is not None), (True, False, False), (False,) * 3):
                yield call(op, *common, reduction, ignore, 0.0, 2, "accurate", F64, True, *asked)
        rowwise = _linear_cross_entropy_batch_chunked_no_reduction._opoverload
        yield call(rowwise, *common, -100, 2, "accurate", F64)
