"""embedding_bag: sums, means and largest elements of the rows of a table."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from ..dispatch.fallback import mesh_of
from ..dispatch.operator import register_form
from ..layout.placement import Partial, Placement, Replicate
from ..layout.spec import DTensorSpec, TensorMeta
from ..rules.indexing import within
from ..rules.reductions import wide
from ..storage.halo import fetch_parts
from ..storage.ragged import as_dtensor, gather_plain, move_to, reduce_partial
from ..storage.wrapper import Wrapper, wrap
from .indexing import divided, frequencies, no_sparse_gradient
from .shards import shard_of, told
from .whole_bags import bag_gradient, factor_gradient, in_bags, largest_gradient

__all__ = ["backward", "embedding_bag", "weights_backward"]

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
    """Columns are free. Each rank has some of the bags, or where the rows are sharded adds up those
    in its box, whichever is less to move."""
    mesh = mesh_of(op, [weight, indices, offsets, per_sample_weights])
    weight, *others = (
        None if t is None else reduce_partial(op, as_dtensor(t, mesh))
        for t in (weight, indices, offsets, per_sample_weights)
    )
    options: tuple[Any, ...] = (scale_grad_by_freq, mode, sparse)
    given = [each for each in others if each is not None]
    found = in_bags(op, weight, given, options, include_last_offset, padding_idx)
    if found is not None:
        return found
    indices, offsets, own = (None if t is None else gather_plain(op, t) for t in others)
    spec = weight._spec
    options = (*options, own, include_last_offset, padding_idx)
    if spec.dim_axes[0] and mode == _MAX:
        places = [Replicate() if place.is_shard(0) else place for place in spec.placements]
        cuts = None if spec.cuts is None else (None, spec.cuts[1])
        weight = move_to(op, weight, spec.with_placements(places, cuts))
        spec = weight._spec
    if not spec.dim_axes[0]:
        parts = [op(part, indices, offsets, *options) for part in weight._locals]
        rest = parts[0][1:]
        columns = [spec, spec] if mode == _MAX else [spec]
        made = [
            _laid_out(like, [part[at] for part in parts])
            for at, like in zip((0, 3), columns, strict=False)
        ]
        last = made[1] if mode == _MAX else as_dtensor(rest[2], mesh)
        return made[0], as_dtensor(rest[0], mesh), as_dtensor(rest[1], mesh), last
    # What else is returned does not depend on the values of the table.
    table = weight._locals[0].new_zeros(1, 1).expand(weight.shape[0], 1)
    rest = op(table, indices, offsets, *options)[1:]
    parts = []
    for coord, part in zip(spec.slots, weight._locals, strict=True):
        piece = spec.box(coord)[0]
        total = _sums(part, piece, weight.shape[0], indices, offsets, own, mode, options[4:])
        if mode == _MEAN:
            total = (total / rest[1].clamp(min=1).unsqueeze(1)).to(part.dtype)
        parts.append(total)
    return _laid_out(spec, parts), *(as_dtensor(each, mesh) for each in rest)


def _laid_out(spec: DTensorSpec, parts: list[torch.Tensor]) -> Any:
    """What each rank has of the bags: the columns of its table, and a part of the sum over rows."""
    places: list[Placement] = [Partial() if p.is_shard(0) else p for p in spec.placements]
    shape = (parts[0].shape[0], spec.meta.shape[1])
    meta = TensorMeta(shape, (shape[1], 1), parts[0].dtype)
    cuts = None if spec.cuts is None else (None, spec.cuts[1])
    return wrap(DTensorSpec(spec.topology, places, meta, cuts=cuts), tuple(parts))


def _sums(
    part: torch.Tensor,
    piece: tuple[int, int],
    rows: int,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    mode: int,
    rest: tuple[Any, ...],
) -> torch.Tensor:
    """The sum over the rows of each bag that are in `piece`.

    That of a mean is not narrowed: half precision may hold the mean and not the sum.
    """
    include_last, padding = rest
    place, here = within(indices, piece, rows)
    if padding >= 0:
        here &= indices != padding
    bags = offsets.shape[0] - bool(include_last)
    if not here.any():
        return part.new_zeros(bags, part.shape[1])
    before = torch.cat([here.new_zeros(1, dtype=torch.int64), here.cumsum(0)])
    starts = before[offsets.long()].to(offsets.dtype)
    own = None if weights is None else weights[here]
    picks, dtype = place[here], wide(part.dtype)
    if mode == _MEAN and dtype is not part.dtype:
        part = part[picks].to(dtype)
        picks = torch.arange(len(picks), dtype=picks.dtype, device=picks.device)
    made: torch.Tensor = aten._embedding_bag_forward_only.default(
        part, picks, starts, False, _SUM, False, own, include_last, -1
    )[0]
    return made


for _name in ("_embedding_bag", "_embedding_bag_forward_only"):
    register_form(_name, always=True)(partial(embedding_bag, getattr(aten, _name).default))


def _bags_of(indices: Any, offsets: Any, known: Any) -> Any:
    """The bag of each index, which the kernel that adds up quickly does not tell."""
    if known.numel() == indices.numel():
        return known
    offsets = gather_plain(aten._embedding_bag_backward.default, offsets)
    every = torch.arange(indices.numel(), dtype=offsets.dtype, device=indices.device)
    return (torch.searchsorted(offsets, every, right=True) - 1).to(indices.dtype)


def _in_shards(rows: Any) -> bool:
    return isinstance(rows, Wrapper) and bool(rows._spec.dim_axes[0])


def _counts_rightly() -> bool:
    """Whether PyTorch's kernel for CPUs divides by how often an index occurs."""
    indices, bags = torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0])
    given = torch.ones(1, 1), indices, bags, torch.tensor([3]), bags, 2, True, 0, None
    made: torch.Tensor = torch.ops.aten._embedding_bag_dense_backward.default(*given)
    return made.flatten().tolist() == [1, 1]


