"""Layers that PyTorch runs as one kernel: every batch is apart, all else is whole."""

from __future__ import annotations

from typing import Any

import torch

from .call import Call, Operand
from .rule import Dims, Rule, Site, along

__all__ = ["encoder_layer", "lstm", "lstm_backward", "multi_head_attention"]

_PADDING, _BOTH = 1, 2


def _batches(call: Call, dims: dict[str, int]) -> tuple[Dims, ...]:
    """Dims of the operands: `b` is where `dims` says, by their names."""
    found: list[Dims] = []
    for name, value in call.values.items():
        if isinstance(value, Operand):
            ndim = len(call.shape(value))
            found.append(along(["b" if d == dims.get(name) else None for d in range(ndim)]))
    return tuple(found)


def _or_nothing(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """PyTorch's kernels want a batch; a shard may have none."""
    if args[0].numel():
        return op(*args, **kwargs)
    made = [args[0].new_empty(s.local_shape(site.coord), dtype=s.dtype) for s in site.outputs]
    return made[0] if len(op._schema.returns) == 1 else (*made, None)[:2]


def _by_batch(call: Call, names: tuple[str, ...]) -> Rule:
    dims = dict.fromkeys(names, 0)
    if call.get("mask_type") in (_PADDING, _BOTH):  # a mask of the words alone is of all batches
        dims["mask"] = 0
    outputs = tuple(along(["b", *[None] * (len(meta.shape) - 1)]) for meta in call.results)
    sizes = {"b": call.shape(0)[0]}
    return Rule(_batches(call, dims), outputs, sizes, reduce=None, local=_or_nothing)


def multi_head_attention(call: Call) -> Rule:
    """The fast path of `nn.MultiheadAttention` without gradients."""
    return _by_batch(call, ("query", "key", "value"))


def encoder_layer(call: Call) -> Rule:
    """The fast path of `nn.TransformerEncoderLayer` without gradients."""
    return _by_batch(call, ("src",))


# --- LSTM on the CPU -------------------------------------------------------------------------


_OF_BATCHES = ("input", "hx_", "cx_", "cx_tmp", "output", "hy_", "cy_")
_GRADS = ("grad_output", "grad_hy", "grad_cy")


def _lstm_dims(call: Call) -> tuple[tuple[Dims, ...], dict[str, int]]:
    """A sequence is [time, batch, channels], states have the batch before their last dim."""
    if call.get("batch_sizes"):  # sequences of many lengths, one word of all after another
        return _batches(call, {}), {}
    names = [n for n in (*_OF_BATCHES, *_GRADS) if isinstance(call.values.get(n), Operand)]
    dims = {name: len(call.shape(call.get(name))) - 2 for name in names}
    return _batches(call, dims), {"b": call.shape(call.get("input"))[1]}


def lstm(call: Call) -> Rule:
    """One layer in one direction; its workspace, which only the kernel can read, is not kept."""
    inputs, sizes = _lstm_dims(call)
    states = [along([*[None] * (len(m.shape) - 2), "b", None]) for m in call.results[:3]]
    return Rule(
        inputs,
        (*states, (None,)) if sizes else tuple((None,) * len(m.shape) for m in call.results),
        sizes,
        reduce=None,
        alike=frozenset({3}),
        local=_lstm_local,
    )


def _lstm_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    if not args[0].numel():
        made = [args[0].new_empty(s.local_shape(site.coord), dtype=s.dtype) for s in site.outputs]
        return tuple(made)
    *made, _ = op(*args, **kwargs)
    return *made, args[0].new_empty(0, dtype=torch.uint8)


def lstm_backward(call: Call) -> Rule:
    """Each shard makes its workspace again; gradients of the weights are pending."""
    inputs, sizes = _lstm_dims(call)
    ndims = [len(meta.shape) for meta in call.results]
    batched: list[Dims] = [along([*[None] * (n - 2), "b" if sizes else None, None]) for n in ndims]
    whole: list[Dims] = [(None,) * n for n in ndims]
    outputs = (batched[0], *whole[1:5], *batched[5:])
    return Rule(inputs, outputs, sizes, local=_lstm_backward_local)


def _lstm_backward_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    if not args[0].numel():
        specs = site.outputs
        return tuple(args[0].new_zeros(s.local_shape(site.coord), dtype=s.dtype) for s in specs)
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=True))
    with torch.enable_grad():  # without it the kernel makes no workspace
        made = torch.ops.aten.mkldnn_rnn_layer.default(
            *args[:7],
            *(given[name] for name in ("reverse", "batch_sizes", "mode", "hidden_size")),
            *(given[name] for name in ("num_layers", "has_biases", "bidirectional", "batch_first")),
            True,
        )
    return op(*args[:-1], made[3])
