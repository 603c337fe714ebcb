"""PyTorch's Python functions that run local calls reach the operator that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._torch import BOUND, local_function

aten = torch.ops.aten
A, B = torch.randn(4, 6), torch.randn(4, 6)
CUBE = torch.randn(2, 3, 3)
ROW = torch.randn(6)
NUMBER = torch.tensor(2.0)
LIST = [torch.randn(3), torch.randn(2, 2)]

PAIRS = ((A, B), (A, ROW), (A, NUMBER), (A, 2.0), (A, 3))
_ALONE = (
    "relu exp log sqrt rsqrt tanh sigmoid abs sin cos clone detach sum gelu silu t mean "
    "zeros_like ones_like empty_like"
)
_PAIRED = ("add", "sub", "mul", "div")

SAMPLES: dict[str, Any] = {
    **{f"aten.{name}.Tensor": (*PAIRS, (NUMBER, A), (A.long(), 2)) for name in _PAIRED},
    **{f"aten.{name}_.Tensor": PAIRS for name in _PAIRED},
    **{f"aten.{name}.default": ((A,), (ROW,), (NUMBER,)) for name in _ALONE.split(" ")},
    "aten.mm.default": [(A, B.t())],
    "aten.bmm.default": [(CUBE, CUBE)],
    "aten.addmm.default": [(ROW[:4], A, B.t()), (NUMBER, A, B.t())],
    "aten.baddbmm.default": [(CUBE, CUBE, CUBE), (NUMBER, CUBE, CUBE)],
    "aten.where.self": [(A > 0, A, B), (A > 0, A, NUMBER)],
    "aten.sum.dim_IntList": [(A, [1]), (A, [0, 1], True), (A, None), (A, []), (A, [-1], False)],
    "aten.mean.dim": [(A, [1]), (A, [0, 1], True), (A, None), (A, [])],
    "aten._softmax.default": [(A, -1, False)],
    "aten._log_softmax.default": [(A, 0, False)],
    "aten._softmax_backward_data.default": [(A, B, -1, torch.float32)],
    "aten._log_softmax_backward_data.default": [(A, B, -1, torch.float32)],
    "aten.native_layer_norm.default": [(A, [6], ROW, ROW, 1e-5), (A, [6], None, None, 1e-5)],
    "aten.transpose.int": [(A, 0, 1)],
    "aten.permute.default": [(CUBE, [2, 0, 1])],
    "aten.unsqueeze.default": [(A, 0)],
    "aten.cat.default": [([A, B],), ([A, B], 1)],
    "aten.stack.default": [([A, B],), ([A, B], 1)],
    "aten.embedding.default": [(A, torch.tensor([1, 2])), (A, torch.tensor([[1]]), 0, True)],
    "aten.view.default": [(A, [24]), (A, [2, -1])],
    "aten.expand.default": [(ROW, [3, 6]), (ROW, [2, -1])],
    "aten.select.int": [(A, 1, 2)],
    "aten.copy_.default": [(A, B), (A, ROW, True)],
    "aten.zero_.default": [(A,)],
    "aten.addcmul_.default": [(A, B, B), (A, B, NUMBER)],
    "aten.addcdiv_.default": [(A, B, B)],
    "aten.lerp_.Scalar": [(A, B, 0.5)],
    "aten._foreach_add_.List": [(LIST, LIST)],
    "aten._foreach_add_.Scalar": [(LIST, 1.0), (LIST, 2)],
    "aten._foreach_add_.ScalarList": [(LIST, [1.0, 2.0])],
    "aten._foreach_lerp_.Scalar": [(LIST, LIST, 0.5)],
    "aten._foreach_lerp_.List": [(LIST, LIST, LIST)],
    "aten._foreach_addcdiv_.ScalarList": [(LIST, LIST, LIST, [1.0, 2.0])],
    "aten._foreach_addcmul_.Scalar": [(LIST, LIST, LIST, 0.5)],
    "aten._foreach_sqrt.default": [(LIST,)],
    "aten._foreach_mul.Tensor": [(LIST, NUMBER)],
}


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(op))
        return op(*args, **(kwargs or {}))


def test_every_bound_operator_has_a_sample() -> None:
    assert not BOUND.keys() - SAMPLES.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_function_reaches_its_operator(name: str) -> None:
    _, base, overload = name.split(".")
    op = getattr(getattr(aten, base), overload)
    for args in SAMPLES[name]:
        with torch.inference_mode(), _Seen() as direct:
            op(*args)
        with torch.inference_mode(), _Seen() as seen:
            local_function(op)(*args)
        assert seen.ops == direct.ops == [name]
