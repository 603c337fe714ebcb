"""Attention over a sequence that is sharded in queries, keys and values.

There are two ways, and the cheaper is taken. In both no rank ever has all keys, and the results
are sharded as the queries are:

- heads: shards of the sequence are exchanged for shards of the heads, and the results back;
- ring: queries stay, and the blocks of keys and values go round (`ring_attention.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch

from .._torch import is_tracing
from ..dispatch.operator import register_form
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..rules import Call
from ..rules.language import named
from ..storage.operands import all_in_layout, announce_moves
from ..storage.ragged import as_dtensor
from ..storage.wrapper import wrap
from .ring_attention import Ring, attention, attention_backward, held_intervals, rows_of

_OPERANDS = ("query", "key", "value", "out", "grad_out", "logsumexp")
_RESULTS = {False: ("query", "logsumexp"), True: ("query", "key", "value")}  # of a backward
_HEADS, _SEQUENCE = 1, 2
Specs = dict[str, DTensorSpec]


def _layouts(given: Specs, causal: bool) -> Specs | None:
    """The layouts of the operands where every rank has its part of the sequence; None if the forms
    do not serve the call."""
    query, key, value = (given[name] for name in _OPERANDS[:3])
    sizes, others = query.meta.shape, key.meta.shape
    shared = sizes[_HEADS] // max(others[_HEADS], 1)
    both = query.dim_axes[_SEQUENCE] == key.dim_axes[_SEQUENCE] != ()
    same = sizes[_SEQUENCE] == others[_SEQUENCE]
    regular = others == value.meta.shape and others[_HEADS] * shared == sizes[_HEADS]
    if not (both and regular) or not (same or not causal) or not prod(sizes) or not prod(others):
        return None
    query = query.reduced
    keys = _beside(query, query if same else key.reduced, key.meta, shared)
    if keys is None or not (_is_simple(query) and _is_simple(keys)):
        return None
    found = {"query": query, "key": keys, "value": keys.with_meta(value.meta)}
    for name in ("out", "grad_out"):
        if name in given:
            found[name] = query.with_meta(given[name].meta)
    if "logsumexp" in given:
        found["logsumexp"] = rows_of(query, given["logsumexp"].meta)
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
    if spec.groups is None or axes[-1]:
        return not axes[-1]
    lone = [len(group) == 1 for dim, group in enumerate(spec.groups) if dim != _SEQUENCE]
    fine = spec.fine or spec
    return all(lone) and len(spec.groups[_SEQUENCE]) == 2 and fine.dim_axes[3] == axes[_SEQUENCE]


def _by_heads(specs: Specs) -> Specs | None:
    """The layouts with shards of the heads in place of those of the sequence; None if the ranks
    would not get as many heads each."""
    key = specs["key"]
    if key.dim_axes[_HEADS] or key.meta.shape[_HEADS] % len(held_intervals(key)):
        return None
    return _instead(specs, Shard(_HEADS))


def _instead(specs: Specs, place: Placement) -> Specs:
    """The layouts with another placement on the axes that shard the sequence."""
    found = {}
    for name, spec in specs.items():
        axes = spec.dim_axes[_SEQUENCE]
        places = [place if axis in axes else own for axis, own in enumerate(spec.placements)]
        kept = None if spec.cuts is None else spec.cuts[: _SEQUENCE if place.is_replicate() else 1]
        cuts = None if kept is None else [*kept, *[None] * (spec.ndim - len(kept))]
        found[name] = spec.with_placements(places, cuts)
    return found


def _takes_ring(specs: Specs, causal: bool) -> bool:
    """True if the ring is cheaper than to exchange heads, both ways.

    The rounds of a ring run beside the kernels, so they are charged one start. Of consecutive
    queries that are causal the last rank has most of the work: heads share it evenly.
    """
    key, is_backward = specs["key"], "grad_out" in specs
    if causal and key.groups is None:
        return False
    count = len(held_intervals(key))
    sizes = {name: prod(s.largest_shape) * s.dtype.itemsize for name, s in specs.items()}
    around = (1 + is_backward) * (count - 1) * (sizes["key"] + sizes["value"])
    there = sum(sizes.values()) * (count - 1) // count
    back = sum(sizes.get(name, 0) for name in _RESULTS[is_backward]) * (count - 1) // count
    links = [key.topology.links[axis] for axis in key.dim_axes[_SEQUENCE]]
    ring = max(link.price(around) for link in links)
    return ring < max(link.price(there) + link.price(back) for link in links)


@lru_cache(maxsize=1024)
def _way(
    given: tuple[tuple[str, DTensorSpec], ...], causal: bool, masked: bool
) -> tuple[Specs, Specs | None] | None:
    """The layouts of operands by name where each rank has its part of the sequence, and those by
    heads if that way is taken; None if rows serve the call."""
    specs = _layouts(dict(given), causal)
    heads = None if specs is None else _by_heads(specs)
    if specs is None or (masked and heads is None):
        return None
    rings = heads is None or (not masked and _takes_ring(specs, causal))
    return specs, None if rings else heads


def _cost(call: Call) -> tuple[()] | None:
    """() if the call can be served so that no rank has all keys: then it is."""
    names = zip(call.operand_names, call.laid, strict=True)
    given = tuple((name, spec) for name, spec in names if name in _OPERANDS)
    masked = call.get("attn_mask") is not None
    return None if _way(given, call.get("is_causal"), masked) is None else ()


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    given = named(op, args, kwargs)
    where = given["key"]._spec.topology
    tensors = {name: as_dtensor(x, where) for name, x in given.items() if name in _OPERANDS}
    now = tuple((name, x._spec) for name, x in tensors.items())
    found = _way(now, given["is_causal"], given["attn_mask"] is not None)
    assert found is not None  # else its cost is None
    specs, others = found
    if others is None and is_tracing():
        # In a ring ranks do different work between collectives that do not depend on each other:
        # their graphs might order them differently. With the whole sequence they do the same.
        others = _instead(specs, Replicate())
    laid = _moved(op, list(tensors.values()), [(others or specs)[name] for name in tensors])
    if others is None:
        parts = {name: x._locals for name, x in zip(tensors, laid, strict=True)}
        rest = {name: value for name, value in given.items() if name not in parts}
        run = attention_backward if "grad_out" in specs else attention
        return run(Ring(op, specs, parts, rest))
    made = op(**given | dict(zip(tensors, laid, strict=True)))
    names = _RESULTS["grad_out" in specs]
    return _moved(op, made, [_home(specs, n, x) for n, x in zip(names, made, strict=True)])


def _home(specs: Specs, name: str, made: Any) -> DTensorSpec:
    """The layout in which a result is returned: that of the query or key it belongs to."""
    if name == "logsumexp":
        return rows_of(specs["query"], made._spec.meta)
    return specs[name].with_meta(made._spec.meta)


def _moved(op: Any, tensors: Sequence[Any], specs: Sequence[DTensorSpec]) -> tuple[Any, ...]:
    """Tensors in other layouts, in one collective if they are alike."""
    announce_moves(op, list(enumerate(specs)), tensors)
    made = all_in_layout([(x, spec, False) for x, spec in zip(tensors, specs, strict=True)])
    return tuple(wrap(spec, parts) for spec, parts in zip(specs, made, strict=True))


for _name in ("", "_backward"):
    _name = "_scaled_dot_product_flash_attention_for_cpu" + _name
    _form = partial(_run, getattr(torch.ops.aten, _name).default)
    register_form(_name, cost=_cost, blocks=True)(_form)
