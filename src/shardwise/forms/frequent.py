"""The most frequent value along a dim in shards: every value is counted by one rank.

Each rank counts its own first. What it has once is sent without a count, so that no more is moved
than the elements themselves, to a rank that the value tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from ..entry import register_form
from ..geometry import Cuts
from ..ragged import as_dtensor
from ..replicated import fallback_form, mesh_of
from ..rules import Call
from ..spec import DTensorSpec
from .sampling import BITS, keys_of, known, owner_of
from .shards import lacking, sent_on, settled, shard_of, told

__all__ = ["mode"]

aten = torch.ops.aten


def _pays(call: Call) -> bool:
    """Whether no other dim is in shards, and counting is less than a rule moves."""
    spec = call.specs[0]
    if not prod(spec.shape) or not (known(spec.dtype) or spec.dtype is torch.bool):
        return False
    dim = call.get("dim") % spec.ndim if spec.ndim else 0
    axes = [axis for axis, place in enumerate(spec.placements) if place.is_shard()]
    if not axes or spec.dim_axes[dim] != tuple(axes):
        return False
    count, width = len(spec.dim_cuts[dim]), spec.dtype.itemsize
    columns = prod(spec.shape) // spec.shape[dim]
    share = prod(spec.shape) // count * max(width, (width + 4) // 2)
    steps = [16 * columns * count**2, share, 16 * columns * count, 16 * columns * count]
    links = [spec.topology.links[axis] for axis in axes]
    return all(sum(map(link.price, steps)) < link.price(lacking(spec, dim)) for link in links)


class Runs(NamedTuple):
    """Different values of each column, as integers, and how often each is there.

    They are in order of who counts them, then whether they are there once, then by column; `sizes`
    says how many there are of each kind.
    """

    keys: torch.Tensor
    counts: torch.Tensor
    sizes: torch.Tensor


def _runs(rows: torch.Tensor, count: int) -> Runs:
    columns, size = rows.shape
    order = rows.sort(-1).values
    new = torch.ones_like(order, dtype=torch.bool)
    new[:, 1:] = order[:, 1:] != order[:, :-1]
    first = new.flatten().nonzero().flatten()
    keys, column = order.flatten()[first], first // max(size, 1)
    counts = first.diff(append=first.new_tensor([order.numel()]))
    owner = owner_of(keys, count)
    kind = (2 * owner + (counts == 1)) * columns + column
    by_kind = kind.sort(stable=True).indices
    sizes = torch.bincount(kind, minlength=count * 2 * columns)
    return Runs(keys[by_kind], counts[by_kind], sizes.view(count, 2, columns))


def _best(
    keys: Sequence[torch.Tensor], counts: Sequence[torch.Tensor], sizes: torch.Tensor
) -> torch.Tensor:
    """The highest count of each column and the smallest value that has it, of what shards sent."""
    columns = sizes.shape[-1]
    device = keys[0].device
    kinds = torch.arange(columns, device=device).repeat(2)
    column = torch.cat([kinds.repeat_interleave(size.flatten()) for size in sizes])
    once = sizes[:, 1].sum(-1).tolist()
    often = torch.cat([torch.cat([c, c.new_ones(n)]) for c, n in zip(counts, once, strict=True)])
    every = torch.cat(list(keys)).to(torch.int64)
    best = torch.zeros(columns, 2, dtype=torch.int64, device=device)
    for at in range(columns):
        here = column == at
        found, where = every[here].unique(return_inverse=True)
        if len(found):
            total = torch.zeros_like(found).index_add_(0, where, often[here].to(torch.int64))
            most = total.max()
            best[at] = torch.stack([most, found[total == most].min()])
    return best


def _counted(
    op: Any, spec: DTensorSpec, dim: int, runs: Sequence[Runs], sizes: torch.Tensor
) -> list[torch.Tensor]:
    """What `_best` gives on each rank for the values that it counts; `sizes` are of all shards."""
    keys_ends = _ends(sizes.sum((2, 3)))
    counts_ends = _ends(sizes[:, :, 0].sum(2))
    narrow = torch.int16 if spec.dtype is torch.uint8 else BITS[spec.dtype.itemsize]
    short = torch.int32 if spec.shape[dim] < 1 << 31 else torch.int64
    keys = tuple(run.keys.to(narrow) for run in runs)
    counts = tuple(run.counts[run.counts > 1].to(short) for run in runs)
    found = sent_on(op, spec, [(keys, keys_ends), (counts, counts_ends)])
    owners = [shard_of(spec, dim, coord) for coord in spec.slots]
    return [
        _best(values, often, sizes[:, owner].to(values[0].device))
        for values, often, owner in zip(*found, owners, strict=True)
    ]


def _ends(sizes: torch.Tensor) -> list[Cuts]:
    return [tuple(accumulate(row)) for row in sizes.tolist()]


def _last(part: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, start: int) -> torch.Tensor:
    """For each column where in the dim its value is last, and the bits of the element there."""
    spots = torch.arange(rows.shape[1], device=rows.device)
    none = rows.new_full((rows.shape[0], 1), -1)
    at = torch.cat([none, torch.where(rows == keys.unsqueeze(1), spots, -1)], 1).amax(1, True)
    bits = torch.cat([part.contiguous().view(BITS[part.dtype.itemsize]).to(torch.int64), none], 1)
    return torch.cat([torch.where(at < 0, -1, at + start), bits.gather(1, at % bits.shape[1])], 1)


@register_form("mode", when=_pays)
def mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """The most frequent value, the smallest of several, and where it is last."""
    op = aten.mode.default
    mesh = mesh_of(op, [x])
    x = settled(op, x)
    dim %= x.ndim
    spec = x._spec
    count = len(spec.dim_cuts[dim])
    rest = [size for d, size in enumerate(x.shape) if d != dim]
    parts = [p.movedim(dim, -1).reshape(prod(rest), p.shape[dim]) for p in x._locals]
    rows = [keys_of(part) for part in parts]
    runs = [_runs(row, count) for row in rows]
    facts = [
        torch.cat([(part != part).sum().view(1), run.sizes.flatten()])
        for part, run in zip(parts, runs, strict=True)
    ]
    table = torch.tensor(told(op, spec, facts))
    if table[:, 0].any():  # next to NaN, which is not equal to itself, PyTorch sorts nothing
        return fallback_form(op)(x, dim, keepdim)
    sizes = table[:, 1:].unflatten(1, (count, 2, prod(rest)))
    found = torch.tensor(told(op, spec, _counted(op, spec, dim, runs, sizes)))
    most = found[..., 0] == found[..., 0].amax(0)
    key = found[..., 1].masked_fill(~most, torch.iinfo(torch.int64).max).amin(0)
    own = [
        _last(part, row, key.to(part.device), spec.box(coord)[dim][0])
        for coord, part, row in zip(spec.slots, parts, rows, strict=True)
    ]
    places, bits = torch.tensor(told(op, spec, own)).unbind(-1)
    place, shard = places.max(0)
    value = bits.gather(0, shard.unsqueeze(0)).to(BITS[x.dtype.itemsize]).view(x.dtype)
    shape = [*rest[:dim], *[1] * keepdim, *rest[dim:]]
    return tuple(as_dtensor(made.reshape(shape).to(x.device), mesh) for made in (value, place))
