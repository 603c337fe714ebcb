"""embedding_bag: each rank adds up what its rows, columns and bags give.

Bags of one size may be sharded as the indices are; other indices are gathered. Rows that are
sharded give sums that are left Partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..dispatch.fallback import mesh_of
from ..dispatch.operator import register_form
from ..layout.placement import Partial, Placement
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..rules.indexing import within
from ..rules.reductions import wide
from ..storage.ragged import as_dtensor, gather_plain, move_to, reduce_partial
from ..storage.wrapper import wrap
from .index import no_sparse_gradient

aten = torch.ops.aten
_SUM, _MEAN, _MAX = 0, 1, 2


def embedding_bag(
    op: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, ...]:
    """The bags, and what the backward needs: bag of each index, bag sizes, indices of maxima."""
    given = [each for each in (indices, offsets, per_sample_weights) if each is not None]
    mesh = mesh_of(op, [weight, *given])
    weight, indices, offsets, *factors = (
        reduce_partial(op, as_dtensor(each, mesh)) for each in (weight, *given)
    )
    table, starts = weight._spec, gather_plain(op, offsets)
    count = len(starts) - bool(include_last_offset)
    width = 0 if mode == _MAX or padding_idx >= 0 else _bag_width(indices.shape[0], starts, count)
    lead = _index_spec(indices._spec, table, width)
    indices = move_to(op, indices, lead)
    factors = [move_to(op, f, f._spec.with_placements(lead.placements, lead.cuts)) for f in factors]
    whole = [None] if lead.is_sharded() or not factors else [factors[0]._locals[0]]
    options = (scale_grad_by_freq, mode, sparse, *whole, include_last_offset, padding_idx)
    if mode == _MAX or not (lead.is_sharded() or table.is_sharded()):
        made = op(gather_plain(op, weight), indices._locals[0], starts, *options)
        return tuple(as_dtensor(each, mesh) for each in made)
    # The other results do not depend on the table, nor on the indices of bags of one size.
    every = indices._locals[0].new_zeros(lead.shape) if lead.is_sharded() else indices._locals[0]
    zeros = weight._locals[0].new_zeros(1, 1).expand(table.shape[0], 1)
    _, *known = op(zeros, every, starts, *options)
    out = _bag_spec(table, lead, count, width)
    sizes = known[1] if mode == _MEAN else None
    bags = _sums(weight, indices, factors, starts[:count], out, padding_idx, sizes)
    return wrap(out, tuple(bags)), *(as_dtensor(each, mesh) for each in known)


def _sums(
    weight: Any,
    indices: Any,
    factors: Sequence[Any],
    starts: torch.Tensor,
    out: DTensorSpec,
    padding: int,
    sizes: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The sums over the rows and the bags of each rank; means if `sizes` are given."""
    table, lead = weight._spec, indices._spec
    bag = _bag_of(lead.shape[0], starts)
    parts = []
    for coord in out.slots:
        index, *own = (each._locals[each._spec.slot(coord)] for each in (indices, *factors))
        (start, stop), (first, last) = lead.box(coord)[0], out.box(coord)[0]
        place, here = within(index, table.box(coord)[0], table.shape[0])
        here = here & (index != padding)
        rows = weight._locals[table.slot(coord)][place[here]].to(wide(table.dtype))
        for each in own:
            rows = rows * each[here].unsqueeze(1)
        total = rows.new_zeros(last - first, rows.shape[1])
        total.index_add_(0, bag[start:stop][here] - first, rows)
        if sizes is not None:
            total /= sizes[first:last].clamp(min=1).unsqueeze(1)
        parts.append(total.to(table.dtype))
    return parts


def _bag_width(count: int, starts: torch.Tensor, bags: int) -> int:
    """The size of the bags of `count` indices if all bags have the same size; else 0."""
    width = count // bags if bags else 0
    same = torch.arange(len(starts), dtype=starts.dtype, device=starts.device) * width
    return width if width * bags == count and torch.equal(starts, same) else 0


def _bag_of(count: int, starts: torch.Tensor) -> torch.Tensor:
    """The bag of each of `count` indices."""
    places = torch.arange(count, dtype=starts.dtype, device=starts.device)
    return torch.searchsorted(starts, places, right=True) - 1


def _index_spec(indices: DTensorSpec, table: DTensorSpec, width: int) -> DTensorSpec:
    """The layout of the indices: as it is if each rank has all indices of its bags, else
    replicated."""
    axes = indices.dim_axes[0]
    apart = not any(table.placements[axis].is_shard() for axis in axes)
    if axes and width and apart and not any(size % width for size in indices.dim_cuts[0]):
        return indices
    return indices.with_placements(default_placements(indices.topology))


def _bag_spec(table: DTensorSpec, lead: DTensorSpec, count: int, width: int) -> DTensorSpec:
    """The layout of the bags: sharded as the indices and as the columns of the table, Partial where
    the rows of the table are sharded."""
    places: list[Placement] = [
        own if own.is_shard() else Partial() if place.is_shard(0) else place
        for own, place in zip(lead.placements, table.placements, strict=True)
    ]
    cuts = tuple(size // width for size in lead.dim_cuts[0]) if lead.is_sharded() else None
    meta = TensorMeta((count, table.shape[1]), (table.shape[1], 1), table.dtype)
    return DTensorSpec(
        table.topology, places, meta, cuts=[cuts, None if table.cuts is None else table.cuts[1]]
    )


for _name in ("_embedding_bag", "_embedding_bag_forward_only"):
    register_form(_name, always=True)(partial(embedding_bag, getattr(aten, _name).default))


@register_form("_embedding_bag_backward", always=True)
def backward(
    grad: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    """The gradient of the table: for bags of one size by rows of the gradient, else by columns."""
    if sparse:
        raise no_sparse_gradient(f"embedding_bag of a table of {num_weights} rows")
    op = aten._embedding_bag_dense_backward.default
    starts = gather_plain(op, offsets)
    width = 0
    if mode != _MAX and not scale_grad_by_freq:
        width = _bag_width(indices.shape[0], starts, grad.shape[0])
    if width:
        index = indices.view(-1, width)
        if mode == _MEAN:
            grad = grad / (index != padding_idx).sum(1, keepdim=True).clamp(min=1).to(grad.dtype)
        rows = grad.unsqueeze(1).expand(-1, width, -1)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.view(-1, width, 1)
        return aten.embedding_dense_backward.default(rows, index, num_weights, padding_idx, False)
    kind = torch.promote_types(indices.dtype, offsets.dtype)
    if offset2bag.numel() != indices.numel():  # the kernel that adds up quickly does not tell it
        offset2bag = _bag_of(indices.numel(), starts[: grad.shape[0]])
    return op(
        grad,
        indices.to(kind),
        offset2bag.to(kind),
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )
