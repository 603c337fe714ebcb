"""LSTM, GRU, RNN: each rank runs PyTorch's own layer on the sequences of its shard of the batch.

All operands are laid out once, and the autograd of the layer is that of plain tensors. PyTorch's
decomposition would be one small call after another. A packed sequence has no batch dim: each rank
runs all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import run_composite
from ..dispatch.operator import register_composite, register_form
from ..storage.plain import full_local
from ..storage.ragged import as_dtensor, gather_plain
from ..storage.wrapper import Wrapper
from .batched import laid, on_one_mesh, on_shards, undivided

aten = torch.ops.aten


def _take_layer(op: Any, cell: bool) -> None:
    """Register a layer over sequences of one length, or one step of it."""

    def run(x: Any, hx: Any, *rest: Any) -> Any:
        one = isinstance(hx, torch.Tensor)
        weights, options = (rest, ()) if cell else (rest[0], rest[1:])
        of_state = 0 if cell else 1
        at = 0 if cell or options[-1] else 1
        found = on_one_mesh(op, x, [hx] if one else hx, weights)
        fits = found is not None and all(
            s.ndim == x.ndim and s.shape[of_state] == x.shape[at] for s in found[1]
        )
        if not fits:  # the first call that joins them raises
            return run_composite(op, x, hx, *rest)
        x, states, weights = found
        if not cell and _drops(options):
            turned = [x.transpose(0, 1), hx, rest[0], *options[:-1], False] if at == 0 else None
            made = _layer_by_layer(op, [], *(turned or [x, hx, *rest]))
            return (made[0].transpose(0, 1), *made[1:]) if turned else made

        def local(own: Sequence[Any], mine: Sequence[Any], piece: Any) -> Any:
            state = own[1] if one else own[1:]
            made = op(own[0], state, *mine) if cell else op(own[0], state, mine, *options)
            return [made] if isinstance(made, torch.Tensor) else made

        last = [(of_state, tuple(range(state.ndim))) for state in states]
        out: list[tuple[int, tuple[int, ...]]] = [(at, (1, 0, 2) if at == 0 else (0, 1, 2))]

        # A kernel for both time and gates keeps its output for the backward; it does not project.
        # Elsewhere than on CPUs there are such kernels for every layer.
        fused = op is aten.lstm.input and states[0].shape[2] == states[1].shape[2]
        reads = fused and x.dtype is not torch.float64 and not options[4]
        reads = reads or (not cell and x.device.type != "cpu")

        held = [(x, at), *((state, of_state) for state in states)]
        made = on_shards(op, local, held, weights, last if cell else out + last, reads)
        return made[0] if len(made) == 1 else tuple(made)

    register_composite(op, run)


def _drops(options: Sequence[Any]) -> bool:
    """True if there is dropout between layers."""
    _, layers, dropout, train, *_ = options
    return bool(dropout) and bool(train) and layers > 1


def _layer_by_layer(
    op: Any, sizes: Sequence[Any], x: Any, hx: Any, weights: Any, *options: Any
) -> Any:
    """The layers one after another. The dropout between them is that of the whole batch."""
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


# --- packed sequences ----------------------------------------------------------------------------


@register_form("_pack_padded_sequence", always=True)
def pack_padded_sequence(x: Any, lengths: Any, batch_first: bool) -> tuple[Any, torch.Tensor]:
    """The packed steps on every rank. The batch sizes are plain: PyTorch reads their memory."""
    op = aten._pack_padded_sequence.default
    mesh = next(v._spec.topology for v in (x, lengths) if isinstance(v, Wrapper))
    data, sizes = op(gather_plain(op, x), full_local(lengths), batch_first)
    return as_dtensor(data, mesh), sizes


def _take_packed_layer(op: Any) -> None:
    def run(data: Any, batch_sizes: Any, hx: Any, weights: Any, *options: Any) -> Any:
        one = isinstance(hx, torch.Tensor)
        found = on_one_mesh(op, data, [hx] if one else hx, weights)
        if found is None:
            return run_composite(op, data, batch_sizes, hx, weights, *options)
        if _drops(options):
            return _layer_by_layer(op, [batch_sizes], data, hx, weights, *options)

        def local(own: Sequence[Any], mine: Sequence[Any], piece: Any) -> Any:
            return op(own[0], batch_sizes, own[1] if one else own[1:], mine, *options)

        given = [found[0], *found[1]]
        data, *states = laid(op, given, [undivided(value) for value in given])
        held = [(data, 0), *((state, 1) for state in states)]
        results = [(0, (0, 1)), *[(1, (0, 1, 2))] * len(states)]
        return tuple(on_shards(op, local, held, found[2], results))

    register_composite(op, run)


for _kind in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
    _take_layer(getattr(aten, _kind).input, cell=False)
    _take_layer(getattr(aten, f"{_kind}_cell").default, cell=True)
    _take_packed_layer(getattr(aten, _kind).data)
