"""as_strided, resize_, set_: operators that address memory.

A DTensor has the strides of one device, but no memory in one piece. So it is gathered into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from ..dispatch.fallback import laid_out, mesh_of
from ..dispatch.operator import register_form
from ..dispatch.views import root_of
from ..errors import LayoutError
from ..layout.geometry import is_dense, memory_order
from ..rules.language import named
from ..storage.ragged import as_dtensor, gather_plain, move_to
from ..storage.wrapper import Wrapper
from ..tensor.inplace_views import shards_left

aten = torch.ops.aten


def _is_part(x: Any) -> bool:
    """True if a tensor is a view of some elements of another: offsets count from that one."""
    if not x.is_inference():
        return bool(x._is_view() and x._base.numel() != x.numel())
    root = root_of(x)  # autograd knows no views of inference tensors
    if root is not x:
        return bool(root.numel() != x.numel() or _is_part(root))
    return x._cell is not None and prod(x._cell.shape) != x.numel()


def _by_strides(op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator on the whole tensor, in the memory that it would have on one device."""
    given = named(op, (x, *args), kwargs)
    mesh = mesh_of(op, [v for v in given.values() if isinstance(v, torch.Tensor)])
    spec = as_dtensor(x, mesh)._spec
    own = spec.meta
    size, stride, offset = (given[name] for name in ("size", "stride", "storage_offset"))
    count = max(_end(own.shape, own.stride), (offset or 0) + _end(size, stride))
    places = torch.arange(count, device=x.device).as_strided(own.shape, own.stride)
    known = torch.zeros(count, dtype=torch.bool, device=x.device)
    known[places] = True
    found = (offset or 0) >= 0 and bool(known.as_strided(size, stride, offset or 0).all())
    if not found or (offset is not None and _is_part(x)):
        raise LayoutError(
            f"{op}: size {list(size)}, stride {list(stride)}, storage_offset {offset} of "
            f"{spec!r}: a DTensor knows only the memory of its own elements, counted from its "
            "first one. "
            "Go by strides in the tensor that has the memory, or use slices."
        )
    memory = known.to(own.dtype)
    memory[places] = gather_plain(op, x)
    given |= {"self": memory.as_strided(own.shape, own.stride), "storage_offset": offset or 0}
    if "src" in given:
        given["src"] = gather_plain(op, given["src"])
    return laid_out(op(**given), mesh)


def _end(size: Sequence[int], stride: Sequence[int]) -> int:
    """The address behind the last element."""
    steps = ((n - 1) * step for n, step in zip(size, stride, strict=True))
    return 1 + sum(steps) if prod(size) else 0


for _op in (aten.as_strided, aten.as_strided_copy, aten.as_strided_scatter):
    register_form(_op._qualified_op_name.removeprefix("aten::"))(partial(_by_strides, _op.default))


# --- other sizes in place ------------------------------------------------------------------------


def _become(op: Any, target: Any, made: Any) -> Any:
    """Let `target` be `made`, sharded as before along the dims that are left."""
    target.data = move_to(op, made, made._spec.with_placements(shards_left(target, made.ndim)))
    return target


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
