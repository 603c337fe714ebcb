"""Sample calls of every operator that has a rule, with values that reveal mistakes.

Negatives, zeros, ties, sizes that no number of ranks divides, dims of size 1 and 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from . import kernels

aten = torch.ops.aten
F64, F32, I64, BOOL, C128 = (
    torch.float64,
    torch.float32,
    torch.int64,
    torch.bool,
    torch.complex128,
)
_VALUES = (-2.0, 0.5, 0.0, 3.0, -1.0, 1.0, 1.0, 0.0, -0.25, 2.0, -3.0, 0.75, 0.5)


@dataclass(frozen=True)
class Sample:
    """One call of an operator."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    sure: bool = True  # that PyTorch accepts it

    def __str__(self) -> str:
        shapes = [
            str(list(v.shape))
            + str(v.dtype).removeprefix("torch.")
            + ("" if v.is_contiguous() else f" strides {list(v.stride())}")
            if isinstance(v, torch.Tensor)
            else "..."
            if isinstance(v, list) and v and isinstance(v[0], torch.Tensor)
            else repr(v)
            for v in (*self.args, *self.kwargs.values())
        ]
        return f"{self.op}({', '.join(shapes)})"


def x(*shape: int, dtype: torch.dtype = F64, shift: int = 0) -> torch.Tensor:
    """A tensor of signs, zeros and ties in no simple order."""
    count = prod(shape)
    values = [_VALUES[(i * 5 + i // 7 + shift) % len(_VALUES)] for i in range(count)]
    if dtype is BOOL:
        return (torch.tensor(values) > 0).view(shape)
    if dtype is C128:
        other = torch.tensor(values[1:] + values[:1], dtype=F64)
        return torch.complex(torch.tensor(values, dtype=F64), other).view(shape)
    return torch.tensor(values, dtype=F64).view(shape).to(dtype)


def positive(*shape: int, shift: int = 0) -> torch.Tensor:
    """A tensor of numbers between 0 and 1."""
    return x(*shape, shift=shift).sigmoid()


def index(*shape: int, below: int) -> torch.Tensor:
    """A tensor of indices, with repetitions."""
    return ((torch.arange(prod(shape)) * 7 + 3) % max(below, 1)).view(shape)


def call(op: Any, *args: Any, **kwargs: Any) -> Sample:
    return Sample(op, args, kwargs)


# --- pointwise operators, from their schemas ----------------------------------------------------

_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((5, 3), (5, 3), (5, 3)),
    ((5, 3), (3,), (5, 1)),
    ((4, 1), (1, 3), (3,)),
    ((0, 3), (0, 3), (0, 3)),
    ((4,), (), (1,)),
    ((), (4,), ()),
    ((5, -3), (5, -3), (5, -3)),
    ((5, -3), (3,), (5, 1)),
    ((5, 3), (5, -3), ()),
)
"""Shapes of the first, second and third operand; a minus marks a tensor with its dims swapped in
memory."""
_DTYPES: tuple[tuple[torch.dtype, ...], ...] = (
    (F64, F64, F64),
    (I64, I64, I64),
    (BOOL, BOOL, BOOL),
    (C128, C128, C128),
    (I64, F64, F64),
    (F64, I64, F64),
    (F64, BOOL, F64),
    (BOOL, F64, F64),
    (F32, F64, F32),
)
_NUMBERS = (-0.5, 0.0, 2)
_WORDS = {"approximate": "tanh", "rounding_mode": "floor"}
_CANNOT = (RuntimeError, ArithmeticError, ValueError, TypeError, IndexError, NotImplementedError)


def pointwise_samples(op: Any) -> Iterator[Sample]:
    """Calls of a pointwise operator, which PyTorch may not accept."""
    arguments = op._schema.arguments
    seen = set()
    for dtypes in _DTYPES:
        for shapes in _SHAPES if dtypes[0] is dtypes[1] is F64 else _SHAPES[:2]:
            for number in _NUMBERS if _has_number(op) else (2,):
                sample = _filled(op, arguments, shapes, dtypes, number)
                if str(sample) not in seen:
                    seen.add(str(sample))
                    yield sample


def _has_number(op: Any) -> bool:
    return any(_is_number(str(a.type)) for a in op._schema.arguments)


def _is_number(kind: str) -> bool:
    return kind.removeprefix("Optional[").removesuffix("]") in ("number", "float", "Scalar")


def _filled(op: Any, arguments: Any, shapes: Any, dtypes: Any, number: float) -> Sample:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    tensors = 0
    for argument in arguments:
        kind = str(argument.type)
        value: Any
        if "Tensor" in kind:
            at = min(tensors, 2)
            boolean = argument.name in ("condition", "mask")
            dtype, shift = (BOOL, 1) if boolean else (dtypes[at], 2 * tensors)
            value = x(*map(abs, shapes[at]), dtype=dtype, shift=shift)
            if any(size < 0 for size in shapes[at]):
                value = value.t().contiguous().t()
            tensors += 1
        elif _is_number(kind):
            value = number + 2 if argument.name.startswith("max") else number
        elif argument.has_default_value():
            continue
        elif kind == "int":
            value = 2
        elif kind == "bool":
            value = False
        elif argument.name in _WORDS or "str" in kind:
            value = _WORDS.get(argument.name, "none")
        else:
            value = number
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Sample(op, tuple(args), kwargs, sure=False)


def accepted(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Those that PyTorch accepts, looked at one by one: to ask takes as long as to check a row."""
    return (sample for sample in samples if sample.sure or _is_accepted(sample))


def _unsure(samples: Iterable[Sample]) -> Iterator[Sample]:
    return (replace(sample, sure=False) for sample in samples)


def _is_accepted(sample: Sample) -> bool:
    """Whether PyTorch runs the call, and can say before it does what it returns."""
    for device in ("cpu", "meta"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sample.op(
                    *[_copied(value, device) for value in sample.args],
                    **{name: _copied(value, device) for name, value in sample.kwargs.items()},
                )
        except _CANNOT:
            return device == "meta" and sample.op._schema.name.endswith("_loss_backward")
    return True


def _copied(value: Any, device: str) -> Any:
    return value.clone().to(device) if isinstance(value, torch.Tensor) else value


def pointwise_ops() -> list[Any]:
    """Every operator of ATen that is tagged pointwise, or is a form in place of one, without `out=`
    forms and random ones."""
    found = []
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        if not full.startswith("aten::"):
            continue
        name, _, overload = full.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, name), overload or "default", None)
        base = getattr(aten, name.removesuffix("_"), None)
        tags = getattr(getattr(base, overload or "default", None), "tags", [])
        if op is None or torch.Tag.pointwise not in (*op.tags, *tags):
            continue
        outs = any(argument.is_out for argument in op._schema.arguments)
        if not outs and torch.Tag.nondeterministic_seeded not in op.tags:
            found.append(op)
    return found


# --- the table ----------------------------------------------------------------------------------


def _matrix() -> Iterator[Sample]:
    a, b = x(5, 4), x(4, 3, shift=3)
    for dtype in (F64, I64, C128):
        yield call(aten.mm.default, a.to(dtype), b.to(dtype))
        yield call(aten.dot.default, x(5, dtype=dtype), x(5, dtype=dtype, shift=4))
        yield call(aten.vdot.default, x(5, dtype=dtype), x(5, dtype=dtype, shift=4))
        yield call(aten.mv.default, a.to(dtype), x(4, dtype=dtype, shift=1))
    yield call(aten.mm.default, x(0, 4), b)
    yield call(aten.mm.default, x(5, 0), x(0, 3))
    yield call(aten.mm.default, x(1, 4), x(4, 1))
    yield call(aten.bmm.default, x(3, 5, 2), x(3, 2, 4, shift=1))
    yield call(aten.ger.default, x(5), x(3, shift=2))
    for bias in ((5, 3), (3,), (1, 3), (5, 1), ()):
        for scales in ({}, {"beta": 2, "alpha": -0.5}, {"beta": 0}):
            yield call(aten.addmm.default, x(*bias, shift=2), a, b, **scales)
    for dtype in (I64, C128):
        yield call(aten.addmm.default, x(3, dtype=dtype), a.to(dtype), b.to(dtype), beta=3)
    for bias in ((5,), (1,), ()):
        yield call(aten.addmv.default, x(*bias, shift=2), a, x(4), beta=2, alpha=-1)
    for bias in ((5, 3), (3,), (5, 1), ()):
        yield call(aten.addr.default, x(*bias, shift=2), x(5), x(3, shift=2), beta=2, alpha=-1)
    for bias in ((3, 5, 4), (5, 4), (4,), (1, 5, 1)):
        yield call(aten.baddbmm.default, x(*bias), x(3, 5, 2), x(3, 2, 4), beta=2, alpha=-1)
    for bias in ((5, 4), (4,), (5, 1)):
        yield call(aten.addbmm.default, x(*bias), x(3, 5, 2), x(3, 2, 4), beta=2, alpha=-1)
    for lead in ((5,), (2, 3), ()):
        yield call(aten.linear.default, x(*lead, 4), x(3, 4, shift=2))
        yield call(aten.linear.default, x(*lead, 4), x(3, 4, shift=2), x(3, shift=1))


def _reductions() -> Iterator[Sample]:
    inputs = [x(5, 3), x(1, 4), x(5, 3, dtype=I64), x(5, 3, dtype=BOOL), x(5, 3, dtype=F32)]
    inputs += [x(5, 3, dtype=C128), x(5, 3, dtype=torch.uint8), x(3, 2, 5), -x(5, 3).abs()]
    for value in inputs:
        yield from _every_dim(value, ((0,), (1,), (0, 1), (-1,), ()))
    nan = x(5, 3)
    nan[2, 1] = float("nan")
    yield from _every_dim(nan, ((0,), (1,), (0, 1)))
    yield from _every_dim(x(0, 3), ((1,), (0,)))
    yield from _every_dim(x(), ((),))
    for kept in (True, False):
        yield call(aten.sum.dim_IntList, x(5, 3, dtype=I64), [0], kept, dtype=F64)
        yield call(aten.sum.dim_IntList, x(5, 3), [0], kept, dtype=I64)
        yield call(aten.mean.dim, x(5, 3, dtype=I64), [0], kept, dtype=F64)
        yield call(aten.mean.dim, x(5, 3), None, kept)
        yield call(aten.prod.dim_int, x(5, 3, dtype=I64), 0, kept, dtype=F64)
    yield call(aten.sum.default, x(5, 3, dtype=BOOL), dtype=F64)
    yield call(aten.mean.default, x(5, 3, dtype=I64), dtype=F64)


def _every_dim(value: torch.Tensor, dims: tuple[tuple[int, ...], ...]) -> Iterator[Sample]:
    """Calls of every reduction, which PyTorch may not accept."""
    samples = [
        call(getattr(aten, name).default, value)
        for name in ("sum", "nansum", "count_nonzero", "mean", "prod", "max", "min", "any", "all")
    ]
    for dim in dims:
        for keep in (False, True):
            for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default):
                samples.append(call(op, value, list(dim), keep))
            samples.append(call(aten.nansum.default, value, list(dim), keep))
            samples.append(call(aten.any.dims, value, list(dim), keep))
            samples.append(call(aten.all.dims, value, list(dim), keep))
            if len(dim) == 1:
                for op in (aten.prod.dim_int, aten.any.dim, aten.all.dim):
                    samples.append(call(op, value, dim[0], keep))
        samples.append(call(aten.count_nonzero.dim_IntList, value, list(dim)))
    yield from _unsure(samples)


def _dimwise() -> Iterator[Sample]:
    for value in (x(5, 3), x(3, 2, 5, shift=1), x(5, 3, dtype=I64), x(1, 4), x(0, 3), x()):
        samples: list[Sample] = []
        for dim in {0, value.ndim - 1, -1}:
            for keep in (False, True):
                for name in ("max", "min", "median", "nanmedian"):
                    samples.append(call(getattr(aten, name).dim, value, dim, keep))
                for name in ("argmax", "argmin", "mode"):
                    samples.append(call(getattr(aten, name).default, value, dim, keep))
                samples.append(call(aten.kthvalue.default, value, 2, dim, keep))
                samples.append(call(aten.logsumexp.default, value, [dim], keep))
                for name in ("var", "std", "var_mean", "std_mean"):
                    op = getattr(aten, name)
                    samples.append(call(op.correction, value, [dim], correction=0, keepdim=keep))
                    samples.append(call(op.dim, value, [dim], True, keep))
                for order in (2, 1, float("inf"), 0, 3.5):
                    samples.append(call(aten.linalg_vector_norm.default, value, order, [dim], keep))
            samples.append(call(aten.sort.default, value, dim, True))
            samples.append(call(aten.sort.stable, value, stable=True, dim=dim))
            samples.append(call(aten.topk.default, value, 2, dim))
            for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"):
                samples.append(call(getattr(aten, name).default, value, dim))
            for name in ("_softmax", "_log_softmax"):
                samples.append(call(getattr(aten, name).default, value, dim, False))
                back = getattr(aten, name + "_backward_data").default
                samples.append(call(back, value, value.flip(0) if value.ndim else value, dim, F64))
            samples.append(call(aten._safe_softmax.default, value, dim))
        for name in ("argmax", "argmin", "median", "nanmedian"):
            samples.append(call(getattr(aten, name).default, value))
        for name in ("var", "std", "var_mean", "std_mean"):
            samples.append(call(getattr(aten, name).default, value))
            samples.append(call(getattr(aten, name).correction, value))
        samples.append(call(aten.linalg_vector_norm.default, value))
        samples.append(call(aten.logsumexp.default, value, []))
        yield from _unsure(samples)


def _untagged() -> Iterator[Sample]:
    """Pointwise operators that PyTorch does not tag so."""
    a, b = x(5, 3), x(5, 3, shift=3)
    for dtype in (F64, I64, F32, C128, BOOL):
        for other in (F64, I64, F32, BOOL):
            if dtype is not C128:
                yield call(aten._to_copy.default, x(5, 3, dtype=dtype), dtype=other)
            yield call(aten.copy.default, x(5, 3, dtype=other), x(3, dtype=dtype, shift=1))
            yield call(aten.copy_.default, x(5, 3, dtype=other), x(5, 3, dtype=dtype, shift=1))
        for name in ("zero", "detach", "alias", "lift_fresh", "lift_fresh_copy"):
            yield call(getattr(aten, name).default, x(5, 3, dtype=dtype))
        yield call(aten.zero_.default, x(5, 3, dtype=dtype))
        yield call(aten.fill.Scalar, x(5, 3, dtype=dtype), 3)
        yield call(aten.fill_.Scalar, x(5, 3, dtype=dtype), 3)
        yield call(aten.fill.Tensor, x(5, 3, dtype=dtype), x())
    for dtype in (F64, C128):
        yield call(aten._conj_physical.default, x(5, 3, dtype=dtype))
        yield call(aten._neg_view.default, x(5, 3, dtype=dtype))
    yield call(aten._conj.default, x(5, 3, dtype=C128))
    yield call(aten.detach.default, x(0, 3))
    yield call(aten._to_copy.default, x())
    yield call(aten.elu_backward.default, a, 2.0, 1.5, 0.5, False, b)
    yield call(aten.elu_backward.default, a, 2.0, 1.5, 0.5, True, b)
    yield call(aten.hardtanh_backward.default, a, b, -0.5, 1.0)
    yield call(aten.hardsigmoid_backward.default, a, b)
    yield call(aten.hardswish.default, a)
    yield call(aten.hardswish_backward.default, a, b)
    yield call(aten.leaky_relu_backward.default, a, b, -0.5, False)
    yield call(aten.softplus_backward.default, a, b, 2.0, 1.0)
    yield call(aten.softshrink_backward.default, a, b, 0.5)
    yield call(aten.hardshrink_backward.default, a, b, 0.5)
    yield call(aten.log_sigmoid_forward.default, a)
    _, buffer = aten.log_sigmoid_forward.default(b)
    yield call(aten.log_sigmoid_backward.default, a, b, buffer)
    yield call(aten.mish_backward.default, a, b)
    yield call(aten.logit_backward.default, a, positive(5, 3), 0.3)
    yield call(aten.logit_backward.default, a, positive(5, 3))
    yield call(aten.complex.default, a, x(3))
    yield call(aten.polar.default, a.abs(), x(3))
    yield call(aten.isin.Tensor_Scalar, a, 1.0)
    yield call(aten.isin.Tensor_Scalar, a, 1.0, invert=True)


def _views() -> Iterator[Sample]:
    for a in (x(6, 4), x(6, 4, dtype=I64), x(6, 4, dtype=BOOL), x(6, 4, dtype=C128)):
        yield call(aten.view.default, a, [2, 3, 4])
        yield call(aten.view.dtype, a, torch.uint8)
    yield call(aten.view_as_real.default, x(5, 3, dtype=C128))
    yield call(aten.view_as_complex.default, x(5, 3, 2))
    for a in (x(6, 4), x(6, 4, dtype=I64), x(6, 4, dtype=BOOL), x(6, 4, dtype=C128)):
        yield call(aten.t.default, a)
        yield call(aten.slice.Tensor, a, 0, 1, 5)
        yield call(aten.expand.default, a, [2, 6, 4])
    a = x(6, 4)
    for shape in ([24], [-1], [2, 3, 4], [6, 2, 2], [4, 6], [8, 3], [1, 6, 1, 4], [3, 8], [2, 12]):
        for op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            yield call(op, a, shape)
        yield call(aten.view_copy.default, a, shape)
    yield call(aten.view.default, x(5, 1, 3), [15])
    yield call(aten.view.default, x(15), [5, 3])
    yield call(aten.view.default, x(0, 3), [3, 0])
    yield call(aten.view.default, x(4, 0, 3), [4, 0])
    yield call(aten.view.default, x(1), [])
    yield call(aten.view.default, x(), [1, 1])
    for dims in ([1, 0, 2], [2, 0, 1], [-1, 0, 1], [0, 1, 2]):
        yield call(aten.permute.default, x(5, 2, 3), dims)
    for pair in ((0, 1), (-1, 0), (1, 1)):
        yield call(aten.transpose.int, x(5, 2, 3), *pair)
    yield call(aten.t.default, x(5))
    yield call(aten.t.default, x())
    for dim in (0, 1, -1, 2, -3):
        yield call(aten.unsqueeze.default, x(5, 3), dim)
    for shape in ((5, 1, 3), (1, 5), (1, 1), (5, 3), (0, 1)):
        yield call(aten.squeeze.default, x(*shape))
        for dim in (0, 1, -1):
            yield call(aten.squeeze.dim, x(*shape), dim)
        yield call(aten.squeeze.dims, x(*shape), [0, 1])
    for src, dst in (((5, 1), [5, 3]), ((3,), [4, 3]), ((5, 3), [5, 3]), ((1,), [0]), ((), [3])):
        yield call(aten.expand.default, x(*src), dst)
    yield call(aten.expand.default, x(5, 1), [-1, 4])
    yield call(aten.expand.default, x(1, 1), [1, 4])
    for dim, at in ((0, 2), (1, -1), (-1, 0)):
        yield call(aten.select.int, x(5, 3), dim, at)
        yield call(aten.select_copy.int, x(5, 3), dim, at)
        yield call(aten.select_scatter.default, x(5, 3), x(5, 3, shift=2).select(dim, 0), dim, at)
        grad = x(5, 3, shift=1).select(dim, 0).clone()
        yield call(aten.select_backward.default, grad, [5, 3], dim, at)
    for dim in (0, -1):
        yield call(aten.unbind.int, x(4, 3), dim)
        for size in (1, 2, 4, 7):
            yield call(aten.split.Tensor, x(7, 5), size, dim)
        yield call(aten.split_with_sizes.default, x(5, 5), [1, 0, 3, 1], dim)
    yield from _windows()


def _windows() -> Iterator[Sample]:
    bounds = ((0, 4, 1), (2, 5, 1), (1, 7, 2), (6, 7, 1), (3, 3, 1), (0, 7, 3), (-3, -1, 1))
    for first, last, step in (*bounds, (None, None, 1), (0, 2**63 - 1, 2), (5, 2, 1)):
        for dim in (0, 1):
            whole = x(7, 3) if dim == 0 else x(3, 7)
            part = aten.slice.Tensor(whole, dim, first, last, step).clone()
            yield call(aten.slice.Tensor, whole, dim, first, last, step)
            yield call(aten.slice_scatter.default, whole, part * 2 + 1, dim, first, last, step)
            if first is not None:
                yield call(
                    aten.slice_backward.default, part, list(whole.shape), dim, first, last, step
                )


def _joins() -> Iterator[Sample]:
    for dim in (0, 1, -1):
        yield call(aten.cat.default, [x(5, 3), x(5, 3, shift=1), x(5, 3, shift=2)], dim)
        yield call(aten.stack.default, [x(5, 3), x(5, 3, shift=1)], dim)
    yield call(aten.cat.default, [x(5, 3), x(2, 3)], 0)
    yield call(aten.cat.default, [x(5, 3), x(5, 1), x(5, 0)], 1)
    yield call(aten.cat.default, [x(5, 3), x(0), x(2, 3)], 0)
    yield call(aten.cat.default, [x(0), x(5, 3)], 1)
    yield call(aten.cat.default, [x(5, 3), x(5, 3, dtype=I64)], 1)
    yield call(aten.cat.default, [x(5, 3, dtype=I64), x(5, 3, dtype=BOOL)], 1)
    yield call(aten.cat.default, [x(5, 3)], 1)
    yield call(aten.stack.default, [x(), x(shift=1)], 0)
    yield call(aten.stack.default, [x(5, 3, dtype=I64), x(5, 3, dtype=BOOL)], 0)


def _creation() -> Iterator[Sample]:
    for a in (x(5, 3), x(5, 3, dtype=I64), x(0, 3), x(), x(3, 5).t()):
        for name in ("empty_like", "zeros_like", "ones_like"):
            yield call(getattr(aten, name).default, a)
        yield call(aten.full_like.default, a, 3)
        for size in (list(a.shape), [4, 2]):
            for name in ("new_empty", "new_zeros", "new_ones"):
                yield call(getattr(aten, name).default, a, size)
            yield call(aten.new_full.default, a, size, 3)
    yield call(aten.new_empty_strided.default, x(5, 3), [5, 3], [1, 5])
    yield call(aten.new_empty_strided.default, x(5, 3), [5, 3], [3, 1])
    yield call(aten.new_empty_strided.default, x(5, 3), [2, 4], [4, 1])
    yield call(aten.new_zeros.default, x(5, 3), [5, 3], dtype=I64)


def _norms() -> Iterator[Sample]:
    for shape, inner in (((5, 3), [3]), ((2, 3, 4), [4]), ((5, 2, 3), [2, 3]), ((0, 3), [3])):
        value, weight, bias = x(*shape), x(*inner, shift=1), x(*inner, shift=2)
        for params in ((weight, bias), (weight, None), (None, None)):
            yield call(aten.native_layer_norm.default, value, inner, *params, 1e-5)
            _, mean, rstd = aten.native_layer_norm.default(value, inner, *params, 1e-5)
            masks = [[True, params[0] is not None, params[1] is not None], [True, False, False]]
            if params[0] is not None:
                masks.append([False, True, False])
            for mask in masks:
                yield call(
                    aten.native_layer_norm_backward.default,
                    x(*shape, shift=4),
                    value,
                    inner,
                    mean,
                    rstd,
                    *params,
                    mask,
                )


def _rms_norms() -> Iterator[Sample]:
    for shape, inner in (((5, 3), [3]), ((5, 2, 3), [2, 3])):
        value = x(*shape)
        for weight in (x(*inner, shift=1), None):
            yield call(aten._fused_rms_norm.default, value, inner, weight, 1e-5)
            _, rstd = aten._fused_rms_norm.default(value, inner, weight, 1e-5)
            for mask in ([True, weight is not None], [weight is None, weight is not None]):
                yield call(
                    aten._fused_rms_norm_backward.default,
                    *(x(*shape, shift=4), value, inner, rstd, weight, mask),
                )


def _group_norms() -> Iterator[Sample]:
    for shape, groups in (((5, 6, 3), 3), ((3, 4, 2, 2), 4), ((4, 6), 2), ((2, 3, 4), 1)):
        batch, channels, inside = shape[0], shape[1], prod(shape[2:])
        value = x(*shape)
        for weight, bias in ((x(channels, shift=1), x(channels, shift=2)), (None, None)):
            yield call(
                aten.native_group_norm.default,
                *(value, weight, bias, batch, channels, inside, groups, 1e-5),
            )
            _, mean, rstd = aten.native_group_norm.default(
                value, weight, bias, batch, channels, inside, groups, 1e-5
            )
            given = weight is not None
            for mask in ([True, given, given], [not given, given, False]):
                yield call(
                    aten.native_group_norm_backward.default,
                    *(x(*shape, shift=3), value, mean, rstd, weight),
                    *(batch, channels, inside, groups, mask),
                )


def _grouped() -> Iterator[Sample]:
    def f32(*shape: int, shift: int = 0) -> torch.Tensor:
        return x(*shape, shift=shift).float()

    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    for wide in (8, 12):
        yield call(aten._grouped_mm.default, f32(7, 8), f32(3, 8, wide, shift=1), ends)
        yield call(aten._grouped_mm.default, f32(7, 8), f32(3, wide, 8, shift=1).mT, ends)
        yield call(aten._grouped_mm.default, f32(3, 4, 8), f32(3, 8, wide, shift=1))
        yield call(aten._grouped_mm.default, f32(7, 8).t(), f32(7, wide, shift=1), ends)
        yield call(aten._grouped_mm.default, f32(3, wide, 8), f32(7, 8, shift=1).t(), ends)


def _scaled() -> Iterator[Sample]:
    def f8(*shape: int, shift: int = 0) -> torch.Tensor:
        return x(*shape, shift=shift).to(torch.float8_e4m3fn)

    def ones(*shape: int) -> torch.Tensor:
        return 1 + positive(*shape).float()

    small = index(5, 3, below=100).to(torch.int8), index(3, 4, below=100).to(torch.int8)
    yield call(aten._int_mm.default, *small)
    for m, n in ((5, 48), (1, 16)):
        for scales in ((ones(), ones(1)), (ones(m, 1), ones(1, n))):
            a, b = f8(m, 16), f8(n, 16, shift=1).t()
            for bias in (None, x(n).float()):
                dtype = {"out_dtype": torch.float32}
                yield call(aten._scaled_mm.default, a, b, *scales, bias, **dtype)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    op, weight, dtype = aten._scaled_grouped_mm.default, f8(3, 32, 16).mT, torch.bfloat16
    rows = f8(7, 16), weight, ones(7), ones(3, 32), ends
    yield call(op, *rows, out_dtype=dtype)
    yield call(op, f8(3, 4, 16), weight, ones(3, 4), ones(3, 32), out_dtype=dtype)


def _batch_norms() -> Iterator[Sample]:
    evaluated = aten._native_batch_norm_legit_no_training.default
    functional = aten._native_batch_norm_legit_functional.default
    alone = aten._native_batch_norm_legit.no_stats
    for shape in ((5, 3), (4, 3, 2), (3, 2, 2, 3)):
        value, grad, size = x(*shape), x(*shape, shift=3), shape[1]
        mean, var = x(size, shift=4), positive(size)
        for params in ((x(size, shift=1), x(size, shift=2)), (None, None)):
            yield call(evaluated, value, *params, mean, var, 0.1, 1e-5)
            yield call(functional, value, *params, mean, var, True, 0.1, 1e-5)
            yield call(alone, value, *params, True, 0.1, 1e-5)
            saved = alone(value, *params, True, 0.1, 1e-5)[1:]
            none = (value.new_empty(0), value.new_empty(0))
            given = params[0] is not None
            for mask in ([True, given, given], [not given, given, given]):
                for trains, stats in ((True, saved), (False, none)):
                    yield call(
                        aten.native_batch_norm_backward.default,
                        *(grad, value, params[0], mean, var, *stats, trains, 1e-5, mask),
                    )


def _attention() -> Iterator[Sample]:
    op = aten._scaled_dot_product_flash_attention_for_cpu
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    q, k, v, grad = x(3, 4, 5, 8), x(3, 4, 6, 8), x(3, 4, 6, 8), x(3, 4, 5, 8)
    for mask in (None, x(5, 6), x(3, 1, 5, 6), x(1, 4, 5, 6)):
        yield call(op.default, q, k, v, attn_mask=mask)
        out, lse = op.default(q, k, v, attn_mask=mask)
        yield call(back.default, grad, q, k, v, out, lse, 0.0, False, attn_mask=mask)
    yield call(op.default, q, k[:, :, :5], v[:, :, :5], 0.0, True)
    out, lse = op.default(q, k, v, 0.0, True)
    yield call(back.default, grad, q, k, v, out, lse, 0.0, True)
    for mask in (None, x(3, 4, 5, 6)):
        yield from _attention_on_gpus(grad, q, k, v, mask)
    yield from _attention_on_gpus(grad, q, k[:, :2].contiguous(), v[:, :2].contiguous(), None)


def _attention_on_gpus(*given: Any) -> Iterator[Sample]:
    """In a dtype that those kernels take, whose logsumexp is of it."""
    grad, q, k, v, mask = (None if t is None else t.to(F32) for t in given)
    for causal in (False, True) if mask is None else (False,):
        op, back = (getattr(aten, kernels.FLASH + end).default for end in ("", "_backward"))
        if mask is None:
            yield call(op, q, k, v, 0.0, causal)
            out, lse, *_, seed, offset, _ = op(q, k, v, 0.0, causal)
            given = (grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal)
            yield call(back, *given, seed, offset)
        if q.shape[1] != k.shape[1]:  # heads that are shared are for flash attention alone
            continue
        op, back = (getattr(aten, kernels.EFFICIENT + end).default for end in ("", "_backward"))
        yield call(op, q, k, v, mask, False, 0.0, causal)
        yield call(op, q, k, v, mask, True, 0.0, causal)
        out, *saved = op(q, k, v, mask, True, 0.0, causal)
        asked = [True, True, True, mask is not None]
        yield call(back, grad, q, k, v, mask, out, *saved, 0.0, asked, causal)
        lengths = (None, None, q.shape[2], k.shape[2], 0.0, causal)
        op, back = (getattr(aten, kernels.CUDNN + end).default for end in ("", "_backward"))
        yield call(op, q, k, v, mask, True, 0.0, causal)
        out, lse, *_, seed, offset, _ = op(q, k, v, mask, True, 0.0, causal)
        yield call(back, grad, q, k, v, out, lse, seed, offset, mask, *lengths)
        op, back = (getattr(aten, kernels.OTHER + end).default for end in ("", "_backward"))
        yield call(op, q, k, v, mask, 0.0, causal)
        out, lse, *_, seed, offset, _ = op(q, k, v, mask, 0.0, causal)
        yield call(back, grad, q, k, v, mask, asked, out, lse, *lengths, seed, offset)


def _layers() -> Iterator[Sample]:
    q, width = x(3, 5, 4), 4
    qkv = (x(12, 4, shift=1), x(12, shift=2), x(4, 4, shift=3), x(4, shift=4))
    pads, hidden = index(3, 5, below=2) > 3, index(5, 5, below=5) > 3
    both = hidden.expand(3, 2, 5, 5).contiguous()
    norms = (x(4, shift=1), x(4, shift=2), x(4, shift=3), x(4, shift=4))
    inner = (x(6, 4, shift=1), x(6, shift=2), x(4, 6, shift=3), x(4, shift=4))
    for mask, kind in ((None, None), (hidden, 0), (pads, 1), (both, 2)):
        for more in ((True, True), (False, True), (True, False)):
            yield call(
                aten._native_multi_head_attention.default,
                *(q, q, q, width, 2, *qkv, mask, *more, kind),
            )
        for first in (False, True):
            yield call(
                aten._transformer_encoder_layer_fwd.default,
                *(q, width, 2, *qkv, first, first, 1e-5, *norms, *inner, mask, kind),
            )


def _distances() -> Iterator[Sample]:
    for a, b in ((x(5, 3), x(4, 3, shift=2)), (x(2, 5, 3), x(2, 4, 3, shift=2))):
        yield call(aten._euclidean_dist.default, a, b)
        for p in (0.0, 1.0, 1.5, 2.0, 3.0, float("inf")):
            yield call(aten._cdist_forward.default, a, b, p, None)
            made = aten._cdist_forward.default(a, b, p, None)
            grad = x(*made.shape, shift=4)
            yield call(aten._cdist_backward.default, grad, a, b, p, made)


def _embedding() -> Iterator[Sample]:
    for shape in ((5,), (2, 3), (), (0,), (5, 1)):
        where = index(*shape, below=7)
        for padding in (-1, 3):
            yield call(aten.embedding.default, x(7, 3), where, padding)
            for by_freq in (False, True):
                grad = x(*shape, 3, shift=2)
                yield call(aten.embedding_dense_backward.default, grad, where, 7, padding, by_freq)
    yield call(aten.embedding.default, x(7, 3, dtype=F32), index(5, below=7))


def _losses() -> Iterator[Sample]:
    def each(a: Any, b: Any, grad_of: Any) -> Iterator[Sample]:
        for reduction in (0, 1, 2):
            grad = grad_of(reduction)
            for name in ("mse_loss", "soft_margin_loss"):
                yield call(getattr(aten, name).default, a, b, reduction)
                yield call(getattr(aten, name + "_backward").default, grad, a, b, reduction)
            for name, width in (("smooth_l1_loss", 0.7), ("huber_loss", 0.7)):
                yield call(getattr(aten, name).default, a, b, reduction, width)
                back = getattr(aten, name + "_backward").default
                yield call(back, grad, a, b, reduction, width)
            p, q = a.sigmoid(), (b > 0).to(a.dtype)
            for weight in (None, positive(*a.shape[-1:])):
                yield call(aten.binary_cross_entropy.default, p, q, weight, reduction)
                yield call(
                    aten.binary_cross_entropy_backward.default, grad, p, q, weight, reduction
                )
                for pos in (None, positive(*a.shape[-1:], shift=2)):
                    yield call(
                        aten.binary_cross_entropy_with_logits.default, a, q, weight, pos, reduction
                    )

    for shape in ((5, 3), (7,), (1, 4), (0, 3)):
        a, b = x(*shape), x(*shape, shift=3)
        samples = each(a, b, lambda r, s=shape: x(*s, shift=1) if r == 0 else x(shift=1))
        yield from _unsure(samples)
    yield call(aten.mse_loss.default, x(5, 3), x(3), 1)
    yield call(aten.mse_loss.default, x(5, 3), x(3), 0)


def _nll() -> Iterator[Sample]:
    for shape, names in (((5, 4), "nll_loss"), ((4,), "nll_loss"), ((3, 4, 2, 5), "nll_loss2d")):
        classes = shape[0] if len(shape) == 1 else shape[1]
        target = index(*(shape[:1] + shape[2:] if len(shape) > 1 else ()), below=classes)
        value = x(*shape).log_softmax(0 if len(shape) == 1 else 1)
        for weight in (None, positive(classes)):
            for reduction in (0, 1, 2):
                for ignore in (-100, 1):
                    forward = getattr(aten, names + "_forward").default
                    backward = getattr(aten, names + "_backward").default
                    yield call(forward, value, target, weight, reduction, ignore)
                    out, total = forward(value, target, weight, reduction, ignore)
                    grad = x(*out.shape, shift=2) + 1
                    yield call(backward, grad, value, target, weight, reduction, ignore, total)


def table_samples() -> list[Sample]:
    """All samples of operators in the table."""
    from .loss_samples import loss_samples  # which are made of what is above
    from .matrix_samples import matrix_samples

    parts = (
        _matrix,
        _grouped,
        _scaled,
        _reductions,
        _dimwise,
        _untagged,
        _views,
        _joins,
        _creation,
        _norms,
        _rms_norms,
        _group_norms,
        _batch_norms,
        _attention,
        _layers,
        _distances,
        _embedding,
        _losses,
        _nll,
        loss_samples,
        matrix_samples,
    )
    from .spatial import spatial_samples  # it is made of what stands here

    return [sample for part in (*parts, spatial_samples) for sample in part()]
