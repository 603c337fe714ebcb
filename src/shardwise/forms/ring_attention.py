"""A ring of key and value blocks: queries stay, and the blocks of the others go round.

In each round a rank has the block of one other rank, while the next one is under way. So no rank
ever holds all keys. The results of the rounds are joined by their logsumexp. In the backward pass
the gradients of a block go home to its owner, which adds them up. Large blocks go round in pieces,
so that what is under way is small beside what a rank holds.

Consecutive shards of a causal sequence are unequal work: the first rank sees one block, the last
one all. With `Shard(2, split=8)` every rank has early and late queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch

from ..comm.step import Step, bytes_received
from ..layout.geometry import (
    Interval,
    contiguous_stride,
    flat_index,
    memory_order,
    stride_like,
)
from ..layout.layout import DimMap, Layout
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute.execute import Ready, start_together
from ..redistribute.routes import move
from ..storage import policy
from ..storage.wrapper import Locals, wrap

_SEQUENCE = 2
_KEYS = ("key", "value")
PIECE = 1 << 18
"""The bytes of keys and values that go round at a time, at least."""
_PIECES = 8
"""The most pieces of a block."""
Piece = tuple[int, int]
"""The index of a piece of a block, and how many there are."""
Turn = tuple[int, Piece]
"""How many ranks a piece has passed, and which one it is."""


def _cut(interval: Interval, piece: Piece) -> Interval:
    """A piece of an interval.

    >>> _cut((10, 17), (0, 2)), _cut((10, 17), (1, 2))
    ((10, 13), (13, 17))
    """
    (start, stop), (index, count) = interval, piece
    return tuple(start + (stop - start) * at // count for at in (index, index + 1))  # type: ignore


@lru_cache(maxsize=1024)
def held_intervals(spec: DTensorSpec, piece: Piece = (0, 1)) -> tuple[tuple[Interval, ...], ...]:
    """The intervals of the sequence that each of its shards holds, in the order of memory, or those
    in a piece: some blocks, or a part of the interval."""
    pieces = spec.fine.pieces(_fine_dim(spec))
    if spec.groups is None:
        return tuple((_cut(held, piece),) for held in pieces)
    count, size = spec.groups[_SEQUENCE]
    blocks = range(*_cut((0, count), piece))
    return tuple(tuple((block * size + a, block * size + b) for block in blocks) for a, b in pieces)


def rows_of(spec: DTensorSpec, meta: TensorMeta) -> DTensorSpec:
    """The layout of a tensor that has all dims of another but the last."""
    cuts = None if spec.cuts is None else spec.cuts[:-1]
    return DTensorSpec(spec.topology, spec.placements, meta, cuts=cuts)


def _fine_dim(spec: DTensorSpec) -> int:
    """The dim that is sharded, of a tensor whose sequence is split into its blocks."""
    return _SEQUENCE if spec.groups is None else _SEQUENCE + 1


@lru_cache(maxsize=4096)
def _turn(spec: DTensorSpec, turn: Turn, causal: bool) -> tuple[Step, Step]:
    """The step that gives each rank a piece of the block of the rank `by` before it, and the one
    that brings home what was made of it. A piece that a rank does not see stays where it is."""
    by, piece = turn
    home, dim = spec.layout, _fine_dim(spec)
    queries, keys = held_intervals(spec), held_intervals(spec, piece)
    axes, table = home.dims[dim]
    count, dims = len(table), list(home.dims)
    if spec.groups is None:
        table = tuple(_cut(each, piece) for each in table)
    else:
        dims[_SEQUENCE] = DimMap((), (_cut((0, spec.groups[_SEQUENCE][0]), piece),))

    def block(rank: int, owner: int) -> Interval:
        unseen = causal and keys[owner][0][0] >= queries[rank][-1][1]
        return (0, 0) if unseen else table[owner]

    def layout(table: Sequence[Interval]) -> Layout:
        return home.with_dims((*dims[:dim], DimMap(axes, tuple(table)), *dims[dim + 1 :]))

    away = layout([block(rank, (rank - by) % count) for rank in range(count)])
    back = layout([block((owner + by) % count, owner) for owner in range(count)])
    order = memory_order(spec.fine.stride)
    return replace(move(home, away), order=order), replace(move(away, back), order=order)


def _visible(
    queries: Sequence[Interval], keys: Sequence[Interval], causal: bool
) -> list[tuple[slice, slice, bool]]:
    """Which rows of the queries see which keys of a piece, and whether that is causal.

    An interval of the keys is inside of one of the queries, or overlaps none.

    >>> _visible([(0, 2), (8, 10)], [(2, 4), (10, 12)], True)
    [(slice(2, 4, None), slice(0, 2, None), False)]
    """
    total, width = (sum(b - a for a, b in held) for held in (queries, keys))
    if not total or not width:
        return []
    if not causal:
        return [(slice(0, total), slice(0, width), False)]
    found, at = [], 0
    for start, stop in keys:
        columns, at = slice(at, at + stop - start), at + stop - start
        # rows are in the order of the sequence
        before, until = (sum(max(0, min(b, end) - a) for a, b in queries) for end in (start, stop))
        if before < until:
            found.append((slice(before, until), columns, True))
        if until < total and start < stop:
            found.append((slice(until, total), columns, False))
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

    @property
    def turns(self) -> list[Turn]:
        """The pieces in the order in which they pass by a rank, its own ones first."""
        specs = [self.specs[name] for name in _KEYS]
        nbytes = sum(prod(spec.largest_shape) * spec.dtype.itemsize for spec in specs)
        blocks = specs[0].groups[_SEQUENCE][0] if specs[0].groups else _PIECES
        pieces = max(1, min(nbytes // PIECE, blocks, _PIECES))
        return [(by, (at, pieces)) for by in range(self.count) for at in range(pieces)]

    def calls(
        self, turn: Turn, blocks: Sequence[Locals]
    ) -> Iterator[tuple[int, slice, slice, Any]]:
        """The results of the kernel for a piece, with their local tensor, rows and keys."""
        by, piece = turn
        query, key = self.specs["query"], self.specs["key"]
        for slot, coord in enumerate(query.slots):
            at = flat_index(coord, query.topology.shape, query.dim_axes[_SEQUENCE])
            held = held_intervals(query)[at], held_intervals(key, piece)[(at - by) % self.count]
            for rows, columns, causal in _visible(*held, self.causal):
                given = {
                    n: own[slot][:, :, rows] for n, own in self.parts.items() if n not in _KEYS
                }
                for name, block in zip(_KEYS, blocks, strict=True):
                    given[name] = block[slot][:, :, columns]
                yield slot, rows, columns, self.op(**self.rest | given | {"is_causal": causal})

    def rounds(self) -> Iterator[tuple[Turn, list[Locals]]]:
        """The pieces that pass by; the next one is under way."""
        own, turns = [self.parts[name] for name in _KEYS], self.turns
        now: list[Locals] = []
        later = self.start(turns[0], own)
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            now.clear()  # whoever holds the list lets go of the blocks
            now += self.take(later)
            later = self.start(following, own) if following else []
            yield turn, now

    def start(self, turn: Turn, blocks: Sequence[Locals], home: bool = False) -> list[Ready]:
        """Send a piece of the blocks `by` ranks on, or what was made of it home."""
        by, piece = turn
        specs = [self.specs[name] for name in _KEYS]
        pairs = list(zip(specs, blocks, strict=True))
        if not by:
            return [
                partial(_split, spec, _piece(spec, parts, piece), piece) for spec, parts in pairs
            ]
        steps = [_turn(spec, turn, self.causal)[home] for spec in specs]
        fine = [_split(spec, parts, piece if home else (0, 1)) for spec, parts in pairs]
        return start_together(list(zip(steps, fine, strict=True)))

    def take(self, ready: Sequence[Ready]) -> list[Locals]:
        """The received tensors, once they are here."""
        blocks = self.specs["key"].groups
        arrived = [get() for get in ready]
        return [tuple(t.flatten(2, 3) for t in parts) if blocks else parts for parts in arrived]

    def announce(self, passes: int) -> None:
        """Tell of the rounds, as the policy on implicit communication says."""
        if policy.current().moves == "auto":
            return
        specs = [self.specs[name] for name in _KEYS]
        sizes = [spec.dtype.itemsize for spec in specs]
        steps = [[_turn(s, turn, self.causal)[0] for s in specs] for turn in self.turns if turn[0]]
        received = passes * sum(bytes_received(each, sizes) for each in steps)
        rounds = f"{passes * len(steps)} exchanges, {received} B received per rank"
        policy.on_moves(self.op, [f"blocks of keys and values ({rounds})"])


def _split(spec: DTensorSpec, parts: Locals, piece: Piece) -> Locals:
    """Local tensors of a piece with the sequence split into the blocks of its layout."""
    if spec.groups is None:
        return parts
    start, stop = _cut((0, spec.groups[_SEQUENCE][0]), piece)
    return tuple(t.unflatten(2, (stop - start, t.shape[2] // (stop - start))) for t in parts)


def _piece(spec: DTensorSpec, parts: Sequence[torch.Tensor], piece: Piece) -> Locals:
    """A piece of local tensors, as views."""
    found = []
    for part in parts:
        length = part.shape[_SEQUENCE]
        count = length if spec.groups is None else spec.groups[_SEQUENCE][0]
        start, stop = (length // max(count, 1) * at for at in _cut((0, count), piece))
        found.append(part[:, :, start:stop])
    return tuple(found)


@dataclass(frozen=True)
class _Sums:
    """A result that grows: its layout, and local tensors of at least single precision."""

    spec: DTensorSpec
    parts: Sequence[torch.Tensor]

    @classmethod
    def like(cls, spec: DTensorSpec, parts: Locals) -> _Sums:
        """Zeros, dense in memory, with the dims in the order of `spec`."""
        order, dtype = memory_order(spec.stride), torch.promote_types(spec.dtype, torch.float32)
        meta = TensorMeta(spec.meta.shape, stride_like(spec.meta.shape, order), spec.dtype)
        strides = [stride_like(part.shape, order) for part in parts]
        pairs = zip(parts, strides, strict=True)
        made = [p.new_empty_strided(p.shape, s, dtype=dtype).zero_() for p, s in pairs]
        return cls(spec.with_meta(meta), made)

    def piece(self, piece: Piece) -> _Sums:
        """The sums of a piece, in the same memory."""
        return _Sums(self.spec, _piece(self.spec, self.parts, piece))

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
    for turn, blocks in ring.rounds():
        for slot, rows, _, found in ring.calls(turn, blocks):
            _join(out.parts[slot][:, :, rows], lses[slot][:, :, rows], *found)
            del found  # before the next piece comes
    shape, dtype = spec.meta.shape[:-1], torch.promote_types(spec.dtype, torch.float32)
    meta = TensorMeta(shape, contiguous_stride(shape), dtype)
    return out.result(), wrap(rows_of(spec, meta), tuple(lses))


def _join(out: Any, lse: Any, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Join the result over more keys to `out`, and its logsumexp to `lse`, in place."""
    both = torch.logaddexp(lse, part_lse)
    old, new = (torch.exp(each - both).unsqueeze(-1) for each in (lse, part_lse))
    out.mul_(old).addcmul_(part, new)
    lse.copy_(both)


