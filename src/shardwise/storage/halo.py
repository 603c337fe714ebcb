"""Windows: for each shard an interval of the global dim, which may overlap its neighbours' parts.

What an operator with a window needs (a convolution, a roll, a pad) is no layout: the intervals may
overlap or leave elements out. `fetch` moves just what a rank lacks, and the local call does the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..layout.geometry import Interval
from ..layout.spec import DTensorSpec
from ..redistribute import DimMap, Layout, Step, bytes_received, move, run_together
from . import policy
from .wrapper import Locals

Windows = tuple[tuple[int, DimMap], ...]


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
    dims = {dim: DimMap(spec.dim_axes[dim], tuple(table)) for dim, table in tables.items()}
    (made,) = fetch_all(op, [(spec, local, dims)])
    return made


def fetch_all(
    op: object, wanted: Sequence[tuple[DTensorSpec, Locals, Mapping[int, DimMap]]]
) -> list[Locals]:
    """As `fetch_parts`, for several tensors at once: what is lacking comes in one collective.

    The windows of a dim may go by other axes than those that shard it now. The results are in the
    order of the slots of a tensor that has its dims on those axes.
    """
    steps = [_plan(spec, _sorted(dims)) for spec, _, dims in wanted]
    far = [
        (step, spec.dtype.itemsize)
        for (spec, _, _), step in zip(wanted, steps, strict=True)
        if step is not None and not step.is_local
    ]
    if far and policy.current().moves != "auto":
        kind = far[0][0].kind if len(far) == 1 else "exchange"
        received = bytes_received(*zip(*far, strict=True))
        policy.on_moves(op, [f"the edges of shards ({kind}, {received} B received per rank)"])
    return bring_all(wanted)


def bring_all(wanted: Sequence[tuple[DTensorSpec, Locals, Mapping[int, DimMap]]]) -> list[Locals]:
    """As `fetch_all`, where the move was asked for or told already."""
    steps = [_plan(spec, _sorted(dims)) for spec, _, dims in wanted]
    moving = [(w, step) for w, step in zip(wanted, steps, strict=True) if step is not None]
    made = iter(
        run_together(
            [step for _, step in moving],
            [local for (_, local, _), _ in moving],
            [spec.stride for (spec, _, _), _ in moving],
        )
    )
    return [
        tuple(local) if step is None else next(made)
        for (_, local, _), step in zip(wanted, steps, strict=True)
    ]


def _sorted(dims: Mapping[int, DimMap]) -> Windows:
    return tuple(sorted(dims.items(), key=lambda item: item[0]))


@lru_cache(maxsize=4096)
def _plan(spec: DTensorSpec, windows: Windows) -> Step | None:
    now = Layout.of(spec)
    dims = list(now.dims)
    for dim, window in windows:
        dims[dim] = window
    goal = now.with_dims(tuple(dims))
    return None if goal == now else move(now, goal)
