"""Circular padding of a sharded dim: the edges of shards move, and what comes around.

A piece of the padded dim repeats up to three pieces of the dim: some of its end, some of all of it,
and some of its beginning. They are fetched together, and so are those of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import policy
from .._torch import run_composite
from ..autograd import redistributed
from ..entry import register_composite
from ..geometry import Interval, contiguous_stride
from ..moving import describe_moves
from ..placement import Replicate
from ..ragged import laid
from ..redistribute import DimMap
from ..rules.sliding import InProportion, clipped
from ..spec import DTensorSpec, TensorMeta
from ..windows import fetch_all
from ..wrapper import Wrapper, wrap

__all__ = ["pad_circular"]

_OP = torch.ops.aten._pad_circular.default


@dataclass(frozen=True)
class _Ring:
    """A dim of a layout with some of its end before it, and some of its beginning after it."""

    spec: DTensorSpec
    dim: int
    before: int
    after: int

    @property
    def size(self) -> int:
        return self.spec.shape[self.dim]

    @property
    def shifts(self) -> tuple[int, int, int]:
        """Where the end, the dim and its beginning lie in the padded dim, from the dim's start."""
        return self.before - self.size, self.before, self.before + self.size

    def padded(self) -> DTensorSpec:
        """The layout of the result, which is cut in proportion."""
        spec, shape, dim = self.spec, list(self.spec.shape), self.dim
        shape[dim] += self.before + self.after
        cuts = list(spec.cuts or [None] * spec.ndim)
        if cuts[dim] is not None:
            counts = tuple(spec.topology.shape[axis] for axis in spec.dim_axes[dim])
            cuts[dim] = InProportion(self.size, shape[dim]).from_factor(spec.dim_cuts[dim], counts)
        meta = TensorMeta(tuple(shape), contiguous_stride(shape), spec.dtype)
        return DTensorSpec(spec.topology, spec.placements, meta, cuts=cuts)

    def sources(self, piece: Interval) -> list[Interval]:
        """What a piece of the padded dim repeats, in order."""
        return [clipped((piece[0] - by, piece[1] - by), self.size) for by in self.shifts]

    def copies(self, piece: Interval) -> list[Interval]:
        """Where a piece of the dim is repeated."""
        total = self.size + self.before + self.after
        return [clipped((piece[0] + by, piece[1] + by), total) for by in self.shifts]


def _fetched(x: Any, spec: DTensorSpec, dim: int, rows: Sequence[list[Interval]]) -> list[Any]:
    """For each shard of a dim several windows of it, in one collective."""
    axes = spec.dim_axes[dim]
    tables = [tuple(row[index] for row in rows) for index in range(3)]
    return fetch_all(_OP, [(spec, x._locals, {dim: DimMap(axes, table)}) for table in tables])


def _reduced(spec: DTensorSpec) -> DTensorSpec:
    """A layout with nothing pending, for what is added up."""
    places = [Replicate() if place.is_partial() else place for place in spec.placements]
    return spec.with_placements(places, spec.cuts)


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, ring: _Ring) -> Any:
        ctx.set_materialize_grads(False)
        ctx.ring = ring
        target = ring.padded()
        x = laid(_OP, x, ring.spec.with_meta(x._spec.meta))
        rows = [ring.sources(piece) for piece in target.pieces(ring.dim)]
        found = zip(*_fetched(x, x._spec, ring.dim, rows), strict=True)
        return wrap(target, tuple(torch.cat(parts, ring.dim).contiguous() for parts in found))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None if grad is None else _Folded.apply(grad, ctx.ring), None


class _Folded(torch.autograd.Function):
    """The gradient of each place: its own, and those of the places that repeat it."""

    @staticmethod
    def forward(ctx: Any, grad: Any, ring: _Ring) -> Any:
        ctx.set_materialize_grads(False)
        ctx.ring = ring
        grad = laid(_OP, grad, _reduced(ring.padded().with_meta(grad._spec.meta)))
        pieces = ring.spec.pieces(ring.dim)
        found = _fetched(grad, grad._spec, ring.dim, [ring.copies(piece) for piece in pieces])
        shape = ring.spec.shape
        meta = TensorMeta(shape, contiguous_stride(shape), grad.dtype)
        spec = _reduced(ring.spec.with_meta(meta))
        made = []
        for coord, first, own, last in zip(spec.slots, *found, strict=True):
            total = own.clone(memory_format=torch.contiguous_format)
            here = spec.local_shape(coord)[ring.dim]
            total.narrow(ring.dim, here - first.shape[ring.dim], first.shape[ring.dim]).add_(first)
            total.narrow(ring.dim, 0, last.shape[ring.dim]).add_(last)
            made.append(total)
        return wrap(spec, tuple(made))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None if grad is None else _Padded.apply(grad, ctx.ring), None


def _consecutive(x: Any) -> Any:
    """A tensor that is sharded block by block, in consecutive pieces."""
    if policy.current().moves != "auto":
        policy.on_moves(_OP, describe_moves([(0, x._spec.straight)], [x._spec]))
    return redistributed(x, x._spec.straight)


def pad_circular(x: Any, pads: Sequence[int]) -> Any:
    """Each padded dim after the other, if one of them is sharded."""
    count = len(pads) // 2
    dims = range(x.ndim - count, x.ndim)
    edges = [(dim, *pads[2 * at : 2 * at + 2]) for at, dim in enumerate(reversed(dims))]
    if not isinstance(x, Wrapper) or not any(x._spec.dim_axes[dim] for dim in dims if dim >= 0):
        return run_composite(_OP, x, pads)
    sizes = [x.shape[dim] + min(before, 0) + min(after, 0) for dim, before, after in edges]
    short = any(max(e[1:]) > size for e, size in zip(edges, sizes, strict=True))
    if short or x.ndim != count + 2 or min(sizes) <= 0 or not x.numel():
        return run_composite(_OP, x, pads)  # an error that is PyTorch's, or what it makes of this
    with policy.inside(_OP):
        if x._spec is not x._spec.straight:
            x = _consecutive(x)
        for (dim, before, after), size in zip(edges, sizes, strict=True):
            x = x.narrow(dim, max(-before, 0), size) if size != x.shape[dim] else x
            spec = x._spec
            x = _Padded.apply(x, _Ring(spec, dim, max(before, 0), max(after, 0)))
    return x


register_composite(_OP, pad_circular)
