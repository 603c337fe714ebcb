"""What a change of placement on one axis costs: a pure function, the same answer on every rank."""

from __future__ import annotations

from .placement import Placement

__all__ = ["LATENCY_BYTES", "debt", "move_cost", "recut_cost"]

LATENCY_BYTES = 20_000
"""What starting a collective costs, as the bytes that could be moved in that time."""


def move_cost(src: Placement, dst: Placement, count: int, nbytes: int) -> int:
    """The price, in bytes, of moving a local tensor of `nbytes` from `src` to `dst` on `count`
    ranks."""
    if src is dst or src.is_replicate() or count == 1:
        return 0
    if src.is_partial():
        once = (count - 1) * nbytes // count
        return LATENCY_BYTES + (once if dst.is_shard() else 2 * once)
    if dst.is_shard():
        return LATENCY_BYTES + (count - 1) * nbytes // count
    # A shard made partial moves nothing now, but it makes the tensor whole again, and the reduction
    # that it puts off moves as much as a gather.
    return LATENCY_BYTES + (count - 1) * nbytes


def debt(count: int, nbytes: int) -> int:
    """What results that are left partial, of `nbytes` together, will cost whoever needs them."""
    return LATENCY_BYTES + (count - 1) * nbytes // count


def recut_cost(count: int, nbytes: int) -> int:
    """The price of cutting a sharded dim in other places."""
    return LATENCY_BYTES + (count - 1) * nbytes // count
