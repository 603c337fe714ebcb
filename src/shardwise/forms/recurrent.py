"""Recurrent networks: every sequence of a batch is apart, so each shard of it runs by itself.

PyTorch takes a layer apart into one small call after another, many of them in place, and its first
state is often a plain tensor that the module made. So all that it reads is laid out once, and each
rank gives its sequences to PyTorch's own layer, whose autograd then is that of plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import run_composite
from ..dispatch.operator import register_composite
from .batched import on_one_mesh, on_shards

__all__ = ["drops", "layer_by_layer"]

aten = torch.ops.aten


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
        x, states, weights = found
        if not cell and drops(options):
            turned = [x.transpose(0, 1), hx, rest[0], *options[:-1], False] if at == 0 else None
            made = layer_by_layer(op, [], *(turned or [x, hx, *rest]))
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


def drops(options: Sequence[Any]) -> bool:
    """Whether there is dropout between layers, by the options of a call."""
    _, layers, dropout, train, *_ = options
    return bool(dropout) and bool(train) and layers > 1


def layer_by_layer(
    op: Any, sizes: Sequence[Any], x: Any, hx: Any, weights: Any, *options: Any
) -> Any:
    """Layers one after another. Between them there may be dropout, whose numbers are drawn for the
    whole batch."""
    biases, layers, dropout, train, both, *rest = options
    one, ways = isinstance(hx, torch.Tensor), 2 if both else 1
    of_layer = len(weights) // layers
    ends = []
    for layer in range(layers):
        states = [s.narrow(0, layer * ways, ways) for s in ([hx] if one else hx)]
        own = weights[layer * of_layer : (layer + 1) * of_layer]
        x = torch.dropout(x, dropout, train=True) if layer and drops(options) else x
        x, *last = op(
            x, *sizes, states[0] if one else states, own, biases, 1, 0.0, train, both, *rest
        )
        ends.append(last)
    return x, *(torch.cat(state) for state in zip(*ends, strict=True))


for _kind in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
    _take_layer(getattr(aten, _kind).input, cell=False)
    _take_layer(getattr(aten, f"{_kind}_cell").default, cell=True)
