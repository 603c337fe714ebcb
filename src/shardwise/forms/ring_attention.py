"""A ring of key and value blocks: queries stay, and the blocks of the others go round.

In each round a rank has the block of one other rank, while the next one is under way. So no rank
ever holds all keys. The results of the rounds are joined by their logsumexp. In the backward pass
the gradients of a block go home to its owner, which adds them up.

Consecutive shards of a causal sequence are unequal work: the first rank sees one block, the last
one all. With `Shard(2, split=8)` every rank has early and late queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..layout.geometry import (
    Interval,
    contiguous_stride,
    flat_index,
    memory_order,
    stride_like,
)
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute import DimMap, Layout, Ready, Step, bytes_received, move, start_together
from ..storage import policy
from ..storage.wrapper import Locals, wrap

_SEQUENCE = 2
_KEYS = ("key", "value")


@lru_cache(maxsize=1024)
def held_intervals(spec: DTensorSpec) -> tuple[tuple[Interval, ...], ...]:
    """The intervals of the sequence that each of its shards holds, in the order of memory."""
    count, size = spec.groups[_SEQUENCE] if spec.groups else (1, spec.meta.shape[_SEQUENCE])
    pieces = (spec.fine or spec).pieces(_fine_dim(spec))
    return tuple(
        tuple((block * size + a, block * size + b) for block in range(count)) for a, b in pieces
    )


def rows_of(spec: DTensorSpec, meta: TensorMeta) -> DTensorSpec:
    """The layout of a tensor that has all dims of another but the last."""
    cuts = None if spec.cuts is None else spec.cuts[:-1]
    return DTensorSpec(spec.topology, spec.placements, meta, cuts=cuts)


def _fine_dim(spec: DTensorSpec) -> int:
    """The dim that is sharded, of a tensor whose sequence is split into its blocks."""
    return _SEQUENCE if spec.groups is None else _SEQUENCE + 1


@lru_cache(maxsize=1024)
def _turn(spec: DTensorSpec, by: int, causal: bool) -> tuple[Step, Step]:
    """The step that gives each rank the block of the rank `by` before it, and the one that brings
    home what was made of it. A block that a rank does not see stays where it is."""
    home, dim, held = Layout.of(spec.fine or spec), _fine_dim(spec), held_intervals(spec)
    axes, pieces = home.dims[dim]
    count = len(pieces)

    def block(rank: int, owner: int) -> Interval:
        unseen = causal and held[owner][0][0] >= held[rank][-1][1]
        return (0, 0) if unseen else pieces[owner]

    def layout(table: Sequence[Interval]) -> Layout:
        own = DimMap(axes, tuple(table))
        return home.with_dims((*home.dims[:dim], own, *home.dims[dim + 1 :]))

    away = layout([block(rank, (rank - by) % count) for rank in range(count)])
    back = layout([block((owner + by) % count, owner) for owner in range(count)])
    return move(home, away), move(away, back)


def _visible(
    queries: Sequence[Interval], keys: Sequence[Interval], causal: bool
) -> list[tuple[slice, slice, bool]]:
    """Which rows of the queries see which keys of a block, and whether that is causal.

    Two intervals are equal or do not overlap.

    >>> _visible([(0, 2), (8, 10)], [(2, 4), (10, 12)], True)
    [(slice(2, 4, None), slice(0, 2, None), False)]
    """
    lengths = [sum(b - a for a, b in held) for held in (queries, keys)]
    if not all(lengths):
        return []
    if not causal:
        return [(slice(0, lengths[0]), slice(0, lengths[1]), False)]
    found, at = [], 0
    for start, stop in queries:
        rows, at = slice(at, at + stop - start), at + stop - start
        before = sum(b - a for a, b in keys if b <= start)
        if before:
            found.append((rows, slice(0, before), False))
        if (start, stop) in keys:
            found.append((rows, slice(before, before + stop - start), True))
    return found


@dataclass(frozen=True)
class Ring:
    """A call of attention: the layouts and local tensors of its operands by name, and its other
    arguments."""

    op: Any
    specs: dict[str, DTensorSpec]
    parts: dict[str, Locals]
    rest: dict[str, Any]

    @property
    def causal(self) -> bool:
        return bool(self.rest["is_causal"])

    @property
    def count(self) -> int:
        return len(held_intervals(self.specs["query"]))

    def calls(self, by: int, blocks: Sequence[Locals]) -> Iterator[tuple[int, slice, slice, Any]]:
        """The results of the kernel in a round: for which local tensor, rows and keys, and what."""
        query, key = self.specs["query"], self.specs["key"]
        for slot, coord in enumerate(query.slots):
            at = flat_index(coord, query.topology.shape, query.dim_axes[_SEQUENCE])
            held = held_intervals(query)[at], held_intervals(key)[(at - by) % self.count]
            for rows, columns, causal in _visible(*held, self.causal):
                given = {
                    n: own[slot][:, :, rows] for n, own in self.parts.items() if n not in _KEYS
                }
                for name, block in zip(_KEYS, blocks, strict=True):
                    given[name] = block[slot][:, :, columns]
                yield slot, rows, columns, self.op(**self.rest | given | {"is_causal": causal})

    def rounds(self) -> Iterator[tuple[int, list[Locals]]]:
        """The blocks that pass by: the own ones, then those of the rank before, and so on."""
        own = [self.parts[name] for name in _KEYS]
        now = own.copy()
        for by in range(self.count):
            later = self.start(by + 1, own) if by + 1 < self.count else []
            yield by, now
            now.clear()  # whoever holds the list lets go of the blocks
            now += self.take(later)

    def start(self, by: int, blocks: Sequence[Locals], home: bool = False) -> list[Ready]:
        """Send blocks to the rank `by` after this one, or what was made of them home."""
        specs = [self.specs[name] for name in _KEYS]
        steps = [_turn(spec, by, self.causal)[home] for spec in specs]
        fine = [_split(spec, parts) for spec, parts in zip(specs, blocks, strict=True)]
        return start_together(steps, fine, [(spec.fine or spec).stride for spec in specs])

    def take(self, ready: Sequence[Ready]) -> list[Locals]:
        """The received tensor, once it is here."""
        blocks = self.specs["key"].groups
        arrived = [get() for get in ready]
        return [tuple(t.flatten(2, 3) for t in parts) if blocks else parts for parts in arrived]

    def announce(self, passes: int) -> None:
        """Tell of the rounds, as the policy on implicit communication says."""
        if policy.current().moves == "auto":
            return
        specs = [self.specs[name] for name in _KEYS]
        sizes = [spec.dtype.itemsize for spec in specs]
        turns = [[_turn(s, by, self.causal)[0] for s in specs] for by in range(1, self.count)]
        received = passes * sum(bytes_received(steps, sizes) for steps in turns)
        rounds = f"{passes * len(turns)} exchanges, {received} B received per rank"
        policy.on_moves(self.op, [f"blocks of keys and values ({rounds})"])


def _split(spec: DTensorSpec, parts: Locals) -> Locals:
    """Local tensors with the sequence split into the blocks of its layout."""
    if spec.groups is None:
        return parts
    count = spec.groups[_SEQUENCE][0]
    return tuple(part.unflatten(2, (count, part.shape[2] // count)) for part in parts)


@dataclass(frozen=True)
class _Sums:
    """A result that grows: its layout, and local tensors of at least single precision."""

    spec: DTensorSpec
    parts: list[torch.Tensor]

    @classmethod
    def like(cls, spec: DTensorSpec, parts: Locals) -> _Sums:
        """Zeros, dense in memory, with the dims in the order of `spec`."""
        order, dtype = memory_order(spec.stride), torch.promote_types(spec.dtype, torch.float32)
        meta = TensorMeta(spec.meta.shape, stride_like(spec.meta.shape, order), spec.dtype)
        strides = [stride_like(part.shape, order) for part in parts]
        pairs = zip(parts, strides, strict=True)
        made = [p.new_empty_strided(p.shape, s, dtype=dtype).zero_() for p, s in pairs]
        return cls(spec.with_meta(meta), made)

    def cast(self) -> Locals:
        return tuple(part.to(self.spec.dtype) for part in self.parts)

    def result(self) -> Any:
        return wrap(self.spec, self.cast())


def attention(ring: Ring) -> tuple[Any, Any]:
    """The result and its logsumexp."""
    ring.announce(1)
    spec = ring.specs["query"]
    out = _Sums.like(spec, ring.parts["query"])
    lses = [part.new_full(part.shape[:-1], -torch.inf) for part in out.parts]
    for by, blocks in ring.rounds():
        for slot, rows, _, (part, lse) in ring.calls(by, blocks):
            _join(out.parts[slot][:, :, rows], lses[slot][:, :, rows], part, lse)
    shape, dtype = spec.meta.shape[:-1], torch.promote_types(spec.dtype, torch.float32)
    meta = TensorMeta(shape, contiguous_stride(shape), dtype)
    return out.result(), wrap(rows_of(spec, meta), tuple(lses))


def _join(out: Any, lse: Any, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Join the result over more keys to `out`, and its logsumexp to `lse`, in place."""
    both = torch.logaddexp(lse, part_lse)
    old, new = (torch.exp(each - both).unsqueeze(-1) for each in (lse, part_lse))
    out.mul_(old).add_(part * new)
    lse.copy_(both)


