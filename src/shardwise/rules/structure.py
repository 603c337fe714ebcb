"""Operators that only say where elements go, and factories that take a tensor as an example."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layout.geometry import memory_order, stride_like
from .language import Call, Rule, Site, along
from .views import copied, each_dim, reordered, sizes_of, without


def constant_pad(call: Call) -> Rule:
    """A number around a tensor, or less of the tensor: dims that change are whole."""
    names = each_dim(len(call.shape(0)))
    pads = call.get("pad")
    changed = [len(names) - 1 - at // 2 for at, count in enumerate(pads) if count]
    names = without(names, changed)
    rule = replace(copied(call, names, names), copies=False)
    return rule if call.get("value") == 0 else replace(rule, linear=())


def turned(call: Call) -> Rule:
    """flip and roll: the dims that turn are whole; roll without dims turns all of them."""
    ndim, dims = len(call.shape(0)), call.get("dims")
    every = not dims and call.op._schema.name == "aten::roll"
    whole = range(ndim) if every else [dim % ndim for dim in dims if ndim]
    names = without(each_dim(ndim), whole)
    return copied(call, names, names)


def repeat(call: Call) -> Rule:
    """Dims that are repeated are whole, those that are not stay as they are."""
    times = call.get("repeats")
    names = without(each_dim(len(times)), [dim for dim, count in enumerate(times) if count != 1])
    return copied(call, names[len(times) - len(call.shape(0)) :], names)


def triangle(call: Call) -> Rule:
    """tril and triu: each rank counts the diagonals from where its box is."""
    names = each_dim(len(call.shape(0)))

    def tail(site: Site) -> tuple[int, ...]:
        (top, _), (left, _) = site.box(0)[-2:]
        return (call.get("diagonal") + top - left,)

    rule = reordered(call, names)
    return replace(rule, copies=False, tail=tail, placed=frozenset(map(str, names[-2:])))


def diagonal(call: Call) -> Rule:
    """The two dims of the diagonal are whole."""
    ndim = len(call.shape(0))
    names = without(each_dim(ndim), [call.get(name) % ndim for name in ("dim1", "dim2")])
    return copied(call, names, [*(name for name in names if name), None])


# --- factories -----------------------------------------------------------------------------------


def like(call: Call) -> Rule:
    """A tensor of the example's shape, in its layout; Replicate where the example is partial."""
    shape = call.results[0].shape
    dims = along(each_dim(len(shape)))
    return Rule((dims,), (dims,), sizes_of(shape), reduce=None, ignores=True)


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
