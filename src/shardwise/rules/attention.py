"""Attention in all its backends: batches, heads and queries are apart, in the gradient keys too.
(forms/attention.py has the forward pass over sharded keys.)

Backends differ in what they return besides the result and its logsumexp, so operands are found by
name. A causal kernel takes queries and keys that begin at the same position. What some queries see
of some keys is made of few blocks, which are seen whole or begin together. The results of blocks
are joined by their logsumexp, as those of ranks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from ..layout.geometry import Interval
from ..storage.match_meta import in_memory_order
from .language import (
    Along,
    Call,
    Dims,
    Rule,
    Scaled,
    Site,
    along,
    named,
    unless_empty,
    zeros_at,
)

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
    inputs = tuple(
        dims.operand(name, spec.meta.shape)
        for name, spec in zip(call.operand_names, call.specs, strict=True)
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
            return zeros_at(call, site, given["query"])
        if _lengths(site, query, key) == whole:
            return op(*args, **kwargs)
        rows, keys = site.box(query)[2], site.box(key)[2]
        made = list(zeros_at(call, site, given["query"]))
        own: Sequence[torch.Tensor | None]
        if "logsumexp" in given:
            shapes = [None if value is None else value.shape for value in made]
            own = differentiated(op, given, rows, keys, shapes)
        else:
            out, lse = attended(op, given, rows, keys)
            own = [out, of_own_shape(lse.masked_fill(lse == -inf, 0), site.out_shapes[1])]
        for at, value in enumerate(own):
            spec = site.outputs[min(at, len(site.outputs) - 1)]
            made[at] = None if value is None else in_memory_order(spec, value.to(spec.dtype))
        return made

    return local


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


# --- some queries and some keys --------------------------------------------------------------

Given = dict[str, Any]
"""The arguments of a call by name."""

_BY_ROWS = ("query", "out", "grad_out", "grad_out_")
_BY_KEYS = ("key", "value")


@dataclass(frozen=True)
class Block:
    """Queries and keys that see each other: all, or with `causal` those up to the same place."""

    rows: Interval
    keys: Interval
    causal: bool


def blocks(rows: Interval, keys: Interval, causal: bool) -> Iterator[Block]:
    """What queries `rows` see of `keys`, counted from the first of each.

    >>> [(b.rows, b.keys, b.causal) for b in blocks((2, 8), (4, 6), True)]
    [((2, 4), (0, 2), True), ((4, 6), (0, 2), False)]
    """
    (first, last), (start, stop) = rows, keys

    def block(a: int, b: int, c: int, d: int, causal: bool) -> Iterator[Block]:
        if a < b and c < d:
            yield Block((a - first, b - first), (c - start, d - start), causal)

    if not causal:
        yield from block(first, last, start, stop, False)
        return
    at, end = max(first, start), min(last, stop)
    yield from block(at, end, at, end, True)
    yield from block(at, end, start, at, False)
    yield from block(max(first, stop), last, start, stop, False)


def without_shape(lse: torch.Tensor, rows: int) -> torch.Tensor:
    """A logsumexp as [batch, head, query]: some kernels pad it, some have a dim more."""
    return (lse.squeeze(-1) if lse.ndim == 4 else lse)[..., :rows]


def of_own_shape(lse: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A logsumexp in the shape that a kernel gives it."""
    if len(shape) == 4:
        return lse.unsqueeze(-1)
    more = shape[2] - lse.shape[2]
    if more <= 0:
        return lse[..., : shape[2]]
    return torch.cat([lse, lse.new_full((*lse.shape[:2], more), inf)], 2)


def _part(given: Given, block: Block) -> Given:
    """The arguments of the call for one block."""
    part = dict(given)
    (first, last), (start, stop) = block.rows, block.keys
    count, total = given["query"].shape[2], given["key"].shape[2]
    for name in _BY_ROWS:
        if name in given:
            part[name] = given[name][:, :, first:last]
    for name in _BY_KEYS:
        part[name] = given[name][:, :, start:stop]
    for name in _MASKS:
        mask = given.get(name)
        if mask is not None:
            mask = mask[..., start:stop] if mask.shape[-1] == total else mask
            part[name] = mask[..., first:last, :] if mask.shape[-2] == count else mask
    if "logsumexp" in given:
        lse = given["logsumexp"]
        own = without_shape(lse, count)[..., first:last]
        padded = lse.ndim == 3 and lse.shape[2] > count
        rows = -(-(last - first) // 32) * 32 if padded else last - first
        part["logsumexp"] = of_own_shape(own, (*lse.shape[:2], rows, *lse.shape[3:]))
    if "max_q" in given:
        part["max_q"], part["max_k"] = last - first, stop - start
    return part | {"is_causal": block.causal}


def attended(
    op: Any, given: Given, rows: Interval, keys: Interval
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and its logsumexp, of queries and keys that are these places of all.

    A query that sees no key has zeros, and the logarithm of zero.
    """
    query, value = given["query"], given["value"]
    out = query.new_zeros((*query.shape[:3], value.shape[3]))
    lse = query.new_full(query.shape[:3], -inf, dtype=torch.promote_types(query.dtype, torch.float))
    if "compute_log_sumexp" in given:
        given = given | {"compute_log_sumexp": True}
    for block in blocks(rows, keys, given["is_causal"]):
        if not query.numel() or not value.numel():
            break
        part = _part(given, block)
        made = op(**part)
        own = without_shape(made[1], part["query"].shape[2]).to(lse.dtype)
        for name in _MASKS:
            if part.get(name) is not None:
                own = own.masked_fill(~_sees(part[name]), -inf)
        where = (..., slice(*block.rows))
        before, together = lse[where], torch.logaddexp(lse[where], own)
        kept = out[:, :, slice(*block.rows)]
        kept.copy_(_share(kept, before, together) + _share(made[0], own, together))
        lse[where] = together
    return out, lse


def _sees(mask: torch.Tensor) -> torch.Tensor:
    """Which queries see a key: kernels differ in the logsumexp of one that sees none."""
    return (mask if mask.dtype is torch.bool else mask > -inf).any(-1)


def _share(out: torch.Tensor, lse: torch.Tensor, together: torch.Tensor) -> torch.Tensor:
    """What a result adds to one that sees more keys."""
    part = (lse - together).exp().masked_fill(lse == -inf, 0).unsqueeze(-1)
    return torch.where(part == 0, 0, out * part)


def differentiated(
    op: Any, given: Given, rows: Interval, keys: Interval, shapes: Sequence[Sequence[int] | None]
) -> list[torch.Tensor | None]:
    """The gradients of queries, keys, values and perhaps a mask that are these places of all."""
    query = given["query"]
    made = [None if shape is None else query.new_zeros(tuple(shape)) for shape in shapes]
    queries, total = query.shape[2], given["key"].shape[2]
    for block in blocks(rows, keys, given["is_causal"]):
        across, down = slice(*block.keys), slice(*block.rows)
        for at, grad in enumerate(op(**_part(given, block))):
            whole = made[at]
            if grad is None or whole is None:
                made[at] = None  # nobody asked for it
            elif at < 3:
                whole[:, :, across if at else down] += grad
            else:
                own = whole[..., across] if whole.shape[-1] == total else whole
                (own[..., down, :] if own.shape[-2] == queries else own).add_(grad)
    return made


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
