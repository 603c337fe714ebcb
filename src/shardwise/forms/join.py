"""cat along a sharded dim: only the elements that change owner move.

Where the joined dim is whole, the rule `cat` in `rules/slices.py` serves the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch.fallback import laid_out
from ..dispatch.operator import register_form
from ..layout.geometry import Cuts, Interval, intervals
from ..layout.layout import DimMap
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute.execute import in_order
from ..rules import Call
from ..storage.halo import fetch_all
from ..storage.ragged import move_to
from ..storage.wrapper import Wrapper, wrap

aten = torch.ops.aten


def _cost(call: Call) -> tuple[()] | None:
    ndim = len(call.results[0].shape)
    dim = call.get("dim", 0) % ndim
    return () if any(s.ndim == ndim and s.dim_axes[dim] for s in call.specs) else None


@register_form("cat", cost=_cost)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """The result is sharded along the joined dim, cut as `torch.chunk` would."""
    op = aten.cat.default
    mesh = next(x._spec.topology for x in tensors if isinstance(x, Wrapper))
    given = [x if isinstance(x, Wrapper) else laid_out(x, mesh) for x in tensors]
    example = op(
        [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given], dim
    )
    dim %= example.ndim
    given = [x for x in given if x.ndim == example.ndim]  # PyTorch skips tensors of shape [0]
    out = _joined_spec([x._spec for x in given], example)
    ready = [_reduced_into(op, x, out) for x in given]
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


def _joined_spec(specs: Sequence[DTensorSpec], example: torch.Tensor) -> DTensorSpec:
    """The layout of the result: on each axis the Shard that most bytes have; dims that are not
    joined keep the cuts of the largest operand that is sharded alike."""
    sizes = {spec: spec.shape.numel() * spec.dtype.itemsize for spec in specs}
    places: list[Placement] = []
    for axis in range(specs[0].topology.ndim):
        weights: dict[Placement, int] = {}
        for spec in specs:
            place = spec.placements[axis]
            if isinstance(place, Shard):
                weights[place] = weights.get(place, 0) + sizes[spec]
        places.append(max(weights, key=weights.__getitem__) if weights else Replicate())
    even = DTensorSpec(specs[0].topology, places, TensorMeta.of(example))
    cuts: list[Cuts | None] = []
    for d in range(even.ndim):
        alike = [
            spec
            for spec in sorted(specs, key=lambda spec: -sizes[spec])
            if spec.dim_axes[d] == even.dim_axes[d] != () and spec.shape[d] == even.shape[d]
        ]
        cuts.append(alike[0].dim_cuts[d] if alike else None)
    return even.with_placements(places, cuts)


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


def _reduced_into(op: Any, x: Any, out: DTensorSpec) -> Any:
    """`x` with its Partial placements reduced: scattered where `out` is sharded."""
    spec = x._spec
    places, cuts = list(spec.placements), list(spec.cuts or (None,) * spec.ndim)
    for axis in spec.sums:
        there = places[axis] = out.placements[axis]
        if isinstance(there, Shard):
            cuts[there.dim] = None
    return move_to(op, x, spec.with_placements(places, cuts))
