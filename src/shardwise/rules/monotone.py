"""Where pending maxima and minima pass: through functions that keep the order, or turn it around.

NaN wins over any maximum and minimum, so it has to be NaN afterwards, too; and a part that stands
for nothing holds an infinity, or the last of the integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch

from .call import Call, Operand, has_fractions, is_finite, is_wider, seen, stored
from .rule import Passes

__all__ = ["breaks_sums", "monotone"]

_UP = (
    *("relu", "relu6", "hardtanh", "hardsigmoid", "clamp", "clamp_min", "clamp_max"),
    *("sigmoid", "tanh", "atan", "erf", "special_log_ndtr"),
    *("exp", "exp2", "expm1", "asinh", "sinh", "cbrt", "deg2rad", "rad2deg"),
    *("ceil", "floor", "round", "trunc"),
    *("softplus", "leaky_relu", "elu", "celu", "selu", "softshrink", "hardshrink"),
)
_UP_FROM = ("sqrt", "log", "log2", "log10", "log1p", "acosh")
"""Defined for large numbers only: below there is NaN, which would win over the maximum."""
_DOWN = ("neg", "negative", "erfc", "special_erfcx")
_OF_INTEGERS = {
    "sign": 1,
    "sgn": 1,
    "signbit": -1,
    "bitwise_not": -1,
    "erfc": -1,
    "special_erfcx": -1,
}
"""Functions of integers: some would not be NaN where their operand is, but among these there is
none."""
_COMPARED = {"gt": 1, "ge": 1, "lt": -1, "le": -1}
"""Whether a comparison comes true as its first operand rises."""
_ASKED = {
    "isnan": (("max", "max"), ("min", "max")),
    "isneginf": (("max", "min"),),
    "isposinf": (("min", "min"),),
}
_JOINT = {"maximum": "max", "minimum": "min"}
_TRUTHS = {"logical_or": "max", "bitwise_or": "max", "logical_and": "min", "bitwise_and": "min"}
_BOTH = ("max", "min")
_BESIDE: dict[str, dict[int, tuple[str, ...]]] = {
    "clamp": {0: _BOTH, 1: _BOTH, 2: _BOTH},
    **{n: {0: _BOTH, 1: _BOTH} for n in ("clamp_min", "clamp_max", "logaddexp", "logaddexp2")},
    "fmax": {0: ("min",), 1: ("min",)},
    "fmin": {0: ("max",), 1: ("max",)},
}
"""Functions that rise in these operands, whatever tensors the others are: `fmax` leaves NaN out,
which a minimum does not notice, for what it is compared with is less than all others."""
_RISING: Passes = (((0,), "max", "max"), ((0,), "min", "min"))
_FALLING: Passes = (((0,), "max", "min"), ((0,), "min", "max"))


def breaks_sums(name: str, args: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether a number turns the finite parts of a sum of `dtype` into infinities of both signs."""
    numbers = [
        v for v in args if isinstance(v, (int, float, complex)) and not isinstance(v, Operand)
    ]
    if name in ("div", "true_divide"):  # some kernels multiply by the reciprocal
        numbers += [1 / value if value else inf for value in numbers]
    return not all(is_finite(value, dtype) for value in numbers)


def monotone(call: Call, name: str) -> Passes:
    """Pending maxima and minima through a pointwise call."""
    if len(call.specs) == 1 and not any(isinstance(v, Operand) for v in call.args[1:]):
        return _of_one(call, name)
    if len(call.specs) == 2:
        truths = all(spec.dtype is torch.bool for spec in call.specs)
        kind = _JOINT.get(name) or (_TRUTHS.get(name) if truths else None)
        if kind is not None:
            return _joint(call, kind)
    return _compared(call, name) if name in _COMPARED else _beside(call, name)


def _of_one(call: Call, name: str) -> Passes:
    """A function of one tensor, and of numbers."""
    if name in _UP_FROM:
        return (((0,), "min", "min"),)
    if name in _ASKED:
        return tuple([((0,), op, result) for op, result in _ASKED[name]])
    if name in _COMPARED:
        return _compared(call, name)
    slope = 1 if name in _UP and not _may_turn(call, name) else _slope(call, name)
    return _RISING if slope > 0 else _FALLING if slope < 0 else ()


