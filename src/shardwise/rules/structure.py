"""Operators that only say where elements go, and factories that take a tensor as an example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layout.geometry import memory_order, stride_like
from .language import Call, Dims, Rule, Site, along


def _moved(ins: Sequence[Dims], out: Dims, sizes: dict[str, int], **more: Any) -> Rule:
    """A rule of operators that copy elements, or put zeros."""
    every = tuple(range(len(ins)))
    return Rule(tuple(ins), (out,), sizes, reduce=None, linear=(every,), **more)


def _sizes(shape: Sequence[int]) -> dict[str, int]:
    return {f"i{dim}": size for dim, size in enumerate(shape)}


def turned(call: Call) -> Rule:
    """flip and roll: the dims that turn are whole; roll without dims turns all of them."""
    shape, dims = call.shape(0), call.get("dims")
    every = not dims and call.op._schema.name == "aten::roll"
    whole = set(range(len(shape))) if every else {d % len(shape) for d in dims if shape}
    names = along([None if d in whole else f"i{d}" for d in range(len(shape))])
    return _moved(
        [names], names, {n: s for n, s in _sizes(shape).items() if int(n[1:]) not in whole}
    )


def repeat(call: Call) -> Rule:
    """Dims that are repeated are whole, those that are not stay as they are."""
    shape, times = call.shape(0), call.get("repeats")
    lead = len(times) - len(shape)
    names = [f"i{d}" if times[lead + d] == 1 else None for d in range(len(shape))]
    sizes = {name: size for name, size in _sizes(shape).items() if name in names}
    return _moved([along(names)], along([*[None] * lead, *names]), sizes)


# --- matrices ----------------------------------------------------------------------------------


def triangle(call: Call) -> Rule:
    """tril and triu: each rank counts the diagonals from where its box is."""
    shape = call.shape(0)
    names = along([f"i{dim}" for dim in range(len(shape))])

    def tail(site: Site) -> tuple[int, ...]:
        (top, _), (left, _) = site.box(0)[-2:]
        return (call.get("diagonal") + top - left,)

    placed = frozenset(f"i{dim}" for dim in range(len(shape))[-2:])
    return _moved([names], names, _sizes(shape), tail=tail, placed=placed)


def diagonal(call: Call) -> Rule:
    """The two dims of the diagonal are whole."""
    shape = call.shape(0)
    whole = {call.get("dim1") % len(shape), call.get("dim2") % len(shape)}
    free = [f"i{d}" for d in range(len(shape)) if d not in whole]
    names = along([None if d in whole else f"i{d}" for d in range(len(shape))])
    sizes = {name: size for name, size in _sizes(shape).items() if name in free}
    return _moved([names], along([*free, None]), sizes)


# --- factories -----------------------------------------------------------------------------------


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
