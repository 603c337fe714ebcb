"""LSTM, GRU, RNN: each rank runs PyTorch's own layer on the sequences of its shard of the batch.

All operands are laid out once, and the autograd of the layer is that of plain tensors. PyTorch's
decomposition would be one small call after another; it serves cells and packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import run_composite
from ..dispatch.operator import register_composite, register_form
from ..errors import MeshError
from ..layout.geometry import contiguous_stride
from ..layout.placement import Partial, Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..storage import policy
from ..storage.match_meta import in_memory_order
from ..storage.operands import announce_moves
from ..storage.plain import full_local
from ..storage.ragged import as_dtensor, gather_plain
from ..storage.wrapper import Wrapper, wrap
from ..tensor.autograd import FromLocal, Redistribute, ToLocal

aten = torch.ops.aten


# --- local tensors and their gradients -----------------------------------------------------------


class _Joined(torch.autograd.Function):
    """A DTensor of local tensors: shards, or shares in a sum.

    Their graphs read the tensors in `read`, and the result if `is_read`, but do not see the writes
    that the dispatcher makes.
    """

    @staticmethod
    def forward(
        ctx: Any, spec: DTensorSpec, read: Sequence[Any], is_read: bool, *parts: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.grad_spec = spec, None
        made = wrap(spec, tuple(in_memory_order(spec, part.view_as(part)) for part in parts))
        ctx.save_for_backward(*read, *([made] if is_read else []))
        return made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.saved_tensors  # noqa: B018  # raises if one was written into
        return None, *FromLocal.backward(ctx, grad)


# --- layers on shards of the batch ---------------------------------------------------------------


def _batch_spec(x: DTensorSpec, at: int, meta: TensorMeta, place: Placement) -> DTensorSpec:
    """A layout with `place` on the axes that shard the batch of `x`, which is its dim `at`."""
    axes, cuts = x.dim_axes[at], x.dim_cuts[at]
    if 0 in cuts:
        axes = ()  # PyTorch refuses an empty batch
    places = [place if axis in axes else Replicate() for axis in range(x.topology.ndim)]
    own = [cuts if axes and place.is_shard(dim) else None for dim in range(len(meta.shape))]
    return DTensorSpec(x.topology, places, meta, cuts=own)


def _entered(op: Any, value: Any, example: Any) -> Any:
    """A plain tensor as a DTensor, as the policy on plain tensors allows; its gradient is plain."""
    if isinstance(value, Wrapper):
        return value
    policy.on_plain(op, tuple(value.shape))
    return value * example.new_ones((), dtype=value.dtype)


def _laid_out(op: Any, values: Sequence[Any], targets: Sequence[DTensorSpec]) -> list[Any]:
    """DTensors in other layouts, in few collectives and as the policy on communication allows."""
    moves = [(i, t) for i, t in enumerate(targets) if t is not values[i]._spec]
    made = list(values)
    if moves:
        announce_moves(op, moves, values)
        goals = tuple(target for _, target in moves)
        moved = Redistribute.apply(goals, False, None, *(made[index] for index, _ in moves))
        for (index, _), value in zip(moves, moved, strict=True):
            made[index] = value
    return made


def _on_shards(
    op: Any, x: Any, states: Sequence[Any], weights: Sequence[Any], options: Any, single: bool
) -> tuple[Any, ...]:
    """The layer for each shard of the batch."""
    at = 0 if options[-1] else 1
    like, held = x._spec.consecutive, [at, *[1] * len(states)]
    values = [x, *states]
    specs = [
        _batch_spec(like, at, v._spec.meta, Shard(dim)) for v, dim in zip(values, held, strict=True)
    ]
    shares = [_batch_spec(like, at, w._spec.meta, Partial()) for w in weights]
    whole = [s.with_placements([Replicate()] * s.topology.ndim) for s in shares]
    moved = _laid_out(op, [*values, *weights], [*specs, *whole])
    coords = specs[0].slots
    if not coords:
        raise MeshError(f"{op}: this rank is not in mesh {like.topology}, so it cannot take part.")
    grads = [*specs, *shares]
    parts = [ToLocal.apply(v, s, s.slot_axes) for v, s in zip(moved, grads, strict=True)]
    made = []
    for first, *rest in zip(*parts, strict=True):
        own, mine = rest[: len(states)], rest[len(states) :]
        made.append(op(first, own[0] if single else own, mine, *options))
    orders = [(1, 0, 2) if at == 0 else (0, 1, 2), *[(0, 1, 2)] * len(states)]
    return tuple(
        _Joined.apply(
            _batch_spec(like, at, _meta(found[0], x.shape[at], dim, order), Shard(dim)),
            moved,
            index == 0 and _reads_output(op, x, states, options),
            *found,
        )
        for index, (found, dim, order) in enumerate(
            zip(zip(*made, strict=True), held, orders, strict=True)
        )
    )


def _meta(part: torch.Tensor, batch: int, dim: int, order: Sequence[int]) -> TensorMeta:
    """The meta of a result; `order` has its dims as they lie in memory."""
    shape = list(part.shape)
    shape[dim] = batch
    steps = contiguous_stride([shape[at] for at in order])
    stride = tuple(steps[order.index(at)] for at in range(len(shape)))
    return TensorMeta(tuple(shape), stride, part.dtype)


def _reads_output(op: Any, x: Any, states: Sequence[Any], options: Any) -> bool:
    """True if the backward of the layer reads its output: kernels for all steps at once do."""
    if x.device.type != "cpu":
        return True
    projects = len(states) > 1 and states[0].shape[2] != states[1].shape[2]
    both_ways = options[4]
    return op is aten.lstm.input and not projects and x.dtype is not torch.float64 and not both_ways


def _drops(options: Sequence[Any]) -> bool:
    """True if there is dropout between layers."""
    _, layers, dropout, train, *_ = options
    return bool(dropout) and bool(train) and layers > 1


def _layer_by_layer(op: Any, x: Any, states: Sequence[Any], weights: Any, options: Any) -> Any:
    """The layers one after another. The dropout between them is that of the whole batch."""
    biases, layers, dropout, train, both, batch_first = options
    ways, of_layer = 2 if both else 1, len(weights) // layers
    x = x.transpose(0, 1) if batch_first else x
    ends = []
    for layer in range(layers):
        first = [s.narrow(0, layer * ways, ways) for s in states]
        own = weights[layer * of_layer : (layer + 1) * of_layer]
        x = torch.dropout(x, dropout, train=True) if layer else x
        hx = first if op is aten.lstm.input else first[0]
        x, *last = op(x, hx, own, biases, 1, 0.0, train, both, False)
        ends.append(last)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.cat(state) for state in zip(*ends, strict=True))


def _take_layer(op: Any) -> None:
    """Register a layer over sequences of one length."""

    def run(x: Any, hx: Any, weights: Any, *options: Any) -> Any:
        single = isinstance(hx, torch.Tensor)
        states = [hx] if single else list(hx)
        batch = x.shape[0 if options[-1] else 1]
        ours = [v for v in (x, *states, *weights) if isinstance(v, Wrapper)]
        fits = all(s.ndim == x.ndim and s.shape[1] == batch for s in states)
        if len({value._spec.topology for value in ours}) != 1 or not fits:
            return run_composite(op, x, hx, weights, *options)  # its first call raises
        x, *rest = (_entered(op, value, ours[0]) for value in (x, *states, *weights))
        states, weights = rest[: len(states)], rest[len(states) :]
        if _drops(options):
            return _layer_by_layer(op, x, states, weights, options)
        return _on_shards(op, x, states, weights, options, single)

    register_composite(op, run)


def _take_cell(op: Any) -> None:
    """Register one step: PyTorch adds in place to a product of the state, so the state is first
    sharded as the batch is."""

    def run(x: Any, hx: Any, *weights: Any) -> Any:
        zeros = torch.zeros_like(x[..., :1])
        state = hx + zeros if isinstance(hx, torch.Tensor) else [each + zeros for each in hx]
        return run_composite(op, x, state, *weights)

    register_composite(op, run)


for _kind in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
    _take_layer(getattr(aten, _kind).input)
    _take_cell(getattr(aten, f"{_kind}_cell").default)


@register_form("_pack_padded_sequence", always=True)
def pack_padded_sequence(x: Any, lengths: Any, batch_first: bool) -> tuple[Any, torch.Tensor]:
    """The packed steps on every rank. The batch sizes are plain: PyTorch reads their memory."""
    op = aten._pack_padded_sequence.default
    mesh = next(v._spec.topology for v in (x, lengths) if isinstance(v, Wrapper))
    data, sizes = op(gather_plain(op, x), full_local(lengths), batch_first)
    return as_dtensor(data, mesh), sizes
