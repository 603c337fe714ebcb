"""Attention: batches and heads are apart."""

from __future__ import annotations

from math import prod
from typing import Any

from .call import Call
from .rule import Rule, Site, along

__all__ = ["attention", "attention_backward"]


def _attention(call: Call, *outputs: list[str | None]) -> Rule:
    """Batch and heads are free; an operand that broadcasts over one of them does not have it."""
    sizes = {"b": call.results[0].shape[0], "h": call.results[0].shape[1]}
    heads = {call.shape(call.get(name))[1] for name in ("query", "key", "value")}
    if len(heads) > 1:
        del sizes["h"]  # several heads of the query share one of the key: they stay together
    mask = call.get("attn_mask")
    dims = []
    for index, spec in enumerate(call.specs):
        names = ["b", "h", None, None][4 - spec.ndim if index == mask else 0 :][: spec.ndim]
        shape = spec.meta.shape
        dims.append([n if n and sizes.get(n) == shape[d] else None for d, n in enumerate(names)])
    free = [[name if name in sizes else None for name in names] for names in outputs]
    return Rule(
        tuple(map(along, dims)),
        tuple(map(along, free)),
        sizes,
        reduce=None,
        local=_attention_of_none,
        unless=lambda site: prod(site.inputs[0].local_shape(site.coord)) > 0,
    )


def _attention_of_none(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """PyTorch's kernel divides by the number of batches and heads, also where there are none."""
    if args[0].numel():
        return op(*args, **kwargs)
    dtypes = [spec.dtype for spec in site.outputs]
    return [
        args[0].new_empty(shape, dtype=dtype)
        for shape, dtype in zip(site.out_shapes, dtypes, strict=True)
    ]


def attention(call: Call) -> Rule:
    """`"b h l! d!, ... -> b h l! d!, b h l!"`"""
    return _attention(call, ["b", "h", None, None], ["b", "h", None])


def attention_backward(call: Call) -> Rule:
    """The gradients of query, key and value, for each batch and head apart."""
    return _attention(call, *[["b", "h", None, None]] * 3)
