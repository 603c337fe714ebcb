"""Attention in all its backends: batches, heads and queries are apart, keys are whole.

Backends differ in what they return besides the result and its logsumexp; operands are told apart by
their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .call import Call, Operand
from .rule import Along, Dims, Rule, Scaled, Site

__all__ = ["attention", "attention_backward"]

_QUERIES = ("query", "out", "grad_out", "grad_out_", "logsumexp")
_KEYS = ("key", "value")
_MASKS = ("attn_mask", "attn_bias")


class _Dims:
    """The factors of a call: `b` batches, `h` heads of the key, `l` queries."""

    def __init__(self, call: Call) -> None:
        query, key = (call.shape(call.get(name)) for name in ("query", "key"))
        self.sizes = {"h": key[1], "b": query[0], "l": query[2]}
        self.shared = query[1] // max(key[1], 1)  # so many heads of the query have one of the key
        if call.shape(call.get("value"))[1] != key[1] or key[1] * self.shared != query[1]:
            del self.sizes["h"]
        if not _cuts_queries(call):
            del self.sizes["l"]
        self._full = (query[0], query[1], query[2])

    def queries(self, shape: Sequence[int]) -> Dims:
        """Dims of what has a place for each query, and of a mask, which may broadcast."""
        link = Scaled(self.shared) if self.shared > 1 else None
        full = (Along("b"), Along("h", link), Along("l"))
        return self._known(full, self._full, shape)

    def keys(self, shape: Sequence[int]) -> Dims:
        full = (Along("b"), Along("h"))
        return self._known(full, (self._full[0], self._full[1] // self.shared), shape)

    def mask(self, shape: Sequence[int]) -> Dims:
        lead = 4 - len(shape)
        return self.queries((1,) * lead + tuple(shape))[lead:]

    def _known(self, full: Sequence[Along], sizes: Sequence[int], shape: Sequence[int]) -> Dims:
        known = [
            at if at.factor in self.sizes and size == here else None
            for at, size, here in zip(full, sizes, shape, strict=False)
        ]
        return (*known, *[None] * (len(shape) - len(known)))

    def operand(self, name: str, shape: Sequence[int]) -> Dims:
        if name in _QUERIES:
            return self.queries(shape)
        if name in _KEYS:
            return self.keys(shape)
        return self.mask(shape) if name in _MASKS else (None,) * len(shape)


def _on_cpu(call: Call) -> bool:
    return "_for_cpu" in call.name


def _cuts_queries(call: Call) -> bool:
    """Whether a kernel can be given some of the queries alone.

    Which keys a causal kernel hides from them depends on their place, which only a mask can tell;
    and some kernels pad the logsumexp.
    """
    if _on_cpu(call):
        return True
    at = call.get("logsumexp")
    padded = call.results[1].shape if at is None else call.shape(at)
    return not call.get("is_causal") and ("efficient" not in call.name or padded[2] == 0)


def _rule(call: Call, outputs: Sequence[Dims], dims: _Dims, **options: Any) -> Rule:
    names = [name for name, value in call.values.items() if isinstance(value, Operand)]
    inputs = tuple(
        dims.operand(name, spec.meta.shape) for name, spec in zip(names, call.specs, strict=True)
    )
    rest = tuple((None,) * len(meta.shape) for meta in call.results[len(outputs) :])
    query = call.get("query")

    def unless(site: Site) -> bool:
        length = site.inputs[query].local_shape(site.coord)
        return 0 not in length and length[2] == call.shape(query)[2]

    made = (*outputs, *rest)
    # Seeds, which nothing uses without dropout, and a logsumexp that nobody asked for.
    alike = set(range(len(outputs), len(made)))
    alike |= {index for index, meta in enumerate(call.results) if 0 in meta.shape}
    return Rule(
        inputs,
        made,
        dims.sizes,
        alike=frozenset(alike),
        local=_local(call),
        unless=unless,
        **options,
    )


def _local(call: Call) -> Any:
    """The local call: an empty shard has zeros, and some queries of a causal call have a mask."""
    query, mask = call.get("query"), call.get("attn_mask")
    causal = call.position("is_causal")
    lengths = [call.position("max_q")] if "max_q" in call.values else []

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        here, length = tensors[query], call.shape(query)[2]
        if not here.numel():
            return _none(call, here, site)
        start, stop = site.box(query)[2]
        if (start, stop) == (0, length):
            return op(*args, **kwargs)
        given = list(args)
        for place in lengths:
            given[place] = stop - start
        if call.get("is_causal") and mask is None:
            keys = tensors[call.get("key")].shape[2]
            rows = torch.arange(start, stop, device=here.device)
            hidden = torch.arange(keys, device=here.device) > rows.unsqueeze(1)
            given[causal] = False
            zeros = here.new_zeros(hidden.shape)
            kwargs = {**kwargs, "attn_mask": zeros.masked_fill_(hidden, float("-inf"))}
        return op(*given, **kwargs)

    return local


def _none(call: Call, like: torch.Tensor, site: Site) -> Any:
    """The results of no queries: nothing, and no share in the gradients of the keys."""
    made = iter([like.new_zeros(s.local_shape(site.coord), dtype=s.dtype) for s in site.outputs])
    return [next(made) if isinstance(at, int) else None for at in call.structure]


def attention(call: Call) -> Rule:
    """`"b h l _, b h k! _, b h k! _ -> b h l _, b h l"`"""
    dims = _Dims(call)
    outputs = [dims.queries(meta.shape) for meta in call.results[:2]]
    return _rule(call, outputs, dims, reduce=None)


def attention_backward(call: Call) -> Rule:
    """The gradients of the query, and of key and value, to which every query has a share."""
    dims = _Dims(call)
    query, key, value, *bias = (meta.shape for meta in call.results)
    outputs = [dims.queries(query), dims.keys(key), dims.keys(value), *map(dims.mask, bias)]
    return _rule(call, outputs, dims)
