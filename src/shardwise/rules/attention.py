"""Attention in all its backends: batches, heads and queries are apart, and so are keys in the
gradient; forms/attention.py has the result of keys that are in shards.

Backends differ in what they return besides the result and its logsumexp; operands are told apart by
their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch

from .call import Call, Operand
from .rule import Along, Dims, Rule, Scaled, Site
from .sliding import in_order
from .visible import attended, differentiated, named, of_own_shape

__all__ = ["attention", "attention_backward"]

_QUERIES = ("query", "out", "grad_out", "grad_out_", "logsumexp")
_KEYS = ("key", "value")
_MASKS = ("attn_mask", "attn_bias")


class _Dims:
    """The factors of a call: `b` batches, `h` heads of the key, `l` queries, `s` keys."""

    def __init__(self, call: Call, keys: bool = False) -> None:
        query, key = (call.shape(call.get(name)) for name in ("query", "key"))
        self.sizes = {"h": key[1], "b": query[0], "l": query[2]}
        if keys:
            self.sizes["s"] = key[2]
        self.shared = query[1] // max(key[1], 1)  # so many heads of the query have one of the key
        if call.shape(call.get("value"))[1] != key[1] or key[1] * self.shared != query[1]:
            del self.sizes["h"]
        if not _cuts_queries(call):
            del self.sizes["l"]
        self._full = (query[0], query[1], query[2])
        self._keys = key[2]

    def queries(self, shape: Sequence[int], keys: bool = False) -> Dims:
        """Dims of what has a place for each query, and with `keys` one for each key."""
        link = Scaled(self.shared) if self.shared > 1 else None
        full = (Along("b"), Along("h", link), Along("l"), *([Along("s")] if keys else []))
        return self._known(full, (*self._full, self._keys), shape)

    def keys(self, shape: Sequence[int]) -> Dims:
        full = (Along("b"), Along("h"), Along("s"))
        return self._known(full, (self._full[0], self._full[1] // self.shared, self._keys), shape)

    def mask(self, shape: Sequence[int]) -> Dims:
        """Dims of a mask, which may broadcast."""
        lead = 4 - len(shape)
        return self.queries((1,) * lead + tuple(shape), keys=True)[lead:]

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


def _cuts_queries(call: Call) -> bool:
    """Whether a kernel can be given some of the queries alone: some pad the logsumexp."""
    at = call.get("logsumexp")
    padded = call.results[1].shape if at is None else call.shape(at)
    return "efficient" not in call.name or padded[2] == 0


def _rule(call: Call, outputs: Sequence[Dims], dims: _Dims, **options: Any) -> Rule:
    names = [name for name, value in call.values.items() if isinstance(value, Operand)]
    inputs = tuple(
        dims.operand(name, spec.meta.shape) for name, spec in zip(names, call.specs, strict=True)
    )
    rest = tuple((None,) * len(meta.shape) for meta in call.results[len(outputs) :])
    query, key = call.get("query"), call.get("key")
    whole = (call.shape(query)[2], call.shape(key)[2])

    def unless(site: Site) -> bool:
        return _lengths(site, query, key) == whole and _has_places(site, query, key)

    made = (*outputs, *rest)
    # Seeds, which nothing uses without dropout, and a logsumexp that nobody asked for.
    alike = set(range(len(outputs), len(made)))
    alike |= {index for index, meta in enumerate(call.results) if 0 in meta.shape}
    return Rule(
        inputs,
        made,
        dims.sizes,
        alike=frozenset(alike),
        local=_local(call, whole),
        unless=unless,
        placed=frozenset("ls"),
        **options,
    )


def _lengths(site: Site, query: int, key: int) -> tuple[int, int]:
    rows, keys = site.box(query)[2], site.box(key)[2]
    return rows[1] - rows[0], keys[1] - keys[0]


def _has_places(site: Site, *operands: int) -> bool:
    return not any(0 in site.inputs[operand].local_shape(site.coord) for operand in operands)


def _local(call: Call, whole: tuple[int, int]) -> Any:
    """The local call: nothing for an empty shard, and in blocks if some of the places are here."""
    query, key = call.get("query"), call.get("key")

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        given = named(op, args, kwargs)
        if not _has_places(site, query, key):
            return _none(call, given["query"], site)
        if _lengths(site, query, key) == whole:
            return op(*args, **kwargs)
        rows, keys = site.box(query)[2], site.box(key)[2]
        made = _none(call, given["query"], site)
        own: Sequence[torch.Tensor | None]
        if "logsumexp" in given:
            shapes = [None if value is None else value.shape for value in made]
            own = differentiated(op, given, rows, keys, shapes)
        else:
            out, lse = attended(op, given, rows, keys)
            own = [out, of_own_shape(lse.masked_fill(lse == -inf, 0), site.out_shapes[1])]
        for at, value in enumerate(own):
            spec = site.outputs[min(at, len(site.outputs) - 1)]
            made[at] = None if value is None else in_order(value.to(spec.dtype), spec)
        return made

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
    """The gradients of the query, and of key and value, to which every query has a share.

    Kernels take the logsumexp of all keys, so that each can be given some of them.
    """
    dims = _Dims(call, keys=True)
    query, key, value, *bias = (meta.shape for meta in call.results)
    outputs = [dims.queries(query), dims.keys(key), dims.keys(value), *map(dims.mask, bias)]
    return _rule(call, outputs, dims)
