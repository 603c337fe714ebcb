"""A call as a rule sees it: the operator, its operands' specs, its other arguments, its results'
metas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float
from math import prod
from typing import Any

import torch

from .._torch import OpOverload
from ..layout.spec import DTensorSpec, TensorMeta
from .rule import Rule

__all__ = [
    "LEAST",
    "MOST",
    "Call",
    "Family",
    "Operand",
    "has_fractions",
    "is_finite",
    "is_plain",
    "is_wider",
    "keeps_sums",
    "seen",
    "stored",
    "together",
    "wraps_alike",
]


LEAST, MOST = 1e-38, 1e38
"""Numbers between these have reciprocals, and are neither infinite nor zero in any dtype."""


class Operand(int):
    """Stands in for a tensor among the arguments: its index among the operands."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"operand {int(self)}"


def has_fractions(dtype: torch.dtype) -> bool:
    """Whether values of `dtype` can be averaged: the average of integers drops what is over."""
    return dtype.is_floating_point or dtype.is_complex


def keeps_sums(src: torch.dtype, dst: torch.dtype) -> bool:
    """Whether a sum may be pending while values go from `src` to `dst`.

    Truth values saturate, integers are exact and wrap around, which floats are not and do not, a
    cast to integers drops fractions, and one to a narrower float may overflow where the sum does
    not.
    """
    if src is dst:
        return src is not torch.bool
    return has_fractions(src) and has_fractions(dst) and is_wider(src, dst)


def is_wider(src: torch.dtype, dst: torch.dtype) -> bool:
    """Whether `dst` holds all values of `src`: PyTorch promotes no float of 8 bits, and integers
    without a sign to few others."""
    if src is dst:
        return True
    if torch.bool not in (src, dst) and not has_fractions(src) and not has_fractions(dst):
        own, wide = torch.iinfo(src), torch.iinfo(dst)
        return wide.min <= own.min and own.max <= wide.max
    if dst.is_floating_point and dst.itemsize == 1:
        return False
    if src.is_floating_point and src.itemsize == 1:
        return has_fractions(dst)
    return torch.promote_types(src, dst) is dst


def wraps_alike(src: torch.dtype, dst: torch.dtype) -> bool:
    """Whether integers may be added or multiplied after a cast to no more bits as well as before.
    PyTorch cannot reduce those of 64 bits without a sign."""
    whole = not any(has_fractions(dtype) or dtype is torch.bool for dtype in (src, dst))
    return whole and dst.itemsize <= src.itemsize and dst is not torch.uint64


def seen(number: Any, dtype: torch.dtype) -> Any:
    """A number as kernels of `dtype` see it: in single precision, which they have for less, 1e39 is
    infinite and 1e-60 is zero."""
    if dtype in (torch.float64, torch.complex128) or not isinstance(number, (float, complex)):
        return number
    if isinstance(number, complex):
        return complex(c_float(number.real).value, c_float(number.imag).value)
    return c_float(number).value


def is_finite(number: Any, dtype: torch.dtype) -> bool:
    """Whether kernels of `dtype` see a number that is neither infinite nor NaN."""
    own = seen(number, dtype)
    return bool(own - own == 0)


def is_plain(number: Any, dtype: torch.dtype) -> bool:
    """Whether a number stays what it is when a rank has it and others have what changes nothing: an
    infinite one of complex `dtype` is NaN after a product with 1, or a division."""
    return not dtype.is_complex or is_finite(number, dtype)


def stored(meta: TensorMeta) -> int:
    """How many elements a tensor has in memory: what it repeats, as `expand` does, never moves."""
    return prod(n for n, stride in zip(meta.shape, meta.stride, strict=True) if stride)


class Call:
    """An operator call with its tensors replaced by specs.

    `structure` says how the results are returned: one alone, or which is in each place of a tuple.
    `laid` is how the operands really lie: `specs` has consecutive pieces of every sharded dim.
    """

    __slots__ = ("args", "kwargs", "laid", "op", "results", "specs", "structure", "values")

    def __init__(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        specs: Sequence[DTensorSpec],
        results: Sequence[TensorMeta],
        structure: Any = 0,
    ) -> None:
        self.op = op
        self.args = tuple(args)
        self.kwargs = kwargs
        self.laid = tuple(specs)
        self.specs = tuple([spec.consecutive for spec in specs])
        self.results = tuple(results)
        self.structure = structure
        self.values = self._bound()

    def _bound(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index, argument in enumerate(self.op._schema.arguments):
            if index < len(self.args):
                values[argument.name] = self.args[index]
            elif argument.name in self.kwargs:
                values[argument.name] = self.kwargs[argument.name]
            else:
                values[argument.name] = argument.default_value
        return values

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by name, with the operator's default if it was not given."""
        return self.values.get(name, default)

    def position(self, name: str) -> int:
        """Where an argument stands in the operator's signature."""
        names = [argument.name for argument in self.op._schema.arguments]
        return names.index(name)

    def shape(self, operand: int) -> tuple[int, ...]:
        """The global shape of an operand."""
        return self.specs[operand].meta.shape

    def present(self) -> list[int]:
        """Which of the operator's tensor arguments were given, by their index among them."""
        tensors = [a.name for a in self.op._schema.arguments if "Tensor" in str(a.type)]
        return [i for i, name in enumerate(tensors) if isinstance(self.values[name], Operand)]

    @property
    def name(self) -> str:
        return str(self.op)


def together(call: Call, operands: Sequence[int] | None = None) -> dict[str, Any]:
    """The traits of a call that joins elements of its operands: a sum passes if it is pending in
    all of them and no dtype is in the way."""
    every = tuple(range(len(call.specs)) if operands is None else operands)
    dst = call.results[0].dtype
    dtypes = [call.specs[index].dtype for index in every]
    same = all(dtype is dst for dtype in dtypes)
    return {
        "linear": (every,) if same or all(keeps_sums(dtype, dst) for dtype in dtypes) else (),
        "averages": same or all(map(has_fractions, dtypes)),
    }


Family = Callable[[Call], Rule]
"""From a call to its rule."""
