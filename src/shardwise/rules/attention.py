"""Attention in all its backends: batches, heads and queries are apart; keys are whole.

Backends differ in what they return besides the result and its logsumexp, so operands are found by
name. A causal kernel takes queries and keys that begin at the same position. So queries that begin
later see the keys before them in a call that is not causal, and the two results are joined by their
logsumexp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..layout.geometry import Interval
from ..storage.match_meta import in_memory_order
from .language import Along, Call, Dims, Rule, Scaled, Site, along, named, unless_empty, zeros_at

_QUERIES = ("query", "out", "grad_out", "grad_out_", "logsumexp")
_KEYS = ("key", "value")
_MASKS = ("attn_mask", "attn_bias")


class _Factors:
    """The factors of a call: `b` batches, `h` heads of the key, `l` queries."""

    def __init__(self, call: Call) -> None:
        self.query, self.key = (call.shape(call.get(name)) for name in ("query", "key"))
        self.sizes = {"h": self.key[1], "b": self.query[0], "l": self.query[2]}
        shared = self.query[1] // max(self.key[1], 1)  # heads of the query for one of the key
        if call.shape(call.get("value"))[1] != self.key[1] or self.key[1] * shared != self.query[1]:
            del self.sizes["h"]
        if not self._cuts_queries(call):
            del self.sizes["l"]
        heads = Along("h", Scaled(shared) if shared > 1 else None)
        self._of_queries = (Along("b"), heads, Along("l"))

    def _cuts_queries(self, call: Call) -> bool:
        """True if a kernel can be given some of the queries alone: some pad the logsumexp."""
        at = call.get("logsumexp")
        rows = (call.results[1].shape if at is None else call.shape(at))[2]
        if not call.get("is_causal"):
            return rows in (0, self.query[2])
        masked = any(call.get(name) is not None for name in _MASKS)
        return rows == self.query[2] <= self.key[2] and not masked

    def dims(self, name: str, shape: Sequence[int]) -> Dims:
        """The dims of an operand or result. Masks may broadcast, so their last dims count."""
        lead = 4 - len(shape) if name in _MASKS else 0
        every, sizes = self._of_queries[lead:], self.query[lead:]
        if name in _KEYS:
            every, sizes = (Along("b"), Along("h")), self.key
        if name not in (*_QUERIES, *_KEYS, *_MASKS):
            every = ()
        known = [
            at if at.factor in self.sizes and size == here else None
            for at, size, here in zip(every, sizes, shape, strict=False)
        ]
        return (*known, *[None] * (len(shape) - len(known)))


def attention(call: Call) -> Rule:
    """`"b h l _, b h k! _, b h k! _ -> b h l _, b h l"`"""
    return _rule(call, ("out", "logsumexp"), reduce=None)


def attention_backward(call: Call) -> Rule:
    """The gradients of the query, and of key and value, to which every query has a share."""
    return _rule(call, ("query", "key", "value", "attn_mask"))


def _rule(call: Call, results: Sequence[str], **options: Any) -> Rule:
    factors = _Factors(call)
    names = [*results, *[""] * len(call.results)]
    # Seeds, which nothing uses without dropout, and a logsumexp that nobody asked for.
    alike = [i for i, meta in enumerate(call.results) if i >= len(results) or 0 in meta.shape]
    query, key = call.get("query"), call.get("key")

    def is_empty(site: Site) -> bool:
        return any(0 in site.inputs[operand].local_shape(site.coord) for operand in (query, key))

    def has_all_queries(site: Site) -> bool:
        return site.box(query)[2] == (0, factors.query[2])

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        given = named(op, args, kwargs)
        if is_empty(site):
            return zeros_at(call, site, given["query"])
        if has_all_queries(site):
            return op(*args, **kwargs)
        if not given["is_causal"]:
            return op(**given | _lengths(given, given["key"].shape[2]))
        made = _causal(op, given, site.box(query)[2])
        for index, spec in enumerate(site.outputs[: len(results)]):
            made[index] = in_memory_order(spec, made[index])
        return made

    return Rule(
        tuple(map(factors.dims, call.operand_names, [spec.meta.shape for spec in call.specs])),
        tuple(map(factors.dims, names, [meta.shape for meta in call.results])),
        factors.sizes,
        alike=frozenset(alike),
        local=local,
        unless=lambda site: has_all_queries(site) and not is_empty(site),
        placed=frozenset("l"),
        **options,
    )


def _lengths(given: dict[str, Any], keys: int) -> dict[str, int]:
    """The arguments that say how many queries and keys there are, if the kernel takes them."""
    return {"max_q": given["query"].shape[2], "max_k": keys} if "max_q" in given else {}


def _causal(op: Any, given: dict[str, Any], rows: Interval) -> list[Any]:
    """The results of a causal call, or its gradients, for the queries `rows` and all keys."""
    first, last = rows

    def part(start: int, stop: int, causal: bool) -> list[Any]:
        keys = {name: given[name][:, :, start:stop] for name in _KEYS}
        return list(op(**given | keys | _lengths(given, stop - start) | {"is_causal": causal}))

    own = part(first, last, True)
    before = part(0, first, False) if first else None
    if "logsumexp" in given:
        for index, name in enumerate(_KEYS, 1):
            whole = torch.zeros_like(given[name])
            whole[:, :, first:last] = own[index]
            if before is not None:
                whole[:, :, :first] = before[index]
            own[index] = whole
        own[0] = own[0] if before is None else own[0] + before[0]
    elif before is not None:
        own[:2] = _joined(before[:2], own[:2])
    return own


def _joined(*results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The result over all keys, and its logsumexp, from those over two parts of the keys."""
    together = torch.logaddexp(*(lse for _, lse in results))
    weights = [(lse - together).exp() for _, lse in results]
    wide = [weight if weight.ndim == 4 else weight.unsqueeze(-1) for weight in weights]
    out = sum(part * weight for (part, _), weight in zip(results, wide, strict=True))
    return out.to(results[0][0].dtype), together  # type: ignore[union-attr]


# --- layers that PyTorch runs as one kernel --------------------------------------------------

_PADDING, _BOTH = 1, 2


def encoder_layer(call: Call) -> Rule:
    """The fast paths of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` without gradients:
    batches are apart."""
    batched = {"query", "key", "value", "src"}
    if call.get("mask_type") in (_PADDING, _BOTH):  # other masks are the same for all batches
        batched.add("mask")
    return Rule(
        tuple(
            along(["b" if name in batched and dim == 0 else None for dim in range(spec.ndim)])
            for name, spec in zip(call.operand_names, call.specs, strict=True)
        ),
        tuple(along(["b", *[None] * (len(meta.shape) - 1)]) for meta in call.results),
        {"b": call.shape(0)[0]},
        reduce=None,
        **unless_empty(call),
    )
