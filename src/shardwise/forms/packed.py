"""Packed sequences: the steps of many sequences, one step of all after another.

No dim of them is the batch, so what was sharded by it is sharded by channels while it is packed. A
recurrent layer has its sequences apart again: each rank runs those of its part of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import run_composite
from ..dispatch.operator import register_composite, register_form
from ..layout.geometry import Interval
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec
from ..storage.plain import full_local
from ..storage.ragged import as_dtensor
from ..storage.ragged import move_to as relaid
from ..storage.wrapper import Wrapper
from .batched import laid, on_one_mesh, on_shards
from .recurrent import drops, layer_by_layer

__all__ = ["pack_padded_sequence", "pack_padded_sequence_backward", "pad_packed_sequence"]

aten = torch.ops.aten


def _by_channels(spec: DTensorSpec, steps: int) -> DTensorSpec:
    """A layout without shards of the first dims, which hold `steps` and batch: they go to the last
    dim, if it has enough."""
    spec = spec.consecutive
    last = spec.ndim - 1
    places: list[Placement] = []
    for count, place in zip(spec.topology.shape, spec.placements, strict=True):
        kept = isinstance(place, Shard) and place.dim >= steps
        enough = place.is_shard() and last >= steps and spec.shape[last] >= count
        places.append(place if kept else Shard(last) if enough else Replicate())
    if tuple(places) == spec.placements:
        return spec
    return spec.with_placements(places)


def _rows(sizes: Sequence[int], batch: int, device: torch.device) -> torch.Tensor:
    """Where the steps of a packed sequence lie among those of sequences of one length."""
    places = [step * batch + at for step, size in enumerate(sizes) for at in range(size)]
    return torch.tensor(places, dtype=torch.int64, device=device)


def _padded(data: Any, rows: Any, steps: int, batch: int, value: float) -> Any:
    """[steps, batch, ...] of packed steps."""
    shape = (steps * batch, *data.shape[1:])
    spread = data.new_full(shape, value).index_copy(0, rows, data)
    return spread.view(steps, batch, *data.shape[1:])


def _packed(padded: Any, rows: Any) -> Any:
    return padded.reshape(-1, *padded.shape[2:]).index_select(0, rows)


@register_form("_pack_padded_sequence", always=True)
def pack_padded_sequence(x: Any, lengths: Any, batch_first: bool) -> tuple[Any, torch.Tensor]:
    """Each rank packs its channels. The sizes of batches are plain: they are read as numbers."""
    op = aten._pack_padded_sequence.default
    mesh = next(v._spec.topology for v in (x, lengths) if isinstance(v, Wrapper))
    # PyTorch checks the lengths, but packs no tensor without elements, as a shard may be.
    example = torch.empty(*x.shape[:2], 1)
    _, sizes = op(example, full_local(lengths), batch_first)
    x = as_dtensor(x, mesh)
    value = relaid(op, x, _by_channels(x._spec, 2))
    batch = x.shape[0 if batch_first else 1]
    rows = as_dtensor(_rows(sizes.tolist(), batch, x.device), mesh)
    return _packed(value.transpose(0, 1) if batch_first else value, rows), sizes


def pack_padded_sequence_backward(
    grad: Any, input_size: Sequence[int], batch_sizes: Any, batch_first: bool
) -> Any:
    """What was not packed has no gradient."""
    if not isinstance(grad, Wrapper):
        op = aten._pack_padded_sequence_backward.default
        return run_composite(op, grad, input_size, full_local(batch_sizes), batch_first)
    steps, batch = (input_size[1], input_size[0]) if batch_first else input_size[:2]
    made, _ = _unpacked(grad, full_local(batch_sizes), batch, steps, 0)
    return made.transpose(0, 1) if batch_first else made


def pad_packed_sequence(
    data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> Any:
    """Sequences of one length, filled up."""
    sizes = full_local(batch_sizes)
    if not isinstance(data, Wrapper):
        op = aten._pad_packed_sequence.default
        return run_composite(op, data, sizes, batch_first, padding_value, total_length)
    steps = sizes.numel()
    if 0 < total_length < steps:
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, "
            f"but got total_length={total_length} and max sequence length being {steps}"
        )
    batch = int(sizes[0])
    made, found = _unpacked(data, sizes, batch, max(steps, total_length), padding_value)
    lengths = torch.tensor([sum(size > at for size in found) for at in range(batch)])
    return made.transpose(0, 1) if batch_first else made, lengths


def _unpacked(
    data: Any, sizes: torch.Tensor, batch: int, steps: int, value: float
) -> tuple[Any, list[int]]:
    found = sizes.tolist()
    rows = as_dtensor(_rows(found, batch, data.device), data._spec.topology)
    (data,) = laid(aten._pad_packed_sequence.default, [data], [_by_channels(data._spec, 1)])
    return _padded(data, rows, steps, batch, value), found


def _take_layer(op: Any) -> None:
    def run(data: Any, batch_sizes: Any, hx: Any, weights: Any, *options: Any) -> Any:
        one = isinstance(hx, torch.Tensor)
        sizes = full_local(batch_sizes)
        found = on_one_mesh(op, data, [hx] if one else hx, weights)
        if found is None:
            return run_composite(op, data, sizes, hx, weights, *options)
        if drops(options):
            return layer_by_layer(op, [sizes], data, hx, weights, *options)
        data, states, weights = found

        def local(own: Sequence[Any], mine: Sequence[Any], piece: Interval) -> Any:
            here = (sizes - piece[0]).clamp(0, piece[1] - piece[0])
            here = here[here > 0] if int(here[0]) else here[:1] + 1
            rows = _rows(here.tolist(), piece[1] - piece[0], own[0].device)
            state = own[1] if one else own[1:]
            out, *last = op(_packed(own[0], rows), here, state, mine, *options)
            return [_padded(out, rows, steps, piece[1] - piece[0], 0), *last]

        steps, batch = sizes.numel(), int(sizes[0])
        x, counts = _unpacked(data, sizes, batch, steps, 0)
        batched = [(x, 1), *((state, 1) for state in states)]
        last = [(1, range(3))] * len(states)
        out, *ends = on_shards(op, local, batched, weights, [(1, range(3)), *last])
        (out,) = laid(op, [out], [_by_channels(out._spec, 2)])
        rows = as_dtensor(_rows(counts, batch, out.device), out._spec.topology)
        return _packed(out, rows), *ends

    register_composite(op, run)


register_composite(aten._pack_padded_sequence_backward.default, pack_padded_sequence_backward)
register_composite(aten._pad_packed_sequence.default, pad_packed_sequence)
for _kind in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
    _take_layer(getattr(aten, _kind).data)
