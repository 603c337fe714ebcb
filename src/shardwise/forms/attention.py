"""Attention over a sharded sequence: queries stay, and the blocks of keys and values go round.

In each round a rank has the block of one other rank, while the next one is under way. So no rank
ever holds all keys. The results of the rounds are joined by their logsumexp. In the backward pass
the gradients of a block go home to its owner, which adds them up.

Consecutive shards of a causal sequence are unequal work: the first rank sees one block, the last
one all. With `Shard(2, split=8)` every rank has early and late queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch

from ..dispatch.operator import register_form
from ..layout.geometry import (
    Interval,
    contiguous_stride,
    flat_index,
    memory_order,
    stride_like,
)
from ..layout.placement import Placement
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute import (
    DimMap,
    Layout,
    Ready,
    Step,
    bytes_received,
    move,
    start_together,
    steps_between,
)
from ..rules import Call
from ..rules.language import named
from ..storage import policy
from ..storage.ragged import as_dtensor, move_to
from ..storage.wrapper import Locals, wrap

_NAMES = ("query", "key", "value", "out", "grad_out", "logsumexp")
_HEADS, _SEQUENCE = 1, 2
Specs = dict[str, DTensorSpec]


# --- layouts --------------------------------------------------------------------------------------


def _layouts(given: Specs, causal: bool) -> Specs | None:
    """The layouts of the operands for the ring; None if it does not serve the call."""
    query, key, value = (given[name] for name in _NAMES[:3])
    sizes, others = query.meta.shape, key.meta.shape
    shared = sizes[_HEADS] // max(others[_HEADS], 1)
    alike = query.dim_axes[_SEQUENCE] == key.dim_axes[_SEQUENCE] != ()
    longer = sizes[_SEQUENCE] != others[_SEQUENCE]
    plain = others == value.meta.shape and others[_HEADS] * shared == sizes[_HEADS]
    if not (alike and plain) or (longer and causal) or not prod(sizes) or not prod(others):
        return None
    query = query.reduced
    target = _beside(query, key.reduced if longer else query, key.meta, shared)
    if target is None or not (_is_simple(query) and _is_simple(target)):
        return None
    found = {"query": query, "key": target, "value": target.with_meta(value.meta)}
    for name in _NAMES[3:5]:
        if name in given:
            found[name] = query.with_meta(given[name].meta)
    if "logsumexp" in given:
        found["logsumexp"] = _without_last(query, given["logsumexp"].meta)
    return found


def _beside(
    query: DTensorSpec, sequence: DTensorSpec, meta: TensorMeta, shared: int
) -> DTensorSpec | None:
    """The layout of keys: batches and heads as in `query`, the sequence as in `sequence`."""
    axes = query.dim_axes[_SEQUENCE]
    pairs = zip(query.placements, sequence.placements, strict=True)
    places: list[Placement] = [b if axis in axes else a for axis, (a, b) in enumerate(pairs)]
    nothing = (None,) * (sequence.fine or sequence).ndim
    heads = (query.cuts or nothing)[_HEADS]
    fewer = None if heads is None else [size // shared for size in heads]
    cuts = [(query.cuts or nothing)[0], fewer, *(sequence.cuts or nothing)[_SEQUENCE:]]
    made = DTensorSpec(query.topology, places, meta, cuts=cuts)
    have, want = ((spec.fine or spec).dim_cuts[_HEADS] for spec in (made, query))
    return made if tuple(size * shared for size in have) == want else None


def _is_simple(spec: DTensorSpec) -> bool:
    """True if only batches, heads and the sequence are sharded, and only the sequence in blocks."""
    axes = spec.dim_axes
    if axes[-1] or spec.groups is None:
        return not axes[-1]
    lone = [len(group) == 1 for dim, group in enumerate(spec.groups) if dim != _SEQUENCE]
    fine = spec.fine or spec
    return all(lone) and len(spec.groups[2]) == 2 and fine.dim_axes[3] == axes[_SEQUENCE]


def _without_last(spec: DTensorSpec, meta: TensorMeta) -> DTensorSpec:
    cuts = None if spec.cuts is None else spec.cuts[:-1]
    return DTensorSpec(spec.topology, spec.placements, meta, cuts=cuts)


@lru_cache(maxsize=1024)
def _held(spec: DTensorSpec) -> tuple[tuple[Interval, ...], ...]:
    """The intervals of the sequence that each of its shards holds, in the order of memory."""
    count, size = spec.groups[2] if spec.groups else (1, spec.meta.shape[_SEQUENCE])
    pieces = (spec.fine or spec).pieces(_SEQUENCE + (spec.groups is not None))
    return tuple(
        tuple((block * size + a, block * size + b) for block in range(count)) for a, b in pieces
    )


# --- price ----------------------------------------------------------------------------------------


def _cost(passes: int, results: Sequence[str], call: Call) -> Sequence[int] | None:
    """The bytes of a ring, whose rounds run beside the kernels and so are one start.

    The other way is to exchange shards of the sequence for shards of the heads. Where heads do not
    go round, the ring wins. Else the results of the exchange must come back: an even ring is
    charged that much less, and one in which the last rank has most of the work is not.
    """
    names = zip(call.operand_names, call.laid, strict=True)
    given = {name: spec for name, spec in names if name in _NAMES}
    causal = call.get("is_causal")
    found = _layouts(given, causal) if call.get("attn_mask") is None else None
    if found is None:
        return None
    key, count = found["key"], len(_held(found["key"]))
    if key.largest_shape[_HEADS] % count:
        return ()
    sizes = {name: prod(spec.largest_shape) * spec.dtype.itemsize for name, spec in found.items()}
    ring = passes * (count - 1) * (sizes["key"] + sizes["value"])
    if not causal or key.groups is not None:
        ring -= sum(sizes[name] for name in results) * (count - 1) // count
    moves = [(spec, step) for n, spec in given.items() for step in steps_between(spec, found[n])]
    before = [step.elements_received * spec.dtype.itemsize for spec, step in moves]
    return [max(ring, 0), *(nbytes for nbytes in before if nbytes)]


# --- the ring -------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _turn(spec: DTensorSpec, by: int, causal: bool) -> tuple[Step, Step]:
    """The step that gives each rank the block of the rank `by` before it, and the one that brings
    home what was made of it. A block that a rank does not see stays where it is."""
    home = Layout.of(spec.fine or spec)
    dim = _SEQUENCE + (spec.groups is not None)
    axes, pieces = home.dims[dim]
    count, held = len(pieces), _held(spec)

    def is_seen(rank: int, owner: int) -> bool:
        return not causal or held[owner][0][0] < held[rank][-1][1]

    def moved(table: Sequence[Interval]) -> Layout:
        dims = [DimMap(axes, tuple(table)) if at == dim else d for at, d in enumerate(home.dims)]
        return home.with_dims(dims)

    def chosen(rank: int, owner: int) -> Interval:
        return pieces[owner] if is_seen(rank, owner) else (0, 0)

    away = moved([chosen(rank, (rank - by) % count) for rank in range(count)])
    back = moved([chosen((owner + by) % count, owner) for owner in range(count)])
    return move(home, away), move(away, back)


@dataclass(frozen=True)
class _Ring:
    """The layouts of queries, keys and values, and whether queries see later keys."""

    query: DTensorSpec
    keys: tuple[DTensorSpec, DTensorSpec]
    causal: bool

    @property
    def count(self) -> int:
        return len(_held(self.query))

    def shard(self, slot: int) -> int:
        """Which part of the sequence a local tensor has."""
        axes = self.query.dim_axes[_SEQUENCE]
        return flat_index(self.query.slots[slot], self.query.topology.shape, axes)

    def visible(self, slot: int, by: int) -> list[tuple[slice, slice, bool]]:
        """Which rows of the queries see which keys of a block, and whether that is causal."""
        rank = self.shard(slot)
        queries, keys = _held(self.query)[rank], _held(self.keys[0])[(rank - by) % self.count]
        return _visible(queries, keys, self.causal)

    def start(self, by: int, blocks: Sequence[Locals], home: bool = False) -> list[Ready]:
        """Send blocks `by` ranks on, or what was made of them home."""
        steps = [_turn(spec, by, self.causal)[home] for spec in self.keys]
        fine = [_split(spec, parts) for spec, parts in zip(self.keys, blocks, strict=True)]
        strides = [(spec.fine or spec).stride for spec in self.keys]
        return start_together(steps, fine, strides)

    def take(self, ready: Sequence[Ready]) -> list[Locals]:
        """What was sent, as local tensors of the dims that keys have."""
        pairs = zip(self.keys, ready, strict=True)
        return [
            tuple(part.flatten(2, 3) for part in get()) if spec.groups else get()
            for spec, get in pairs
        ]

    def rounds(self, blocks: Sequence[Locals]) -> Iterator[tuple[int, list[Locals]]]:
        """The blocks that pass by: the own ones, then those of the rank before, and so on."""
        now = list(blocks)
        for by in range(self.count):
            later = self.start(by + 1, blocks) if by + 1 < self.count else []
            yield by, now
            now = self.take(later) if later else []

    def announce(self, op: Any, passes: int) -> None:
        """Tell of the rounds, as the policy on implicit communication says."""
        if policy.current().moves == "auto":
            return
        sizes = [spec.dtype.itemsize for spec in self.keys]
        turns = [[_turn(k, by, self.causal)[0] for k in self.keys] for by in range(1, self.count)]
        total = passes * sum(bytes_received(steps, sizes) for steps in turns)
        rounds = passes * len(turns)
        text = f"blocks of keys and values ({rounds} exchanges, {total} B received per rank)"
        policy.on_moves(op, [text])


def _visible(
    queries: Sequence[Interval], keys: Sequence[Interval], causal: bool
) -> list[tuple[slice, slice, bool]]:
    """As `_Ring.visible`, for intervals of which two are equal or do not overlap.

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
        if before and start < stop:
            found.append((rows, slice(0, before), False))
        if (start, stop) in keys and start < stop:
            found.append((rows, slice(before, before + stop - start), True))
    return found


