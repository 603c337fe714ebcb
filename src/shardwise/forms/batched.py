"""What layers over sequences read, laid out once, and a call for each shard of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import MeshError
from ..layout.geometry import Cuts, contiguous_stride
from ..layout.placement import Partial, Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..storage import policy
from ..storage.match_meta import in_memory_order
from ..storage.operands import describe_moves
from ..storage.wrapper import Wrapper, wrap
from ..tensor.autograd import Redistribute, as_gradient, redistributed

__all__ = ["laid", "on_one_mesh", "on_shards"]


# --- local tensors and their gradients -------------------------------------------------------


class _Parts(torch.autograd.Function):
    """The local tensors of a DTensor, one for each coordinate over which its gradient varies."""

    @staticmethod
    def forward(ctx: Any, value: Any, grad_spec: DTensorSpec) -> Any:
        ctx.set_materialize_grads(False)
        ctx.spec = grad_spec
        here = value._locals
        found = [here[value._spec.slot(coord)] for coord in grad_spec.slots]
        return tuple(part.view_as(part) for part in found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        known = next((grad for grad in grads if grad is not None), None)
        if known is None:
            return None, None
        spec: DTensorSpec = ctx.spec
        parts = [
            known.new_zeros(spec.local_shape(coord)) if grad is None else grad
            for coord, grad in zip(spec.slots, grads, strict=True)
        ]
        return _Joined.apply(spec, (), False, *parts), None


class _Joined(torch.autograd.Function):
    """A DTensor of local tensors: shards, or shares in a sum.

    Their graphs read what is in `read`, and this itself if `is_read`, but do not see the writes
    that the dispatcher makes.
    """

    @staticmethod
    def forward(
        ctx: Any, spec: DTensorSpec, read: Sequence[Any], is_read: bool, *parts: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.count = spec, len(parts)
        made = wrap(spec, tuple(in_memory_order(spec, part.view_as(part)) for part in parts))
        ctx.save_for_backward(*read, *([made] if is_read else []))
        return made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.saved_tensors  # noqa: B018  # raises if one was written into
        spec: DTensorSpec = ctx.spec
        if grad is None:
            return None, None, None, *[None] * ctx.count
        grad = as_gradient(grad, spec.topology)
        places = [Replicate() if place.is_partial() else place for place in spec.placements]
        back = spec.with_meta(grad._spec.meta)
        settled = redistributed(grad, back.with_placements(places, spec.cuts))
        return None, None, None, *_Parts.apply(settled, back)


# --- layouts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The axes that shard the batch of a call, and where they cut it."""

    size: int
    axes: tuple[int, ...]
    cuts: Cuts | None

    @staticmethod
    def of(held: Sequence[tuple[Any, int]]) -> Batch:
        """The batch of tensors that have it at these dims, the input first."""
        (x, dim), *_ = held
        specs = [(value._spec.consecutive, at) for value, at in held]
        # Time and channels are needed whole: their shards go to the batch, if it has enough.
        axes = tuple(
            axis
            for axis, count in enumerate(x._spec.topology.shape)
            if any(spec.placements[axis].is_shard(at) for spec, at in specs)
            or (specs[0][0].placements[axis].is_shard() and x.shape[dim] >= count)
        )
        alike = (spec.dim_cuts[at] for spec, at in specs if axes and spec.dim_axes[at] == axes)
        return Batch(x.shape[dim], axes, next(alike, None))

    def spec(self, like: DTensorSpec, dim: int, meta: TensorMeta | None = None) -> DTensorSpec:
        """The layout of a tensor that has the batch at `dim`."""
        meta = like.meta if meta is None else meta
        places = self._places(like, Shard(dim))
        cuts = [self.cuts if d == dim else None for d in range(len(meta.shape))]
        return DTensorSpec(like.topology, places, meta, cuts=cuts if self.cuts else None)

    def shares(self, like: DTensorSpec) -> DTensorSpec:
        """The layout of the gradient of a tensor that every sequence reads."""
        return like.with_placements(self._places(like, Partial()))

    def _places(self, like: DTensorSpec, place: Placement) -> list[Placement]:
        return [place if a in self.axes else Replicate() for a in range(like.topology.ndim)]


def undivided(value: Any) -> DTensorSpec:
    """The layout in which each rank has all of a tensor."""
    spec: DTensorSpec = value._spec
    return spec.with_placements(default_placements(spec.topology))


