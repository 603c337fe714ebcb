"""embedding_bag: rows of the table by `embedding`, added up in bags.

Bags of one size may be sharded as the indices are; other indices are gathered. A table whose rows
are sharded gives Partial sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.fallback import mesh_of
from ..dispatch.operator import register_form
from ..rules.reductions import wide
from ..storage.ragged import as_dtensor, gather_plain, reduce_partial
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
    given = [each for each in (indices, per_sample_weights) if each is not None]
    mesh = mesh_of(op, [weight, offsets, *given])
    weight, indices, *factors = (
        reduce_partial(op, as_dtensor(each, mesh)) for each in (weight, *given)
    )
    starts = gather_plain(op, offsets)
    count = len(starts) - bool(include_last_offset)
    width = 0 if mode == _MAX or padding_idx >= 0 else _bag_width(len(indices), starts, count)
    both = zip(weight._spec.placements, indices._spec.placements, strict=True)
    apart = not any(place.is_shard() and own.is_shard() for place, own in both)
    in_shards = bool(width) and apart and indices._spec.is_sharded()
    by_kernel = mode == _MAX or not (in_shards or weight._spec.is_sharded())
    if in_shards:
        # The results but the bags do not depend on the indices of bags of one size.
        whole = [each._locals[0].new_zeros(each.shape) for each in (indices, *factors)]
    else:
        whole = [gather_plain(op, each) for each in (indices, *factors)]
        indices, *factors = (as_dtensor(each, mesh) for each in whole)
    if by_kernel:
        table = gather_plain(op, weight)
    else:  # nor do they depend on the table
        table = weight._locals[0].new_zeros(1, 1).expand(weight.shape[0], 1)
    index, *factor = whole
    options = (scale_grad_by_freq, mode, sparse, *(factor or [None]))
    found = op(table, index, starts, *options, include_last_offset, padding_idx)
    bags, *known = (as_dtensor(each, mesh) for each in found)
    if by_kernel:
        return bags, *known
    rows = aten.embedding.default(weight, indices)
    for each in factors:
        rows = rows * each.unsqueeze(1)
    if padding_idx >= 0:
        rows = rows.masked_fill((indices == padding_idx).unsqueeze(1), 0)
    if width:
        bags = rows.view(count, width, -1).sum(1)
    else:
        bag = as_dtensor(_bag_of(indices.shape[0], starts[:count]), mesh)
        rows = rows.to(wide(weight.dtype))
        bags = rows.new_zeros(count, rows.shape[1]).index_add(0, bag, rows)
    if mode == _MEAN:
        bags = bags * known[1].clamp(min=1).unsqueeze(1).to(bags.dtype).reciprocal()
    return bags.to(weight.dtype), *known


def _bag_width(count: int, starts: torch.Tensor, bags: int) -> int:
    """The size of the bags of `count` indices if all bags have the same size; else 0."""
    width = count // bags if bags else 0
    same = torch.arange(len(starts), dtype=starts.dtype, device=starts.device) * width
    return width if width * bags == count and torch.equal(starts, same) else 0


def _bag_of(count: int, starts: torch.Tensor) -> torch.Tensor:
    """The bag of each of `count` indices."""
    places = torch.arange(count, dtype=starts.dtype, device=starts.device)
    return torch.searchsorted(starts, places, right=True) - 1


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
    """The gradient of the table: that of `embedding`, with the gradient of a bag for each row."""
    if sparse:
        raise no_sparse_gradient(f"embedding_bag of a table of {num_weights} rows")
    op = aten._embedding_bag_dense_backward.default
    starts, count = gather_plain(op, offsets)[: grad.shape[0]], indices.shape[0]
    by_kernel = mode == _MAX or scale_grad_by_freq
    width = 0 if by_kernel else _bag_width(count, starts, grad.shape[0])
    if not width:
        bag = as_dtensor(_bag_of(count, starts).to(indices.dtype), mesh_of(op, [grad, indices]))
    if by_kernel:
        options = (num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)
        return op(grad, indices, bag, bag_size, maximum_indices, *options)
    if mode == _MEAN:
        grad = grad / bag_size.clamp(min=1).unsqueeze(1).to(grad.dtype)
    if width:
        rows = grad.unsqueeze(1).expand(-1, width, -1).flatten(0, 1)
    else:
        rows = grad.index_select(0, bag)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    return aten.embedding_dense_backward.default(rows, indices, num_weights, padding_idx, False)