def attention_backward(ring: Ring) -> tuple[Any, ...]:
    """The gradients of query, key and value."""
    ring.announce(2)
    grad = _Sums.like(ring.specs["query"], ring.parts["query"])
    homes = [_Sums.like(ring.specs[name], ring.parts[name]) for name in _KEYS]
    under_way: list[Ready] = []
    for by, blocks in ring.rounds():
        sums = homes
        if by:
            sums = [_Sums.like(home.spec, block) for home, block in zip(homes, blocks, strict=True)]
        for slot, rows, columns, (of_query, *of_keys) in ring.calls(by, blocks):
            grad.parts[slot][:, :, rows] += of_query
            for each, part in zip(sums, of_keys, strict=True):
                each.parts[slot][:, :, columns] += part
        _add(homes, ring.take(under_way))
        under_way = ring.start(by, [each.cast() for each in sums], home=True) if by else []
    _add(homes, ring.take(under_way))
    return grad.result(), *(home.result() for home in homes)


def _add(homes: Sequence[_Sums], arrived: Sequence[Locals]) -> None:
    """Add the gradients that came home; a rank whose block nobody saw gets none."""
    for home, parts in zip(homes, arrived, strict=False):
        for total, part in zip(home.parts, parts, strict=True):
            if part.numel():
                total += part
