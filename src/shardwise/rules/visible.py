"""Attention of some queries to some keys, by the kernels that attend all to all.

A causal kernel knows no places: it takes queries and keys that begin together. What some queries
see of some keys is made of few blocks, each of which is seen whole, or begins together; results of
blocks are joined by their logsumexp, as those of ranks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from ..layout.geometry import Interval

__all__ = [
    "Given",
    "attended",
    "blocks",
    "differentiated",
    "named",
    "of_own_shape",
    "without_shape",
]

Given = dict[str, Any]
"""The arguments of a call by name."""

_BY_ROWS = ("query", "out", "grad_out", "grad_out_")
_BY_KEYS = ("key", "value")
_MASKS = ("attn_mask", "attn_bias")


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


def named(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Given:
    """The arguments of a call by name, with those that were not given."""
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given |= dict(zip(given, args, strict=False))
    return {**given, **kwargs}


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
