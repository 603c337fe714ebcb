"""The virtual engine: every rank lives in this process, and each distinct shard is stored once."""

from __future__ import annotations

import torch

from ..mesh import Topology
from .protocol import Cut, Hop, Locals, Shape
from .reduction import reduce_list

__all__ = ["VirtualEngine"]


class VirtualEngine:
    """Collectives as loops over the ranks."""

    def all_reduce(self, hop: Hop, local: Locals, op: str) -> list[torch.Tensor]:
        return [
            reduce_list([local[hop.stored(member)] for member in hop.members(target)], op)
            for target in hop.targets
        ]

    def all_gather(self, hop: Hop, local: Locals, shape: Shape) -> list[list[torch.Tensor]]:
        return [
            [local[hop.stored(member)] for member in hop.members(target)] for target in hop.targets
        ]

    def reduce_scatter(
        self, hop: Hop, local: Locals, shape: Shape, cut: Cut, op: str
    ) -> list[torch.Tensor]:
        results = []
        for target in hop.targets:
            members = hop.members(target)
            parts = [cut(local[hop.stored(member)], member, target) for member in members]
            results.append(reduce_list(parts, op))
        return results

    def exchange(
        self, hop: Hop, local: Locals, shape: Shape, cut: Cut
    ) -> list[list[torch.Tensor | None]]:
        return [
            [
                None
                if shape(member, target) is None
                else cut(local[hop.stored(member)], member, target)
                for member in hop.members(target)
            ]
            for target in hop.targets
        ]

    def check_equal(self, topology: Topology, digest: int) -> bool:
        return True