def attention_backward(ring: Ring) -> tuple[Any, ...]:
    """The gradients of query, key and value."""
    ring.announce(2)
    grad = _Sums.like(ring.specs["query"], ring.parts["query"])
    homes = [_Sums.like(ring.specs[name], ring.parts[name]) for name in _KEYS]
    under_way: tuple[Piece, list[Ready]] = (0, 1), []
    for turn, blocks in ring.rounds():
        by, piece = turn
        if by:
            pairs = zip(homes, blocks, strict=True)
            sums = [_Sums.like(home.spec, block) for home, block in pairs]
        else:
            sums = [home.piece(piece) for home in homes]
        for slot, rows, columns, found in ring.calls(turn, blocks):
            for total, at, part in zip((grad, *sums), (rows, columns, columns), found, strict=True):
                total.parts[slot][:, :, at] += part
            del found, part  # before gradients come home
        _add(ring, homes, *under_way)
        ready = ring.start(turn, [each.cast() for each in sums], home=True) if by else []
        under_way = piece, ready
    _add(ring, homes, *under_way)
    return grad.result(), *(home.result() for home in homes)


def _add(ring: Ring, homes: Sequence[_Sums], piece: Piece, ready: Sequence[Ready]) -> None:
    """Add the gradients of a piece that came home; a rank whose piece nobody saw gets none."""
    for home, parts in zip(homes, ring.take(ready), strict=False):
        for total, part in zip(home.piece(piece).parts, parts, strict=True):
            if part.numel():
                total += part
