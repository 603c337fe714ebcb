"""Windows of a sharded dim: each shard gets an interval that may overlap its neighbours' pieces.

The intervals of convolutions, rolls or pads are no layout: they may overlap or leave elements out.
`fetch` moves what a rank lacks and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from ..comm.step import Step, bytes_received
from ..layout.geometry import Interval, memory_order
from ..layout.layout import DimMap
from ..layout.spec import DTensorSpec
from ..redistribute.execute import start_together
from ..redistribute.routes import move
from . import policy
from .wrapper import Locals


def fetch_parts(
    op: object, spec: DTensorSpec, local: Locals, tables: Mapping[int, Sequence[Interval]]
) -> Locals:
    """Local tensors in the layout `spec`, with the dims of `tables` widened or shifted to windows.

    `tables[dim]` has an interval of the global dim for each shard of it, outer axis first; one in
    all for a dim that is not sharded. The result is in the order of `spec.slots`. Partial stays
    Partial.
    """
    dims = {dim: DimMap(spec.dim_axes[dim], tuple(table)) for dim, table in tables.items()}
    (made,) = fetch_all(op, [(spec, local, dims)])
    return made


def fetch_all(
    op: object, wanted: Sequence[tuple[DTensorSpec, Locals, Mapping[int, DimMap]]]
) -> list[Locals]:
    """As `fetch_parts`, for several tensors in one collective.

    The windows of a dim may be on other axes than those that shard it now. The results are in the
    order of the slots of a tensor that has its dims on those axes.
    """
    steps = [_plan(spec, tuple(sorted(dims.items()))) for spec, _, dims in wanted]
    moving = [(w, step) for w, step in zip(wanted, steps, strict=True) if step is not None]
    far = [(step, spec.dtype.itemsize) for (spec, _, _), step in moving if not step.is_local]
    if far and policy.current().moves != "auto":
        kind = far[0][0].kind if len(far) == 1 else "exchange"
        received = bytes_received(*zip(*far, strict=True))
        policy.on_moves(op, [f"the edges of shards ({kind}, {received} B received per rank)"])
    made = iter(start_together([(step, local) for (_, local, _), step in moving]))
    return [
        tuple(local) if step is None else next(made)()
        for (_, local, _), step in zip(wanted, steps, strict=True)
    ]


@lru_cache(maxsize=4096)
def _plan(spec: DTensorSpec, windows: tuple[tuple[int, DimMap], ...]) -> Step | None:
    now = spec.layout
    dims = list(now.dims)
    for dim, window in windows:
        dims[dim] = window
    goal = now.with_dims(tuple(dims))
    return None if goal == now else replace(move(now, goal), order=memory_order(spec.stride))
