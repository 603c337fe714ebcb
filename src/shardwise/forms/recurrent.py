"""Recurrent networks: every sequence of a batch is apart, so each shard of it runs by itself.

PyTorch takes a layer apart into one small call after another, many of them in place, and its first
state is often a plain tensor that the module made. So all that it reads is laid out once, and each
rank gives its sequences to PyTorch's own layer, whose autograd then is that of plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import policy
from .._torch import run_composite
from ..autograd import Redistribute, redistributed
from ..entry import register_composite
from ..errors import MeshError
from ..geometry import Cuts, contiguous_stride
from ..moving import describe_moves
from ..placement import Partial, Placement, Replicate, Shard
from ..spec import DTensorSpec, TensorMeta, default_placements
from ..wrapper import Wrapper, wrap

__all__ = ["drops", "laid", "layer_by_layer", "on_one_mesh", "on_shards"]

aten = torch.ops.aten


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
        return _Joined.apply(spec, *parts), None


class _Joined(torch.autograd.Function):
    """A DTensor of local tensors: shards, or shares in a sum."""

    @staticmethod
    def forward(ctx: Any, spec: DTensorSpec, *parts: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.count = spec, len(parts)
        return wrap(spec, tuple(part.view_as(part) for part in parts))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        spec: DTensorSpec = ctx.spec
        if grad is None:
            return None, *[None] * ctx.count
        places = [Replicate() if place.is_partial() else place for place in spec.placements]
        back = spec.with_meta(grad._spec.meta)
        settled = redistributed(grad, back.with_placements(places, spec.cuts))
        return None, *_Parts.apply(settled, back)


# --- layouts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """The axes that shard the batch of a call, and where they cut it."""

    size: int
    axes: tuple[int, ...]
    cuts: Cuts | None

    @staticmethod
    def of(held: Sequence[tuple[Any, int]]) -> _Batch:
        """That of tensors with the batch at these dims, the input first."""
        (x, dim), *_ = held
        specs = [(value._spec.straight, at) for value, at in held]
        # Time and channels are needed whole: their shards go to the batch, if it has enough.
        axes = tuple(
            axis
            for axis, count in enumerate(x._spec.topology.shape)
            if any(spec.placements[axis].is_shard(at) for spec, at in specs)
            or (specs[0][0].placements[axis].is_shard() and x.shape[dim] >= count)
        )
        alike = (spec.dim_cuts[at] for spec, at in specs if axes and spec.dim_axes[at] == axes)
        return _Batch(x.shape[dim], axes, next(alike, None))

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


def _whole(value: Any) -> DTensorSpec:
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
    if not moves:
        return list(values)
    if not policy.current().silent and (texts := describe_moves(moves, specs)):
        policy.on_moves(op, texts)
    return list(Redistribute.apply(tuple(targets), False, *values))


def on_shards(
    op: Any,
    run: Callable[..., Sequence[torch.Tensor]],
    batched: Sequence[tuple[Any, int]],
    weights: Sequence[Any],
    results: Sequence[tuple[int, Sequence[int]]],
) -> list[Any]:
    """`run(batched, weights, interval)` for each shard of the batch.

    `batched` are tensors and where they have the batch; `results` say where the results have it,
    and their dims in the order in which they lie in memory.
    """
    batch = _Batch.of(batched)
    ours = [weight for weight in weights if weight is not None]
    moved = laid(
        op,
        [*(value for value, _ in batched), *ours],
        [*(batch.spec(value._spec, dim) for value, dim in batched), *map(_whole, ours)],
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
        _joined(batch, like, at, order, [row[index] for row in made])
        for index, (at, order) in enumerate(results)
    ]


def _joined(
    batch: _Batch, like: DTensorSpec, dim: int, order: Sequence[int], parts: Sequence[torch.Tensor]
) -> Any:
    """A result out of its shards, with the strides that one device would give it."""
    shape = list(parts[0].shape)
    shape[dim] = batch.size
    steps = contiguous_stride([shape[at] for at in order])
    stride = tuple(steps[order.index(at)] for at in range(len(shape)))
    meta = TensorMeta(tuple(shape), stride, parts[0].dtype)
    return _Joined.apply(batch.spec(like, dim, meta), *parts)


# --- layers and cells ------------------------------------------------------------------------


def on_one_mesh(op: Any, x: Any, states: Sequence[Any], weights: Sequence[Any]) -> Any:
    """All operands as DTensors; None if they are on several meshes, or on none."""
    given = [value for value in (x, *states, *weights) if isinstance(value, Wrapper)]
    if len({value._spec.topology for value in given}) != 1:
        return None
    x, *states = (_entered(op, value, given[0]) for value in (x, *states))
    return x, states, [_entered(op, weight, given[0]) for weight in weights]


def _take_layer(op: Any, cell: bool) -> None:
    """A layer over sequences of one length, or one step of it."""

    def run(x: Any, hx: Any, *rest: Any) -> Any:
        one = isinstance(hx, torch.Tensor)
        weights, options = (rest, ()) if cell else (rest[0], rest[1:])
        of_state = 0 if cell else 1
        at = 0 if cell or options[-1] else 1
        found = on_one_mesh(op, x, [hx] if one else hx, weights)
        fits = found is not None and all(
            s.ndim == x.ndim and s.shape[of_state] == x.shape[at] for s in found[1]
        )
        if not fits:  # the first call that joins them says why
            return run_composite(op, x, hx, *rest)
        if not cell and drops(options):
            turned = [x.transpose(0, 1), hx, rest[0], *options[:-1], False] if at == 0 else None
            made = layer_by_layer(op, [], *(turned or [x, hx, *rest]))
            return (made[0].transpose(0, 1), *made[1:]) if turned else made
        x, states, weights = found

        def local(own: Sequence[Any], mine: Sequence[Any], piece: Any) -> Any:
            state = own[1] if one else own[1:]
            made = op(own[0], state, *mine) if cell else op(own[0], state, mine, *options)
            return [made] if isinstance(made, torch.Tensor) else made

        batched = [(x, at), *((state, of_state) for state in states)]
        last = [(of_state, tuple(range(state.ndim))) for state in states]
        out: list[tuple[int, tuple[int, ...]]] = [(at, (1, 0, 2) if at == 0 else (0, 1, 2))]
        made = on_shards(op, local, batched, weights, last if cell else out + last)
        return made[0] if len(made) == 1 else tuple(made)

    register_composite(op, run)


def drops(options: Sequence[Any]) -> bool:
    """Whether there is dropout between layers, by the options of a call."""
    _, layers, dropout, train, *_ = options
    return bool(dropout) and bool(train) and layers > 1


def layer_by_layer(
    op: Any, sizes: Sequence[Any], x: Any, hx: Any, weights: Any, *options: Any
) -> Any:
    """Layers with dropout between them, whose numbers are drawn for the whole batch."""
    biases, layers, dropout, train, both, *rest = options
    one, ways = isinstance(hx, torch.Tensor), 2 if both else 1
    of_layer = len(weights) // layers
    ends = []
    for layer in range(layers):
        states = [s.narrow(0, layer * ways, ways) for s in ([hx] if one else hx)]
        own = weights[layer * of_layer : (layer + 1) * of_layer]
        x = torch.dropout(x, dropout, train=True) if layer else x
        x, *last = op(
            x, *sizes, states[0] if one else states, own, biases, 1, 0.0, train, both, *rest
        )
        ends.append(last)
    return x, *(torch.cat(state) for state in zip(*ends, strict=True))


for _kind in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
    _take_layer(getattr(aten, _kind).input, cell=False)
    _take_layer(getattr(aten, f"{_kind}_cell").default, cell=True)
