"""Results whose size depends on values: pieces of unknown size, and how all ranks learn the sizes.

Each rank finds its own piece. An exchange of counts makes the pieces one tensor with ragged cuts.
By default that is then replicated, so that it goes with any other operand.

`move_to`, `reduce_partial` and `gather_plain` are the moves of forms, random operators and the
fallback. The policy on implicit communication decides whether they may happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from ..errors import MeshError
from ..layout.geometry import Cuts, contiguous_stride
from ..layout.mesh import Topology
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from . import policy
from .operands import describe_moves, in_layout
from .plain import adopt
from .wrapper import Wrapper, wrap


def move_to(op: object, x: Any, spec: DTensorSpec) -> Any:
    """A DTensor in another layout, as the policy on implicit communication allows."""
    if x._spec is spec:
        return x
    if policy.current().moves != "auto":
        policy.on_moves(op, describe_moves([(0, spec)], [x._spec]))
    return wrap(spec, in_layout(x, spec))


def reduce_partial(op: object, x: Any) -> Any:
    """A DTensor with Replicate on the axes on which it was Partial."""
    return move_to(op, x, x._spec.reduced)


def gather_plain(op: object, x: Any) -> torch.Tensor:
    """A tensor as a plain one, the same on every rank."""
    if isinstance(x, Wrapper):
        x = move_to(op, x, x._spec.whole)._locals[0]
    return x  # type: ignore[no-any-return]


def as_dtensor(value: Any, topology: Topology) -> Any:
    """A plain tensor among DTensors as one of them."""
    if isinstance(value, Wrapper):
        return value
    adopted = adopt(value, topology)
    return wrap(adopted._spec, adopted._locals)


def joined(
    op: object,
    topology: Topology,
    places: Sequence[Placement],
    parts: Sequence[torch.Tensor],
    rest: Sequence[int] = (),
    rest_cuts: Sequence[Cuts | None] | None = None,
    stride: Callable[[int], Sequence[int]] | None = None,
) -> Any:
    """Pieces of unknown size as one DTensor, cut on dim 0 where they meet.

    `places` shard dim 0, and maybe the dims after it, which have the global sizes `rest` and the
    cuts `rest_cuts`. `parts` are the local tensors held here. `stride` gives the strides of the
    whole from the size of dim 0, if it is not contiguous.
    """
    if not parts:
        raise MeshError(f"{op}: this rank is not in mesh {topology}, so it cannot take part.")
    axes = [axis for axis, place in enumerate(places) if place.is_shard(0)]
    spots = topology.coords_here([a for a, place in enumerate(places) if place.is_shard()])
    # Pieces that differ only in the dims after the first have the same size.
    own = {tuple(c[a] for a in axes): p.shape[0] for c, p in zip(spots, parts, strict=True)}
    rows = [Shard(0) if axis in axes else Replicate() for axis in range(topology.ndim)]
    total = prod([topology.shape[axis] for axis in axes])
    each = DTensorSpec(topology, rows, TensorMeta((total,), (1,), torch.int64))
    counts = [own[tuple(coord[axis] for axis in axes)] for coord in each.slots]
    local = tuple(torch.tensor([count], device=topology.device_type) for count in counts)
    cuts = gather_plain(op, wrap(each, local)).tolist()
    shape = (sum(cuts), *rest)
    steps = contiguous_stride(shape) if stride is None else tuple(stride(shape[0]))
    meta = TensorMeta(shape, steps, parts[0].dtype)
    own_cuts = [cuts, *(rest_cuts if rest_cuts is not None else [None] * len(rest))]
    spec = DTensorSpec(topology, places, meta, cuts=own_cuts)
    return wrap(spec, tuple(parts))
