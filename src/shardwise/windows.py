"""Windows: for each shard an interval of the global dim, which may overlap its neighbours' parts.

What an operator with a window needs (a convolution, a roll, a pad) is no layout: the intervals may
overlap or leave elements out. `fetch` moves just what a rank lacks, and the local call does the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from . import policy
from .geometry import Interval
from .redistribute import DimMap, Layout, Step, move, run_steps
from .spec import DTensorSpec
from .wrapper import Locals

__all__ = ["fetch", "fetch_parts"]

Tables = tuple[tuple[int, tuple[Interval, ...]], ...]


def fetch(op: object, x: Any, tables: Mapping[int, Sequence[Interval]]) -> Locals:
    """The local tensors of a DTensor, with the dims of `tables` widened or shifted to windows.

    `tables[dim]` has an interval of the global dim for each shard of it, outer axis first: one in
    all for a dim that is not sharded. The result is in the order of `x._spec.slots`. A pending
    reduction stays pending.
    """
    return fetch_parts(op, x._spec, x._locals, tables)


def fetch_parts(
    op: object, spec: DTensorSpec, local: Locals, tables: Mapping[int, Sequence[Interval]]
) -> Locals:
    """As `fetch`, of local tensors that are laid out as `spec`."""
    step = _plan(spec, tuple((dim, tuple(table)) for dim, table in sorted(tables.items())))
    if step is None:
        return tuple(local)
    if not step.is_local and policy.current().moves != "auto":
        received = step.elements_received * spec.dtype.itemsize
        policy.on_moves(op, [f"the edges of shards ({step.kind}, {received} B received per rank)"])
    return run_steps((step,), local, spec.meta.stride)


@lru_cache(maxsize=4096)
def _plan(spec: DTensorSpec, tables: Tables) -> Step | None:
    now = Layout.of(spec)
    dims = list(now.dims)
    for dim, table in tables:
        dims[dim] = DimMap(dims[dim].axes, table)
    goal = now.with_dims(tuple(dims))
    return None if goal == now else move(now, goal)