def _split(spec: DTensorSpec, parts: Locals) -> Locals:
    """Local tensors with the sequence split into the blocks of its layout."""
    if spec.groups is None:
        return parts
    count = spec.groups[2][0]
    return tuple(part.unflatten(2, (count, part.shape[2] // count)) for part in parts)


def _prepared(
    op: Any, given: dict[str, Any], passes: int
) -> tuple[_Ring, dict[str, Any], dict[str, Locals]]:
    """The ring of a call, its arguments that are no tensors, and its local tensors."""
    where = given["key"]._spec.topology
    tensors = {name: as_dtensor(given[name], where) for name in _NAMES if name in given}
    specs = _layouts({name: x._spec for name, x in tensors.items()}, given["is_causal"])
    assert specs is not None
    parts = {name: move_to(op, x, specs[name])._locals for name, x in tensors.items()}
    ring = _Ring(specs["query"], (specs["key"], specs["value"]), given["is_causal"])
    ring.announce(op, passes)
    return ring, {name: v for name, v in given.items() if name not in parts}, parts


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
        made = [
            part.new_empty_strided(part.shape, stride_like(part.shape, order), dtype=dtype).zero_()
            for part in parts
        ]
        return cls(spec.with_meta(meta), made)

    def add(self, parts: Sequence[torch.Tensor]) -> None:
        for total, part in zip(self.parts, parts, strict=True):
            if part.numel():
                total += part

    def cast(self) -> Locals:
        return tuple(part.to(self.spec.dtype) for part in self.parts)

    def result(self) -> Any:
        return wrap(self.spec, self.cast())


def _attention(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The result and its logsumexp."""
    ring, rest, parts = _prepared(op, named(op, args, kwargs), 1)
    spec, queries = ring.query, parts["query"]
    out = _Sums.like(spec, queries)
    lses = [part.new_full(part.shape[:-1], -torch.inf) for part in out.parts]
    for by, (keys, values) in ring.rounds((parts["key"], parts["value"])):
        for slot, query in enumerate(queries):
            for rows, columns, causal in ring.visible(slot, by):
                block = {"query": query[:, :, rows], "key": keys[slot][:, :, columns]}
                block["value"] = values[slot][:, :, columns]
                made = op(**rest | block | {"is_causal": causal})
                _join(out.parts[slot][:, :, rows], lses[slot][:, :, rows], *made)
    shape, dtype = spec.meta.shape[:-1], torch.promote_types(spec.dtype, torch.float32)
    meta = TensorMeta(shape, contiguous_stride(shape), dtype)
    return out.result(), wrap(_without_last(spec, meta), tuple(lses))


def _join(out: Any, lse: Any, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Join the result over more keys to `out`, and its logsumexp to `lse`, in place."""
    both = torch.logaddexp(lse, part_lse)
    old, new = (torch.exp(each - both).unsqueeze(-1) for each in (lse, part_lse))
    out.mul_(old).add_(part * new)
    lse.copy_(both)


def _attention_backward(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The gradients of query, key and value."""
    ring, rest, parts = _prepared(op, named(op, args, kwargs), 2)
    rowwise = {name: own for name, own in parts.items() if name not in ("key", "value")}
    total = _Sums.like(ring.query, parts["query"])
    homes = [_Sums.like(k, parts[n]) for k, n in zip(ring.keys, ("key", "value"), strict=True)]
    under_way: list[Ready] = []

    def arrive() -> None:
        for home, came in zip(homes, ring.take(under_way) if under_way else (), strict=False):
            home.add(came)

    for by, blocks in ring.rounds((parts["key"], parts["value"])):
        made = (
            [_Sums.like(k, own) for k, own in zip(ring.keys, blocks, strict=True)] if by else homes
        )
        for slot in range(len(parts["query"])):
            for rows, columns, causal in ring.visible(slot, by):
                block = {name: own[slot][:, :, rows] for name, own in rowwise.items()}
                block |= {
                    n: b[slot][:, :, columns] for n, b in zip(("key", "value"), blocks, strict=True)
                }
                grads = op(**rest | block | {"is_causal": causal})
                total.parts[slot][:, :, rows] += grads[0]
                for sums, grad in zip(made, grads[1:], strict=True):
                    sums.parts[slot][:, :, columns] += grad
        arrive()
        under_way = ring.start(by, [sums.cast() for sums in made], home=True) if by else []
    arrive()
    return total.result(), *(home.result() for home in homes)


_CPU = "_scaled_dot_product_flash_attention_for_cpu"
for _name, _run, _passes, _results in (
    (_CPU, _attention, 1, ("query",)),
    (_CPU + "_backward", _attention_backward, 2, ("query", "key", "value")),
):
    _op = getattr(torch.ops.aten, _name).default
    _price = partial(_cost, _passes, _results)
    register_form(_name, cost=_price, blocks=True)(partial(_run, _op))
