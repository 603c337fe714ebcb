"""Where PyTorch's meta kernels differ from those of its devices, results are as on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .compare import check, ints, numbers, virtual

aten = torch.ops.aten
INF = float("inf")
EMPTY = torch.zeros(0, 3, dtype=torch.float64)
COMPLEX = torch.complex(numbers(5, 3), numbers(5, 3, seed=1))

CALLS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "pow of a number": (lambda x: torch.pow(2.0, x.t()), [numbers(5, 3)]),
    "float_power of a number": (lambda x: torch.float_power(2.0, x.t()), [numbers(5, 3)]),
    "isin": (lambda x: torch.isin(x.t(), 2), [ints(5, 3)]),
    "all over no dims": (lambda x: torch.all(x.t(), dim=[]), [ints(5, 3) > 2]),
    "any over no dims": (lambda x: torch.any(x.t(), dim=[]), [ints(5, 3) > 2]),
    "nansum over no dims": (lambda x: aten.nansum(x, [], True), [numbers(5, 3)]),
    "copysign": (lambda x, y: torch.copysign(x.t(), y), [numbers(5, 3), numbers(5)]),
    "div by floor": (
        lambda x, y: torch.div(x.t(), y, rounding_mode="floor"),
        [numbers(5, 3), numbers(5, seed=1)],
    ),
    "xlogy": (lambda x, y: torch.xlogy(x, y.t()), [numbers(5, 3), numbers(3, 5).abs()]),
    "threshold_backward of integers": (
        lambda g, x: aten.threshold_backward(g, x, -0.5),
        [ints(5, 3), numbers(5, 3)],
    ),
    "a shift of booleans": (lambda x: aten.__lshift__(x, 2), [ints(5, 3) > 2]),
    "nan_to_num_ of complex numbers": (lambda x: x.clone().nan_to_num_(1.0), [COMPLEX]),
    "a norm of nothing": (lambda x: torch.linalg.vector_norm(x, INF, -1), [EMPTY]),
    "the backward of a mean of nothing": (
        lambda g, x: aten.mse_loss_backward(g, x, x, 1),
        [torch.tensor(1.0, dtype=torch.float64), EMPTY],
    ),
    "log_softmax of a transposed": (lambda x: x.t().log_softmax(0), [numbers(5, 3)]),
    "layer_norm of a transposed": (
        lambda x: torch.nn.functional.layer_norm(x.t(), [5]),
        [numbers(5, 3)],
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_results_are_as_on_a_device(call: str, mesh_shape: tuple[int, ...]) -> None:
    f, inputs = CALLS[call]
    check(f, *inputs, mesh=virtual(*mesh_shape), grad=False)
