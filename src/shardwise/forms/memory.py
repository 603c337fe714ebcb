"""as_strided, resize_, set_: operators that address memory.

A DTensor has the strides of one device, but no memory in one piece. So addresses become indices
into the flat tensor, and elements are taken or put by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..dispatch.fallback import laid_out
from ..dispatch.operator import register_form
from ..dispatch.out_variants import check_untracked
from ..dispatch.views import root_of
from ..errors import LayoutError
from ..layout.geometry import is_dense, memory_order
from ..layout.spec import TensorMeta
from ..redistribute.execute import in_order
from ..storage.ragged import move_to
from ..storage.wrapper import Wrapper, wrap
from ..tensor.inplace_views import shards_left, strided_alike

aten = torch.ops.aten


def _indices(
    meta: TensorMeta, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor | None:
    """The index in the flat tensor of each element of a strided view; None if an address is not
    that of an element."""
    shape, steps, _ = meta
    if not prod(size):
        return torch.empty(size, dtype=torch.int64)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if not prod(shape) or offset < 0:
        return None
    span = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    memory = torch.full((max(span, last + 1),), -1)
    address = torch.zeros((), dtype=torch.int64)
    for n, step in zip(shape, steps, strict=True):
        address = address.unsqueeze(-1) + torch.arange(n) * step
    memory[address.flatten()] = torch.arange(prod(shape))
    found = memory.as_strided(size, stride, offset).contiguous()
    return None if bool((found < 0).any()) else found


def _found(op: Any, x: Any, size: Sequence[int], stride: Sequence[int], offset: Any) -> Any:
    found = None
    if offset is None or not _is_part(x):
        found = _indices(x._spec.meta, tuple(size), tuple(stride), offset or 0)
    if found is None:
        raise LayoutError(
            f"{op}: size {list(size)}, stride {list(stride)}, storage_offset {offset} of "
            f"{x._spec!r}: a DTensor knows only the memory of its own elements, counted from its "
            "first one. "
            "Go by strides in the tensor that has the memory, or use slices."
        )
    return found


def _is_part(x: Any) -> bool:
    """True if a tensor is a view of some elements of another: offsets count from that one."""
    if not x.is_inference():
        return bool(x._is_view() and x._base.numel() != x.numel())
    root = root_of(x)  # autograd knows no views of inference tensors
    if root is not x:
        return bool(root.numel() != x.numel() or _is_part(root))
    return x._cell is not None and prod(x._cell.shape) != x.numel()


@register_form("as_strided")
def as_strided(
    x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None
) -> Any:
    """The elements at these addresses."""
    op = aten.as_strided.default
    made = aten.take.default(x, _found(op, x, size, stride, storage_offset))
    meta = made._spec.meta._replace(stride=tuple(stride))
    return wrap(made._spec.with_meta(meta), in_order(made._locals, stride))


@register_form("as_strided_copy")
def as_strided_copy(
    x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None
) -> Any:
    """As `as_strided`, dense in memory."""
    found = _found(aten.as_strided_copy.default, x, size, stride, storage_offset)
    return aten.take.default(x, found)


@register_form("as_strided_scatter")
def as_strided_scatter(
    x: Any, src: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None
) -> Any:
    """`x` with other elements at these addresses."""
    if not isinstance(x, Wrapper):
        x = laid_out(x, src._spec.topology)
    found = _found(aten.as_strided_scatter.default, x, size, stride, storage_offset)
    return aten.put.default(x, found, src)


# --- other sizes in place ------------------------------------------------------------------------


def _become(op: Any, target: Any, made: Any) -> Any:
    """Let `target` be `made`, sharded as before along the dims that are left."""
    target.data = move_to(op, made, made._spec.with_placements(shards_left(target, made.ndim)))
    return target


@register_form("as_strided_", always=True)
def as_strided_in_place(
    x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None
) -> Any:
    """The tensor becomes the elements at these addresses."""
    check_untracked(aten.as_strided_.default, x)
    x.data = strided_alike(x, aten.as_strided.default(x, size, stride, storage_offset))
    return x


@register_form("resize_", always=True)
def resize(x: Any, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Any:
    """The elements stay in the order of memory; new ones are not initialised."""
    op = aten.resize_.default
    size = tuple(size)
    if size == tuple(x.shape) and memory_format is None:
        return x
    if x._is_view() or not is_dense(x.shape, x.stride()):
        raise LayoutError(
            f"{op}: {x._spec!r} is a view, and its base would not see the new elements. Resize the "
            "base, or make a new tensor."
        )
    shared = x._cell is not None  # others may have views of it
    flat = x.permute(memory_order(x.stride())).reshape(-1)
    count, have = prod(size), x.numel()
    if count > have > 0 and shared:
        raise LayoutError(
            f"{op}: {x._spec!r} may share memory with other tensors, which would not see it grow "
            f"to {list(size)}. Resize a clone() of it, or make a new tensor."
        )
    if count > have:
        flat = torch.cat([flat, flat.new_empty(count - have)])
    stride = torch.empty(size, device="meta").to(memory_format=memory_format).stride()
    order = memory_order(stride)
    made = flat[:count].reshape([size[dim] for dim in order])
    made = made.permute(sorted(range(len(order)), key=order.__getitem__))
    if have and shared:
        x.data = made
        return x
    return _become(op, x, made.clone())


@register_form("resize_as_", always=True)
def resize_as(x: Any, template: Any, *, memory_format: torch.memory_format | None = None) -> Any:
    """The size of another tensor."""
    if not isinstance(x, Wrapper):
        return x.resize_(template.shape, memory_format=memory_format)
    return resize(x, template.shape, memory_format=memory_format)


@register_form("_has_compatible_shallow_copy_type", always=True)
def can_take(x: Any, source: Any) -> bool:
    """True if `x.data = source` is allowed."""
    return isinstance(x, Wrapper) and isinstance(source, Wrapper)


@register_form("set_.source_Tensor", always=True)
def set_to(x: Any, source: Any) -> Any:
    """The tensor becomes an alias of another, in the layout of that one."""
    if not isinstance(x, Wrapper):
        raise LayoutError(
            f"set_: a plain tensor of shape {list(x.shape)} cannot become an alias of "
            f"{source._spec!r}. Use full_tensor() of it, or a DTensor."
        )
    x.data = source if isinstance(source, Wrapper) else laid_out(source, x._spec.topology)
    return x


@register_form("set_.default", always=True)
def set_empty(x: Any) -> Any:
    """The tensor becomes empty."""
    return _become(aten.set_.default, x, x.new_empty(0))
