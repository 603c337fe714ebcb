"""Agreement between ranks: all of them replay a step, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ..comm import all_equal
from ..comm import group as collectives
from ..comm.lockstep import all_arrive
from ..comm.process import same_among_members
from ..layout.mesh import Topology
from .record import Recording

COLLECTIVES: frozenset[Any] = frozenset(
    getattr(collectives, name).__wrapped__
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
)
"""The functions that start a collective, as they are in graphs."""


_PATIENCE = timedelta(seconds=30)


def all_record(name: str, meshes: Sequence[Topology], call: str) -> None:
    """Return when all ranks are about to record `call`, or to verify it; raise if some are not.

    A rank that replays does not compare anything with the others.
    """
    for mesh in meshes:
        if not mesh.virtual and mesh.coordinate is not None:
            what = f"{name}: this call records a graph or compares one with the eager step"
            all_arrive(
                what,
                mesh,
                call,
                "Pass arguments of the same kinds on every rank, and let no variable that the "
                "step reads differ by rank.",
                _PATIENCE,
            )


def all_agree(
    meshes: Sequence[Topology], recording: Recording | None, reason: str | None
) -> str | None:
    """Why the step cannot be captured on some rank; None if all ranks can go on.

    The collectives of a recording are compared between the ranks of each process group.
    """
    for mesh in meshes:
        alike = all_equal(mesh, int(reason is None))
        if not alike and reason is None:
            reason = "it cannot be captured on another rank, whose error says why"
    if reason is not None or recording is None:
        return reason
    if not have_same_order(meshes, recording.seen.graph):
        return "the ranks do not make the same collectives in the same order"
    return None


def calls_of(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    """The calls of some functions, in the order of the graph."""
    found = [graph.find_nodes(op="call_function", target=each, sort=False) for each in targets]
    return sorted([node for nodes in found for node in nodes])


def number_collectives(graph: fx.Graph) -> None:
    """Give each collective its number among those of its ranks, to be known by after passes."""
    counts: dict[tuple[int, ...], int] = {}
    for node in calls_of(graph, *COLLECTIVES):
        ranks = _ranks(node)
        node.meta["calls"] = (counts.setdefault(ranks, 0),)
        counts[ranks] += 1


def have_same_order(meshes: Sequence[Topology], graph: fx.Graph) -> bool:
    """True on all ranks if the members of each group make the same collectives in the same order,
    else False on all."""
    rows = [(_ranks(node), _row(node)) for node in calls_of(graph, *COLLECTIVES)]

    def digest_of(ranks: tuple[int, ...]) -> int:
        own = [row for members, row in rows if members == ranks]
        return int.from_bytes(sha256(repr(own).encode()).digest()[:7], "little")

    own = [mesh.virtual or same_among_members(mesh, digest_of) for mesh in meshes]
    alike = [all_equal(mesh, int(all(own))) for mesh in meshes]
    return all(own) and all(alike)


def _ranks(node: fx.Node) -> tuple[int, ...]:
    group: Any = node.args[0]
    return tuple(getattr(group, "ranks", None) or dist.get_process_group_ranks(group))


def _row(node: fx.Node) -> tuple[Any, ...]:
    """The properties of a collective that must be equal on all of its ranks."""
    target: Any = node.target
    shape, _, dtype = node.args[1].meta["val"]  # type: ignore[union-attr]
    even = target.__name__ in ("all_reduce", "broadcast")
    size = torch.Size(shape).numel() if even else None
    ops = [str(each) for each in node.args[2:] if even]
    return target.__name__, str(dtype), size, ops, node.meta.get("calls")