_COUNTS_RIGHTLY = _counts_rightly()


def _divisors(op: Any, rows: Any, indices: Any) -> Any:
    """What the gradient of each row is divided by for its frequency.

    With PyTorch 2.13 not how often its index occurs: the kernel for CPUs takes, for the k-th of the
    different indices, how often that index occurs which is the k-th of all indices in order.
    """
    counts = frequencies(op, rows, indices)
    if rows.device.type != "cpu" or _COUNTS_RIGHTLY:
        return counts.clamp(min=1)
    spec = counts._spec
    facts = [torch.stack([part.sum(), part.count_nonzero()]) for part in counts._locals]
    table = told(op, spec, facts)
    starts, firsts = ([0, *accumulate(column)] for column in zip(*table, strict=True))
    known = []  # the frequencies of all indices in order, as many as there are different ones
    for coord, part in zip(spec.slots, counts._locals, strict=True):
        before = part.cumsum(0) - part + starts[shard_of(spec, 0, coord)]
        known.append(part.repeat_interleave((firsts[-1] - before).clamp(min=0).minimum(part)))
    ends = [min(end, firsts[-1]) for end in starts]
    size = TensorMeta((firsts[-1],), (1,), counts.dtype)
    cuts = [tuple(b - a for a, b in pairwise(ends))]
    line = DTensorSpec(spec.topology, spec.placements, size, cuts=cuts if cuts[0][1:] else None)
    found = fetch_parts(op, line, tuple(known), {0: list(pairwise(firsts))})
    pairs = zip(counts._locals, found, strict=True)
    return wrap(spec, tuple(part.clamp(min=1).masked_scatter(part > 0, own) for part, own in pairs))


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
    """The gradient of the table."""
    if sparse:
        raise no_sparse_gradient(f"embedding_bag of a table of {num_weights} rows")
    kind = torch.promote_types(indices.dtype, offsets.dtype)
    indices, offsets = indices.to(kind), offsets.to(kind)
    if mode == _MAX and _in_shards(maximum_indices):
        return largest_gradient(grad, maximum_indices, bag_size, num_weights)
    if mode != _MAX:
        op = aten._embedding_bag_dense_backward.default
        given = [each for each in (indices, offsets, per_sample_weights) if each is not None]
        mesh = mesh_of(op, [grad, *given])
        grad, *given = (reduce_partial(op, as_dtensor(each, mesh)) for each in (grad, *given))
        full = grad.to(wide(grad.dtype)) if scale_grad_by_freq else grad
        found = bag_gradient(op, full, given, num_weights, mode, padding_idx)
        if found is not None and scale_grad_by_freq:
            found = divided(found, _divisors(op, found, given[0])).to(grad.dtype)
        if found is not None:
            return found
    offset2bag = _bags_of(indices, offsets, offset2bag)
    return aten._embedding_bag_dense_backward.default(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@register_form("_embedding_bag_per_sample_weights_backward")
def weights_backward(
    grad: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    """The products of rows and gradients, added up over the columns."""
    op = aten._embedding_bag_per_sample_weights_backward.default
    tensors = [grad, weight, indices, offsets]
    mesh = mesh_of(op, tensors)
    grad, weight, indices, offsets = (
        reduce_partial(op, as_dtensor(each, mesh)) for each in tensors
    )
    found = factor_gradient(op, grad, weight, indices, offsets, padding_idx)
    if found is not None:
        return found
    rows = aten.index_select.default(weight, 0, indices)
    bags = _bags_of(indices, offsets, offset2bag)
    own = (rows * aten.index_select.default(grad, 0, bags)).sum(1)
    return own if padding_idx < 0 else own.masked_fill(indices == padding_idx, 0)
