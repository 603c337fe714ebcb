"""Where PyTorch's meta kernels differ from those of its devices, results are as on a device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise
import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.dispatch import infer
from shardwise.dispatch.infer import _product
from shardwise.layout.spec import TensorMeta

from ..compare import check, ints, numbers, spread, virtual

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
    "floor of a number": (
        lambda x: [x[:, 1] // 2, x[:, :2] // 2, x[0].expand(3, 3) // 2],
        [ints(5, 3)],
    ),
    "div by floor": (
        lambda x, y: torch.div(x.t(), y, rounding_mode="floor"),
        [numbers(5, 3), numbers(5, seed=1)],
    ),
    "floor_divide": (lambda x, y: x.t() // y, [numbers(5, 3), numbers(5, seed=1)]),
    "logical_xor": (lambda x, y: torch.logical_xor(x.t(), y), [numbers(5, 3) > 0, ints(5)]),
    "heaviside": (lambda x, y: torch.heaviside(x.t(), y), [numbers(5, 3), numbers(5, seed=1)]),
    "ldexp": (lambda x, y: torch.ldexp(x.t(), y), [ints(5, 3), ints(5).half()]),
    "xlogy": (lambda x, y: torch.xlogy(x, y.t()), [numbers(5, 3), numbers(3, 5).abs()]),
    "a shift of booleans": (lambda x: aten.__lshift__(x, 2), [ints(5, 3) > 2]),
    "nan_to_num_ of complex numbers": (lambda x: x.clone().nan_to_num_(1.0), [COMPLEX]),
    "a norm of nothing": (lambda x: torch.linalg.vector_norm(x, INF, -1), [EMPTY]),
    "the backward of a mean of nothing": (
        lambda g, x: aten.mse_loss_backward(g, x, x, 1),
        [torch.tensor(1.0, dtype=torch.float64), EMPTY],
    ),
    "log_softmax of a transposed": (lambda x: x.t().log_softmax(0), [numbers(5, 3)]),
    "logsigmoid of a transposed": (
        lambda x: torch.nn.functional.logsigmoid(x.t()),
        [numbers(5, 3)],
    ),
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


BY_DEFAULT: dict[str, Callable[[Any], Any]] = {
    "divided": lambda x: x / 2,
    "times a fraction": lambda x: x * 2.5,
    "times a tensor of no dims": lambda x: x * torch.tensor(2.5, dtype=torch.float16),
    "the root": torch.sqrt,
    "a list divided": lambda x: torch._foreach_div([x], 3)[0],
    "a list of roots": lambda x: torch._foreach_sqrt([x])[0],
}


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_results_follow_the_default_dtype_of_the_moment(name: str) -> None:
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            check(BY_DEFAULT[name], ints(5, 3), mesh=virtual(2), ops=())
    finally:
        torch.set_default_dtype(before)


def test_what_a_call_returns_is_asked_once_for_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = infer._infer
    monkeypatch.setattr(infer, "_infer", lambda *call: asked.append(call) or ask(*call))
    shardwise.dispatch.dispatch.clear()
    check(lambda x: x.sum(0).exp(), numbers(5, 3), mesh=virtual(2, 2), limit=16, grad=False)
    names = [str(op) for op, *_ in asked]
    assert names.count("aten.sum.dim_IntList") == names.count("aten.exp.default") == 1


class _Refusal(Exception):
    """What a library may raise that has errors of its own."""


ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError, _Refusal)


@torch.library.custom_op("shardwise_tests::kept_boxes", mutates_args=())
def kept_boxes(boxes: torch.Tensor, scores: torch.Tensor, kind: int) -> torch.Tensor:
    """As `nms` of torchvision: which boxes stay, the best first."""
    order = scores.argsort(descending=True)
    return order[scores[order] > boxes[order].mean(1)].clone()


@kept_boxes.register_fake
def _(boxes: torch.Tensor, scores: torch.Tensor, kind: int) -> torch.Tensor:
    raise ERRORS[kind]("how many boxes stay is not known")


@pytest.mark.parametrize("kind", range(len(ERRORS)), ids=[error.__name__ for error in ERRORS])
def test_meta_kernels_of_other_libraries_may_refuse(kind: int) -> None:
    boxes, scores = numbers(9, 4, dtype=torch.float32), numbers(9, seed=1, dtype=torch.float32)
    want = kept_boxes(boxes, scores, kind)
    with sw.communication("auto", fallback="auto"):
        for mesh in (virtual(2), virtual(1), virtual(2, 2)):
            for place in (Shard(0), Replicate(), Partial()):
                given = [spread(value, mesh, (place,) * mesh.ndim) for value in (boxes, scores)]
                assert torch.equal(kept_boxes(*given, kind).full_tensor(), want)


def test_errors_of_other_libraries_are_those_of_their_kernels() -> None:
    given = [spread(value, virtual(2), (Shard(0),)) for value in (numbers(7, 4), numbers(9))]
    with pytest.raises(IndexError), sw.communication("auto", fallback="auto"):
        kept_boxes(*given, 0)


def test_first_calls_import_neither_the_compiler_nor_pytorchs_dtensor() -> None:
    """Each takes a third of a second and more; `sympy` comes with the compiler's symbols."""
    program = """
import sys, torch, shardwise as sw
x = sw.distribute_tensor(torch.ones(4, 4), sw.init_device_mesh("cpu", (2,)), [sw.Shard(0)])
x[1] += 1
y = x.redistribute(placements=[sw.Shard(1)], async_op=True) * 2
torch.addmm(y, x, y).relu().sum().item()
print(x @ x.t())
heavy = {"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("sizes", [(3, 4, 5), (0, 4, 5), (3, 0, 5), (3, 4, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_products_have_the_metas_of_pytorchs_kernels(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, k, n = sizes
    left, right = torch.zeros(m, k, dtype=dtype), torch.zeros(k, n, dtype=dtype)
    turned = torch.zeros(n, k, dtype=dtype).t()
    for second in (right, turned):
        calls: list[tuple[Any, ...]] = [
            (aten.mm.default, left, second),
            (aten.bmm.default, left.expand(2, m, k), second.expand(2, k, n)),
            (aten.addmm.default, torch.zeros(n, dtype=dtype), left, second),
            (aten.addmm.default, torch.zeros(m, n, dtype=dtype), left, second),
        ]
        for op, *given in calls:
            made = op(*(tensor.to("meta") for tensor in given))
            want = TensorMeta(tuple(made.shape), made.stride(), made.dtype)
            assert _product([TensorMeta.of(tensor) for tensor in given]) == want


def test_products_that_do_not_fit_are_left_to_pytorch() -> None:
    def metas(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[TensorMeta]:
        return [TensorMeta.of(torch.empty(shape, dtype=dtype)) for shape in shapes]

    assert _product(metas((3, 4), (5, 4))) is None
    assert _product(metas((2, 3, 4), (3, 4, 5))) is None
    assert _product(metas((3, 4), (2, 4, 5))) is None
    assert _product(metas((4,), (4,))) is None
    assert _product(metas((3,), (3, 4), (4, 5))) is None
    assert _product([*metas((3, 4)), *metas((4, 5), dtype=torch.float64)]) is None
