"""Layers that PyTorch runs as one kernel: every batch is apart, all else is whole."""

from __future__ import annotations

from typing import Any

from .call import Call, Operand
from .rule import Dims, Rule, Site, along, anywhere

__all__ = ["encoder_layer", "multi_head_attention"]

_PADDING, _BOTH = 1, 2


def _batches(call: Call, dims: dict[str, int]) -> tuple[Dims, ...]:
    """Dims of the operands: `b` is where `dims` says, by their names."""
    found: list[Dims] = []
    for name, value in call.values.items():
        if isinstance(value, Operand):
            ndim = len(call.shape(value))
            found.append(along(["b" if d == dims.get(name) else None for d in range(ndim)]))
    return tuple(found)


@anywhere
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
