"""Layouts spelled out with plain PyTorch: what each rank holds, what the pieces mean together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod

import torch

from shardwise.layout.geometry import contiguous_stride
from shardwise.layout.mesh import AnyMesh
from shardwise.layout.placement import Partial, Placement, Shard
from shardwise.layout.spec import DTensorSpec, TensorMeta

Coord = tuple[int, ...]


def spec_of(
    mesh: AnyMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    cuts: Sequence[Sequence[int] | None] | None = None,
    stride: Sequence[int] | None = None,
) -> DTensorSpec:
    """The spec of a tensor, contiguous if no stride is given."""
    own = contiguous_stride(shape) if stride is None else tuple(stride)
    return DTensorSpec(mesh, placements, TensorMeta(tuple(shape), own, dtype), cuts=cuts)


def whole_numbers(
    shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Small integers in any dtype, so that every sum of them is exact."""
    generator = torch.Generator().manual_seed(seed)
    low = 0 if not dtype.is_signed else -4
    return torch.randint(low, 5, tuple(shape), generator=generator).to(dtype)


def all_coords(spec: DTensorSpec) -> list[Coord]:
    return list(itertools.product(*map(range, spec.topology.shape)))


def scatter(spec: DTensorSpec, full: torch.Tensor, seed: int = 0) -> dict[Coord, torch.Tensor]:
    """What every rank holds if `full` is laid out as `spec`, pending values chosen at random."""
    generator = torch.Generator().manual_seed(seed)
    ends = zip(spec.topology.shape, spec.placements, strict=True)
    # What is drawn are multiples of this, so that averages are exact in any order of the axes.
    unit = prod([size for size, place in ends if place.is_partial("avg")])
    held = {}
    for base in all_coords(spec):
        if base in held:
            continue
        members = [
            range(size) if place.is_partial() else [here]
            for size, place, here in zip(spec.topology.shape, spec.placements, base, strict=True)
        ]
        group = {base: _region(spec, full, base)}
        for axis, place in enumerate(spec.placements):
            if isinstance(place, Partial):
                group = {
                    (*coord[:axis], index, *coord[axis + 1 :]): part
                    for coord, value in group.items()
                    for index, part in enumerate(
                        _parts(value, len(members[axis]), place.reduce_op, generator, unit)
                    )
                }
        held.update(group)
    for coord in all_coords(spec):  # replicas are equal, whatever was drawn for them
        first = tuple(
            0 if place.is_replicate() else here
            for place, here in zip(spec.placements, coord, strict=True)
        )
        held[coord] = held[first]
    return held


def _region(spec: DTensorSpec, full: torch.Tensor, coord: Coord) -> torch.Tensor:
    # Each dim in blocks in blocks: a placement with a split shards what is inside of so many.
    ends = [
        sorted({1} | {p.split for p in spec.placements if isinstance(p, Shard) and p.dim == dim})
        for dim in range(full.ndim)
    ]
    parts = [(dim, split) for dim, splits in enumerate(ends) for split in splits]
    value = full.reshape(
        [size for n, e in zip(full.shape, ends, strict=True) for size in _sizes(n, e)]
    )
    for dim, part in enumerate(parts):
        axes = [
            axis
            for axis, place in enumerate(spec.placements)
            if isinstance(place, Shard) and (place.dim, place.split) == part
        ]
        own = None if spec.cuts is None else spec.cuts[dim]
        if own is not None:
            index = 0
            for axis in axes:
                index = index * spec.topology.shape[axis] + coord[axis]
            value = torch.split(value, list(own), dim)[index]
            continue
        for axis in axes:
            chunks = torch.chunk(value, spec.topology.shape[axis], dim)
            empty = value.narrow(dim, 0, 0)
            value = chunks[coord[axis]] if coord[axis] < len(chunks) else empty
    left = iter(value.shape)
    return value.reshape([prod(next(left) for _ in splits) for splits in ends]).clone()