def _entered(op: Any, value: Any, example: Any) -> Any:
    """A plain tensor as a DTensor, as the policy on plain tensors allows; its gradient is plain."""
    if value is None or isinstance(value, Wrapper):
        return value
    policy.on_plain(op, tuple(value.shape))
    return value * example.new_ones((), dtype=value.dtype)


def laid(op: Any, values: Sequence[Any], targets: Sequence[DTensorSpec]) -> list[Any]:
    """DTensors in other layouts, in few collectives and as the policy on communication allows."""
    specs = [value._spec for value in values]
    moves = [(i, t) for i, (t, s) in enumerate(zip(targets, specs, strict=True)) if t is not s]
    made = list(values)
    if not moves:
        return made
    if not policy.current().silent and (texts := describe_moves(moves, specs)):
        policy.on_moves(op, texts)
    moved = Redistribute.apply([t for _, t in moves], False, None, *[made[i] for i, _ in moves])
    for (index, _), value in zip(moves, moved, strict=True):
        made[index] = value
    return made


def on_shards(
    op: Any,
    run: Callable[..., Sequence[torch.Tensor]],
    batched: Sequence[tuple[Any, int]],
    weights: Sequence[Any],
    results: Sequence[tuple[int, Sequence[int]]],
    reads: bool = False,
) -> list[Any]:
    """`run(batched, weights, interval)` for each shard of the batch.

    `batched` are tensors and where they have the batch; `results` say where the results have it,
    and their dims in the order in which they lie in memory; `reads` if gradients need the first.
    """
    batch = Batch.of(batched)
    ours = [weight for weight in weights if weight is not None]
    moved = laid(
        op,
        [*(value for value, _ in batched), *ours],
        [*(batch.spec(value._spec, dim) for value, dim in batched), *map(undivided, ours)],
    )
    like: DTensorSpec = moved[0]._spec
    count = len(batched)
    parts = [_Parts.apply(value, value._spec) for value in moved[:count]]
    given = iter([_Parts.apply(value, batch.shares(value._spec)) for value in moved[count:]])
    shares = [None if weight is None else next(given) for weight in weights]
    dim = batched[0][1]
    coords = like.topology.coords_here(batch.axes)
    if not coords:
        raise MeshError(f"{op}: this rank is not in mesh {like.topology}, so it cannot take part.")
    made = []
    for slot, coord in enumerate(coords):
        own = [part[slot] for part in parts]
        rest = [None if share is None else share[slot] for share in shares]
        piece = like.box(coord)[dim]
        if piece[0] < piece[1]:
            made.append(run(own, rest, piece))
            continue
        # PyTorch wants a batch, and autograd a way to every operand, on each rank alike.
        one = [
            torch.cat([part, part.new_zeros([*part.shape[:at], 1, *part.shape[at + 1 :]])], at)
            for part, (_, at) in zip(own, batched, strict=True)
        ]
        found = run(one, rest, (piece[0], piece[0] + 1))
        made.append([r.narrow(at, 0, 0) for r, (at, _) in zip(found, results, strict=True)])
    return [
        _Joined.apply(
            _made(batch, like, at, order, made[0][index]),
            moved,
            reads and index == 0,
            *(row[index] for row in made),
        )
        for index, (at, order) in enumerate(results)
    ]


def _made(
    batch: Batch, like: DTensorSpec, dim: int, order: Sequence[int], part: torch.Tensor
) -> DTensorSpec:
    """The layout of a result, with the strides that one device would give it."""
    shape = list(part.shape)
    if batch.axes:
        shape[dim] = batch.size
    steps = contiguous_stride([shape[at] for at in order])
    stride = tuple(steps[order.index(at)] for at in range(len(shape)))
    return batch.spec(like, dim, TensorMeta(tuple(shape), stride, part.dtype))


def on_one_mesh(op: Any, x: Any, states: Sequence[Any], weights: Sequence[Any]) -> Any:
    """All operands as DTensors; None if they are on several meshes, or on none."""
    given = [value for value in (x, *states, *weights) if isinstance(value, Wrapper)]
    if len({value._spec.topology for value in given}) != 1:
        return None
    x, *states = (_entered(op, value, given[0]) for value in (x, *states))
    return x, states, [_entered(op, weight, given[0]) for weight in weights]
