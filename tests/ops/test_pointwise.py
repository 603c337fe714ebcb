"""Pointwise operators give what plain tensors give, in every layout, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ..compare import MESHES, check, ints, numbers, virtual

X, Y = numbers(7, 5), numbers(7, 5, seed=1)
COMPLEX = torch.complex(X, Y)
TIES = ints(7, 5, low=-1, high=2).double()

BINARY = {
    "add": (torch.add, X, Y),
    "sub": (lambda x, y: x - y, X, Y),
    "mul": (torch.mul, X, Y),
    "div": (lambda x, y: x / (y * y + 1), X, Y),
    "maximum": (torch.maximum, X, Y),
    "minimum with ties": (torch.minimum, TIES, TIES.flip(0)),
    "where": (lambda x, y: torch.where(x > 0, x, y), X, Y),
    "add with alpha": (lambda x, y: torch.add(x, y, alpha=-2), X, Y),
    "broadcast a row": (lambda x, y: x * y, X, Y[0]),
    "broadcast a column": (lambda x, y: x - y, X, Y[:, :1].clone()),
    "broadcast a 0-d": (lambda x, y: x * y, X, Y[0, 0].clone()),
    "broadcast both": (lambda x, y: x + y, X[:, :1].clone(), Y[0]),
    "outer ranks": (lambda x, y: x * y, numbers(2, 1, 5), X),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), X, Y),
    "addcmul": (lambda x, y: torch.addcmul(x, y, x, value=0.5), X, Y),
    "atan2": (torch.atan2, X, Y),
    "with a transposed": (lambda x, y: x + y.t(), X, numbers(5, 7)),
    "promotion": (lambda x, y: x * y, X, ints(7, 5)),
    "complex": (lambda x, y: x * y, COMPLEX, COMPLEX * 2),
    "empty": (lambda x, y: x * y + 1, numbers(0, 5), numbers(1, 5)),
}
UNARY = {
    "relu": (torch.relu, X),
    "exp": (torch.exp, X),
    "neg": (torch.neg, X),
    "abs at zero": (torch.abs, TIES),
    "scalars": (lambda x: (2 * x + 1) / 3 - x, X),
    "reciprocal": (lambda x: 1 / (x * x + 1), X),
    "pow": (lambda x: x**2, X),
    "pow of a scalar": (lambda x: 2**x, X),
    "sqrt": (lambda x: x.abs().sqrt(), X),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), X),
    "clamp at its bounds": (lambda x: x.clamp(-1, 1), TIES),
    "sigmoid": (torch.sigmoid, X),
    "tanh": (torch.tanh, X),
    "gelu": (F.gelu, X),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "silu": (F.silu, X),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), X),
    "softplus": (F.softplus, X),
    "elu": (F.elu, X),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 2.0), X),
    "compare": (lambda x: [x > 0, x == x, x.isnan()], X),
    "logical": (lambda x: [(x > 0) & (x < 1), ~(x > 0), (x > 0).logical_xor(x > 1)], X),
    "cast to int": (lambda x: (x * 3).to(torch.int32), X),
    "cast to bool": (lambda x: x.to(torch.bool), TIES),
    "round": (lambda x: [torch.round(x), torch.floor(x), torch.sign(x)], X),
    "of a transposed": (lambda x: torch.exp(x.t()), X),
    "of an expanded": (lambda x: x.unsqueeze(0).expand(3, 7, 5) * 2, X),
    "of a 0-d": (lambda x: x * 2 + x, X[0, 0].clone()),
    "nan_to_num": (lambda x: torch.nan_to_num(x.log() / 0.0, 1.0, 2.0, 3.0), TIES),
    "conjugate": (lambda x: [x * x.conj(), x.conj().t(), x.conj() + 1, -x.conj().imag], COMPLEX),
    "real and imag": (lambda x: [x.real, x.imag, x.abs()], COMPLEX),
    "integers": (lambda x: [x + 1, x * -2, x // 2, x % 3, x / 2, x & 1, x << 1], ints(7, 5)),
    "glu": (lambda x: torch.nn.functional.glu(x, 1), numbers(7, 4)),
    "prelu": (torch.nn.functional.prelu, X, numbers(1)),
    "uneven sizes and empty": (lambda x: torch.exp(x) - 1, numbers(1, 0, 3)),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_of_two(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = BINARY[name]
    check(f, *inputs, mesh=virtual(*shape))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_of_one(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = UNARY[name]
    check(f, *inputs, mesh=virtual(*shape))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64], ids=str
)
def test_dtypes(dtype: torch.dtype) -> None:
    x, y = TIES.to(dtype), ints(7, 5, seed=2).to(dtype)
    check(lambda x, y: x * y + x, x, y, mesh=virtual(2), mixed=False, tolerance=1e-1)


def test_a_bool_and_an_integer_promote() -> None:
    check(lambda x, y: [x + y, x * y, x & y], ints(5, 3) > 2, ints(5, 3, seed=1), mesh=virtual(2))


def test_casts_down_and_up_again() -> None:
    check(lambda x: x.float().to(torch.float64), X, mesh=virtual(2), tolerance=1e-5)
    check(lambda x: x.bfloat16().float(), TIES, mesh=virtual(2, 2), tolerance=1e-1)