def _sizes(size: int, ends: Sequence[int]) -> list[int]:
    return [b // a for a, b in itertools.pairwise([*ends, size])]


def _parts(
    value: torch.Tensor, count: int, op: str, generator: torch.Generator, unit: int
) -> list[torch.Tensor]:
    """Tensors whose `op` is `value`, the value itself on no rank in particular."""
    owner = torch.randint(0, count, value.shape, generator=generator)
    drawn = [
        torch.randint(0, 3, value.shape, generator=generator).to(value.dtype) for _ in range(count)
    ]
    if op in ("max", "min"):
        lower = [torch.minimum(value, d) if op == "max" else torch.maximum(value, d) for d in drawn]
        return [torch.where(owner == i, value, part) for i, part in enumerate(lower)]
    if op == "product":
        signs = [1 - 2 * (d == 1).to(value.dtype) for d in drawn[1:]]
        first = value * prod(signs, start=torch.ones_like(value))
        return [first, *signs]
    others = [part * unit for part in drawn[1:]]
    total = value * count if op == "avg" else value
    return [total - sum(others, start=torch.zeros_like(value)), *others]


def meaning(spec: DTensorSpec, held: Mapping[Coord, torch.Tensor]) -> dict[Coord, torch.Tensor]:
    """The value every rank has a share in: pending reductions done, the last axis first."""
    now = dict(held)
    for axis in reversed(range(spec.topology.ndim)):
        place = spec.placements[axis]
        if isinstance(place, Partial):
            firsts = {(*coord[:axis], 0, *coord[axis + 1 :]) for coord in now}
            done = {first: _reduced(now, first, axis, spec, place.reduce_op) for first in firsts}
            now = {coord: done[(*coord[:axis], 0, *coord[axis + 1 :])] for coord in now}
    return now


def _reduced(
    held: Mapping[Coord, torch.Tensor], coord: Coord, axis: int, spec: DTensorSpec, op: str
) -> torch.Tensor:
    members = range(spec.topology.shape[axis])
    parts = [held[(*coord[:axis], i, *coord[axis + 1 :])] for i in members]
    stack = torch.stack(parts)
    if not stack.dtype.is_complex and stack.dtype is not torch.bool:
        stack = stack.double()  # exact for whole numbers, and PyTorch reduces it
    if op in ("max", "min"):
        result = stack.amax(0) if op == "max" else stack.amin(0)
    elif op == "product":
        result = stack.prod(0)
    else:
        result = stack.mean(0) if op == "avg" else stack.sum(0)
    return result.to(parts[0].dtype)


def stored(spec: DTensorSpec, held: Mapping[Coord, torch.Tensor]) -> list[torch.Tensor]:
    """The local tensors that this process keeps of what all ranks hold."""
    return [held[coord].clone() for coord in spec.slots]


def assert_holds(
    spec: DTensorSpec, held: Mapping[Coord, torch.Tensor], full: torch.Tensor, why: object = ""
) -> None:
    """Every rank holds exactly its share of `full`."""
    wanted: dict[Coord, torch.Tensor] = {}
    checked = set()
    for coord, value in meaning(spec, held).items():
        shard = tuple(i for i, p in zip(coord, spec.placements, strict=True) if p.is_shard())
        if (id(value), shard) in checked:  # one tensor that stands for several ranks
            continue
        checked.add((id(value), shard))
        want = wanted.get(shard)
        if want is None:
            want = wanted[shard] = _region(spec, full, coord)
        same = value.shape == want.shape and value.dtype == want.dtype and equal(value, want)
        assert same, f"{why}: {spec} at {coord}: got {value}, wanted {want}"


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """`torch.equal`, for dtypes too that it does not know."""
    return (
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        if a.dtype.itemsize == 1 and (a.dtype.is_floating_point)
        else torch.equal(a, b)
    )


def by_coord(spec: DTensorSpec, local: Sequence[torch.Tensor]) -> dict[Coord, torch.Tensor]:
    """What every rank of a virtual mesh holds."""
    return {coord: local[spec.slot(coord)] for coord in all_coords(spec)}


def layouts_of(ndim: int, kinds: Sequence[Placement]) -> list[tuple[Placement, ...]]:
    return list(itertools.product(kinds, repeat=ndim))