def _joint(call: Call, kind: str) -> Passes:
    """Pending values through a maximum or minimum of two, which `kind` names.

    A 0-d operand may be cast to fewer bits, where order is lost, and with it what stands for no
    number: it is reduced before.
    """
    out, other = call.results[0].dtype, "min" if kind == "max" else "max"
    fit = [i for i in (0, 1) if is_wider(call.specs[i].dtype, out)]
    if len(fit) == 2:
        return ((0, 1), kind, kind), ((0,), other, other), ((1,), other, other)
    return tuple([((i,), op, op) for i in fit for op in (kind, other)])


def _compared(call: Call, name: str) -> Passes:
    """Comparisons, with numbers or tensors. With NaN they are false: so they are where all parts
    have to be true, but not where one suffices, as among integers. As in `_joint`, a 0-d operand
    may be cast to fewer bits."""
    whole = not any(has_fractions(spec.dtype) for spec in call.specs)
    passes = []
    for i, spec in enumerate(call.specs):
        fits = spec.ndim == len(call.results[0].shape) or spec.dtype is call.specs[1 - i].dtype
        if fits and stored(spec.meta) >= stored(call.results[0]):
            few, many = _BOTH if _COMPARED[name] * (1 - 2 * i) < 0 else _BOTH[::-1]
            passes += [((i,), few, "min"), *([((i,), many, "max")] if whole else [])]
    return tuple(passes)


def _beside(call: Call, name: str) -> Passes:
    """A function that rises in one of several tensors, which the others do not broadcast."""
    out, rising = call.results[0], _BESIDE.get(name, {})
    return tuple(
        ((i,), op, op)
        for i, spec in enumerate(call.specs)
        for op in rising.get(i, ())
        if spec.dtype is out.dtype and stored(spec.meta) >= stored(out)
    )


def _slope(call: Call, name: str) -> int:
    """1 if a function of a tensor and numbers is monotone up, -1 if down, 0 if neither is known.

    Integers wrap around. An infinite number would meet the infinities that stand for nothing.
    """
    src, dst = call.specs[0].dtype, call.results[0].dtype
    if name == "_to_copy":
        return _slope_of_cast(src, dst)
    if not call.args or not isinstance(call.args[0], Operand):
        return 0
    if name in _OF_INTEGERS and not has_fractions(src):
        return _OF_INTEGERS[name]
    if name == "logical_not":
        return -1 if src is torch.bool else 0
    numbers = [v for v in call.values.values() if isinstance(v, (int, float, complex))]
    if not (src.is_floating_point and dst.is_floating_point) or breaks_sums(name, numbers, dst):
        return 0
    if name in _DOWN:
        return -1
    if name in ("add", "sub"):
        return 1
    if name == "rsub":
        return _sign(seen(-call.get("alpha", 1), dst))
    if name in ("mul", "div", "true_divide") and call.get("rounding_mode") is None:
        return _sign(seen(call.args[1], dst) if len(call.args) > 1 else 0)
    return 0


def _slope_of_cast(src: torch.dtype, dst: torch.dtype) -> int:
    """A float of 8 bits has no infinity: what is too large for it is NaN. PyTorch cannot reduce
    integers of 64 bits without a sign."""
    if src.is_complex or dst.is_complex or dst is torch.uint64:
        return 0
    if dst.is_floating_point:
        return int(dst.itemsize > 1)
    return int(not has_fractions(src) and is_wider(src, dst))


def _sign(number: Any) -> int:
    return 0 if isinstance(number, complex) else (number > 0) - (number < 0)


def _may_turn(call: Call, name: str) -> bool:
    """Whether an argument of a monotone function may turn it around, or break it."""
    if name in ("leaky_relu", "elu", "celu"):
        dtype = call.results[0].dtype
        own = [seen(number, dtype) for number in call.args[1:]]
        return any(_sign(number) <= 0 or number - number != 0 for number in own)
    return name == "softplus" and len(call.args) > 1
