"""Attention by its scores, as PyTorch takes it apart where no kernel knows the call: with dropout
on a CPU, or with the gradient of a mask.

Product after product would choose its layouts by itself, and a sum of scores, which may be far more
than all that was given, would be reduced. So all operands are laid out once, for all products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .._torch import run_composite
from ..dispatch.decide import decide
from ..dispatch.operator import register_composite
from ..layout.geometry import contiguous_stride
from ..layout.spec import DTensorSpec, TensorMeta
from ..rules import Along, Call, Dims, Operand, Rule, Scaled
from ..storage.wrapper import Wrapper
from .batched import laid

__all__ = ["attention_by_scores"]

_OP = torch.ops.aten._scaled_dot_product_attention_math.default

Shape = Sequence[int]


def attention_by_scores(*args: Any, **kwargs: Any) -> Any:
    """As PyTorch takes it apart, after its operands were laid out together."""
    given = list(args)
    ours = [at for at, value in enumerate(given[:4]) if isinstance(value, Wrapper)]
    if len({given[at]._spec.topology for at in ours}) == 1:
        shapes = tuple(None if value is None else tuple(value.shape) for value in given[:4])
        specs = tuple(given[at]._spec for at in ours)
        targets = _targets(shapes, tuple(ours), specs, bool(kwargs.get("enable_gqa")))
        moved = laid(_OP, [given[at] for at in ours], targets)
        for at, value in zip(ours, moved, strict=True):
            given[at] = value
    return run_composite(_OP, *given, **kwargs)


@lru_cache(maxsize=1024)
def _targets(
    shapes: tuple[Any, ...], ours: tuple[int, ...], specs: tuple[DTensorSpec, ...], grouped: bool
) -> tuple[DTensorSpec, ...]:
    """The layouts of the operands that are DTensors; as they are where nothing is in shards, or
    where PyTorch has something to say about the shapes."""
    if not any(place.is_shard() for spec in specs for place in spec.placements):
        return specs
    known = _Factors.of(shapes, grouped)
    if known is None:
        return specs
    result = TensorMeta(known.result, contiguous_stride(known.result), specs[0].dtype)
    dims = [known.operand(at, shapes[at]) for at in ours]
    sums = [index for index, at in enumerate(ours) if at == 2]
    rule = Rule(tuple(dims), (known.out(),), known.sizes, linear=tuple((index,) for index in sums))
    call = Call(_OP, [Operand(index) for index in range(len(ours))], {}, specs, (result,))
    return decide(rule, call).inputs


class _Factors:
    """The factors of a call: batches and heads `0`, `1`, ... from the right, `l` queries, `s`
    keys.

    What is summed up for a score is no factor: moving the operands is less than moving scores.
    """

    def __init__(self, lead: Shape, sizes: tuple[int, int, int], shared: int) -> None:
        queries, keys, width = sizes
        self._lead = tuple(lead)
        self._shared = shared
        self.result = (*self._lead, queries, width)
        self.sizes = {str(at): size for at, size in enumerate(reversed(self._lead)) if size > 1}
        if "0" in self.sizes:
            self.sizes["0"] //= shared
        self.sizes |= {"l": queries, "s": keys}

    @staticmethod
    def of(shapes: Sequence[Shape | None], grouped: bool) -> _Factors | None:
        query, key, value, _ = (*shapes, None)[:4]
        if query is None or key is None or value is None or min(map(len, (query, key, value))) < 2:
            return None
        shared = 1
        heads = [tuple(shape[:-2]) for shape in (query, key, value)]
        if grouped:
            if min(map(len, heads)) < 1 or heads[1][-1] != heads[2][-1] or not heads[1][-1]:
                return None
            shared = heads[0][-1] // heads[1][-1]
            heads = [heads[0], *((*lead[:-1], lead[-1] * shared) for lead in heads[1:])]
        try:
            lead = torch.broadcast_shapes(*heads)
        except RuntimeError:
            return None
        fits = query[-1] == key[-1] and key[-2] == value[-2] and 0 not in (*query, *key, *value)
        return _Factors(lead, (query[-2], key[-2], value[-1]), shared) if fits else None

    def out(self) -> Dims:
        return (*self._batches(self._lead), Along("l"), None)

    def operand(self, at: int, shape: Shape) -> Dims:
        """The dims of the query, the key, the value or the mask."""
        if at in (1, 2):
            lead = [*shape[:-2]]
            if lead and self._shared > 1:
                lead[-1] *= self._shared
            return (*self._batches(lead, keys=True), Along("s"), None)
        if at == 0:
            return (*self._batches(shape[:-2]), Along("l"), None)
        last = [Along("l"), Along("s")][-len(shape) :] if shape else []
        places = [
            along if size == self.sizes[along.factor] else None
            for along, size in zip(last, shape[-len(last) :] if last else (), strict=True)
        ]
        return (*self._batches(shape[:-2]), *places)

    def _batches(self, shape: Shape, keys: bool = False) -> Dims:
        """Dims of batches and heads; one that is repeated for all stays whole."""
        found: list[Along | None] = []
        for at, (size, full) in enumerate(zip(reversed(shape), reversed(self._lead), strict=False)):
            link = Scaled(self._shared) if at == 0 and self._shared > 1 and not keys else None
            along = str(at) in self.sizes and size == full
            found.append(Along(str(at), link) if along else None)
        return tuple(reversed(found))


register_composite(_OP, attention_by_scores)
