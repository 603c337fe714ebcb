"""Factories that take a tensor as an example: they read its layout, never its values."""

from __future__ import annotations

from typing import Any

from ..layout.geometry import memory_order, stride_like
from .call import Call
from .rule import Rule, Site, along

__all__ = ["like", "new"]


def like(call: Call) -> Rule:
    """A tensor of the example's shape, in its layout; Replicate where the example is partial."""
    shape = call.results[0].shape
    dims = along([f"i{dim}" for dim in range(len(shape))])
    sizes = {f"i{dim}": size for dim, size in enumerate(shape)}
    return Rule((dims,), (dims,), sizes, reduce=None, ignores=True)


def new(call: Call) -> Rule:
    """A tensor of any shape: dims that have the example's size are laid out as the example's."""
    shape, example = call.results[0].shape, call.shape(0)
    pairs = zip(shape, example, strict=True) if len(shape) == len(example) else ()
    sizes = {f"i{dim}": size for dim, (size, other) in enumerate(pairs) if size == other}
    dims = along([f"i{dim}" if f"i{dim}" in sizes else None for dim in range(len(shape))])
    given = dims if len(shape) == len(example) else (None,) * len(example)
    strided = call.op._schema.name == "aten::new_empty_strided"
    return Rule(
        (given,),
        (dims,),
        sizes,
        reduce=None,
        ignores=True,
        shape_arg=None if strided else 1,
        local=_new_strided if strided else None,
    )


def _new_strided(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """Local strides with the order of dims that was asked for."""
    shape, stride = site.out_shapes[0], args[2]
    return op(args[0], shape, stride_like(shape, memory_order(stride)), **kwargs)
