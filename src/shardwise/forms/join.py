"""cat along a sharded dim: only the elements that change owner move.

Where the joined dim is whole, the rule `cat` in `rules/slices.py` serves the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch.fallback import laid_out
from ..dispatch.infer import meta_of
from ..dispatch.operator import register_form
from ..layout.geometry import Interval, intervals
from ..layout.layout import DimMap
from ..layout.spec import DTensorSpec
from ..redistribute import in_order
from ..rules import Call
from ..storage.halo import fetch_all
from ..storage.ragged import reduce_partial
from ..storage.wrapper import Wrapper, wrap

aten = torch.ops.aten


def _cost(call: Call) -> tuple[()] | None:
    ndim = len(call.results[0].shape)
    dim = call.get("dim", 0) % ndim
    return () if any(s.ndim == ndim and s.dim_axes[dim] for s in call.specs) else None


@register_form("cat", cost=_cost)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """The operands one after another, in the layout of the largest of them."""
    op = aten.cat.default
    mesh = next(x._spec.topology for x in tensors if isinstance(x, Wrapper))
    given = [x if isinstance(x, Wrapper) else laid_out(x, mesh) for x in tensors]
    example = op(
        [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given], dim
    )
    dim %= example.ndim
    given = [x for x in given if x.ndim == example.ndim]  # PyTorch skips tensors of shape [0]
    out = _joined_spec([x._spec for x in given], dim, example)
    ready = [reduce_partial(op, x) for x in given]
    places = intervals(x.shape[dim] for x in given)
    wanted = [
        (x._spec, x._locals, _windows(out, dim, place))
        for x, place in zip(ready, places, strict=True)
    ]
    made = [
        torch.cat([part.to(out.dtype) for part in parts], dim)
        for parts in zip(*fetch_all(op, wanted), strict=True)
    ]
    return wrap(out, in_order(made, out.stride))


def _joined_spec(specs: Sequence[DTensorSpec], dim: int, example: torch.Tensor) -> DTensorSpec:
    """The layout of the result: that of the largest operand, cut evenly along the joined dim."""
    like = max(specs, key=lambda spec: spec.shape.numel() * spec.dtype.itemsize).reduced
    kept = [None if d == dim else own for d, own in enumerate(like.cuts or [None] * like.ndim)]
    return DTensorSpec(like.topology, like.placements, meta_of(example), cuts=kept)


def _windows(out: DTensorSpec, dim: int, place: Interval) -> dict[int, DimMap]:
    """The part that each rank needs of the operand at `place` of the joined dim."""
    first, size = place[0], place[1] - place[0]
    dims = {d: DimMap(out.dim_axes[d], intervals(out.dim_cuts[d])) for d in range(out.ndim)}
    windows = [
        (min(max(start - first, 0), size), min(max(stop - first, 0), size))
        for start, stop in dims[dim].table
    ]
    dims[dim] = DimMap(out.dim_axes[dim], tuple(windows))
    return dims
