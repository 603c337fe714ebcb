"""Muon's iteration: it runs on whole matrices.

`torch.optim.Muon` makes a gradient orthogonal by a few steps of products in bfloat16. They amplify
what is rounded: with sums in another order the result is another, by 1 to 3 %. So the matrix is
gathered before the first product, in bfloat16, and every rank has what one device has. To reduce
the products of every step would take more bytes, unless one side is about ten times the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._torch import OpOverload
from .caller import caller
from .plans import Plan, filled, tensors_in
from .ragged import laid
from .spec import default_placements
from .wrapper import Wrapper

__all__ = ["WholePlan", "may_iterate"]

_aten = torch.ops.aten


def may_iterate(op: OpOverload, operands: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call on matrices that are not whole may be one of the iteration's."""
    metas = [operand._spec.meta for operand in operands]
    if op is _aten._to_copy.default:
        fits = kwargs.get("dtype") is torch.bfloat16
    elif any(meta.dtype is not torch.bfloat16 for meta in metas):
        return False
    elif op is _aten.mm.default:
        fits = metas[0].shape == metas[1].shape[::-1]
    elif op is _aten.addmm.default:
        fits = metas[0].shape == metas[2].shape
    else:
        fits = op is _aten.linalg_vector_norm.default
    return (
        fits
        and all(len(meta.shape) == 2 for meta in metas)
        and not all(operand._spec.is_replicated() for operand in operands)
    )


class WholePlan(Plan):
    """The plan of a call that runs on whole matrices when Muon makes it."""

    __slots__ = ("_op", "_plan")

    def __init__(self, op: OpOverload, plan: Plan) -> None:
        super().__init__(plan.tier)
        self._op = op
        self._plan = plan
        if plan.quick is not None:
            self.quick = self._run_quick

    def run(self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._run(self._plan.run, operands, args, kwargs)

    def _run_quick(
        self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        assert self._plan.quick is not None
        return self._run(self._plan.quick, operands, args, kwargs)

    def _run(
        self,
        as_it_is: Callable[..., Any],
        operands: Sequence[Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        if caller() != "torch.optim._muon":
            return as_it_is(operands, args, kwargs)
        if self._op is _aten._to_copy.default and not operands[0]._spec.sums:
            return self._whole(as_it_is(operands, args, kwargs))  # half as many bytes as before
        given, named = filled(args, kwargs, map(self._whole, tensors_in(args, kwargs)))
        return self._op(*given, **named)

    def _whole(self, tensor: Any) -> Any:
        if not isinstance(tensor, Wrapper):
            return tensor
        spec = tensor._spec
        return laid(self._op, tensor, spec.with_placements(default_placements(spec.topology)))
