"""Sample calls of operators that say where elements go: turns, repeats, triangles, diagonals."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .samples import BOOL, C128, I64, Sample, aten, call, x

_KINDS = (x(5, 3), x(3, 5, dtype=I64), x(4, 4, dtype=BOOL), x(2, 5, dtype=C128), x(0, 3), x(1, 4))


def structure_samples() -> Iterator[Sample]:
    """All samples of the table's part about where elements go."""
    for value in _KINDS:
        yield from _of_a_matrix(value)
    for value in (x(2, 5, 3), x(3, 4, 4, shift=1)):
        for dims in ([0], [-1, 0], [], [1, 2]):
            yield call(aten.flip.default, value, dims)
            yield call(aten.roll.default, value, [2] * (len(dims) or 1), dims)
        for offset, dim1, dim2 in ((0, 0, 1), (1, 1, 2), (-2, 2, 0), (0, -1, -2), (9, 0, 2)):
            yield call(aten.diagonal.default, value, offset, dim1, dim2)
        yield call(aten.tril.default, value, 1)
        yield call(aten.triu_.default, value.clone(), -1)
    for times in ([2, 1], [1, 3], [2, 1, 1], [0, 1]):
        yield call(aten.repeat.default, x(5, 3), times)
    yield call(aten.flip.default, x(), [])
    yield call(aten.roll.default, x(), [1])


def _of_a_matrix(value: torch.Tensor) -> Iterator[Sample]:
    yield call(aten.flip.default, value, [0])
    yield call(aten.roll.default, value, [-1], [1])
    for offset in (0, 1, -2):
        yield call(aten.tril.default, value, offset)
        yield call(aten.triu.default, value, offset)
        yield call(aten.diagonal.default, value, offset)
        yield call(aten.diagonal_copy.default, value, offset)
