"""Operators that only say where elements go: turns, repeats, triangles and diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..layout.geometry import Interval
from .call import Call, has_fractions, keeps_sums, together
from .rule import Along, Dims, Rule, Site, along
from .slices import Spread, Window

__all__ = [
    "diag_embed",
    "diagonal",
    "diagonal_backward",
    "diagonal_scatter",
    "repeat",
    "trace",
    "triangle",
    "turned",
]

aten = torch.ops.aten


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


# --- triangles and diagonals -------------------------------------------------------------------


def triangle(call: Call) -> Rule:
    """tril and triu: each rank counts the diagonals from where its box is."""
    shape = call.shape(0)
    names = along([f"i{dim}" for dim in range(len(shape))])

    def tail(site: Site) -> tuple[int, ...]:
        (top, _), (left, _) = site.box(0)[-2:]
        return (call.get("diagonal") + top - left,)

    placed = frozenset(f"i{dim}" for dim in range(len(shape))[-2:])
    return _moved([names], names, _sizes(shape), tail=tail, placed=placed)


def trace(call: Call) -> Rule:
    """The sum of the diagonal: each rank adds up what of it is in its box."""
    src = call.specs[0].dtype

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        (top, _), (left, _) = site.box(0)
        return args[0].diagonal(top - left).sum(dtype=call.results[0].dtype)

    return Rule(
        (along(["i0", "i1"]),),
        ((),),
        _sizes(call.shape(0)),
        linear=((0,),) if keeps_sums(src, call.results[0].dtype) else (),
        averages=has_fractions(src),
        local=local,
        unless=lambda site: site.inputs[0].is_replicated(),
    )


class _Diagonal:
    """A diagonal of a matrix of some dims: its first row and column, and its length."""

    def __init__(self, call: Call, shape: Sequence[int]) -> None:
        self.offset = call.get("offset")
        self.dims = call.get("dim1") % len(shape), call.get("dim2") % len(shape)
        rows, columns = (shape[dim] for dim in self.dims)
        self.starts = max(0, -self.offset), max(0, self.offset)
        self.length = max(0, min(rows - self.starts[0], columns - self.starts[1]))
        self.rest = [f"i{d}" for d in range(len(shape)) if d not in self.dims]

    def window(self, side: int) -> Window:
        """The places of the diagonal among the rows (0) or columns (1)."""
        return Window(self.starts[side], self.starts[side] + self.length)

    def along(self, side: int) -> Dims:
        """The dims of the diagonal where it walks along the rows or columns."""
        return (*along(self.rest), Along(f"i{self.dims[side]}", self.window(side)))

    def offset_in(self, box: Sequence[Interval]) -> int:
        """The offset of the diagonal in a box of the matrix."""
        first, second = self.dims
        return int(self.offset + box[first][0] - box[second][0])

    def part(self, box: Sequence[Interval]) -> Interval:
        """Which elements of the diagonal are in a box of the matrix."""
        starts = [box[d][0] - s for d, s in zip(self.dims, self.starts, strict=True)]
        stops = [box[d][1] - s for d, s in zip(self.dims, self.starts, strict=True)]
        start = min(max(0, *starts), self.length)
        return start, max(start, min(self.length, *stops))


def _side(call: Call, found: _Diagonal) -> int:
    """Along which dim of the matrix the diagonal goes: the columns, if they alone are in shards."""
    first, second = (bool(call.specs[0].dim_axes[dim]) for dim in found.dims)
    return int(second and not first)


def diagonal(call: Call) -> Rule:
    """The diagonal lies where the rows do, or the columns; the other dim is whole."""
    shape = call.shape(0)
    found = _Diagonal(call, shape)
    side = _side(call, found)
    whole = found.dims[1 - side]

    def tail(site: Site) -> tuple[int, ...]:
        return (found.offset_in(site.box(0)), *found.dims)

    ins = along([None if d == whole else f"i{d}" for d in range(len(shape))])
    sizes = {f"i{d}": size for d, size in enumerate(shape) if d != whole}
    return _moved([ins], found.along(side), sizes, tail=tail)


def diagonal_backward(call: Call) -> Rule:
    """Zeros with the gradient on the diagonal, in the rows that the gradient has."""
    return _onto_diagonal(call, _Diagonal(call, call.get("input_sizes")))


def diag_embed(call: Call) -> Rule:
    """Zeros with the operand on a diagonal, in the rows that the operand has."""
    return _onto_diagonal(call, _Diagonal(call, call.results[0].shape))


def _onto_diagonal(call: Call, found: _Diagonal) -> Rule:
    shape = call.results[0].shape
    row = found.dims[0]
    spread = Spread(found.window(0), shape[row])
    ins = along([*found.rest, f"i{row}"])
    names = [None if d == found.dims[1] else Along(f"i{d}") for d in range(len(shape))]
    names[row] = Along(f"i{row}", spread)
    sizes = {f"i{d}": n for d, n in enumerate(shape) if d not in found.dims}
    sizes[f"i{row}"] = found.length

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        offset = found.offset_in(site.out_boxes[0])
        return aten.diagonal_backward.default(args[0], site.out_shapes[0], offset, *found.dims)

    return _moved([ins], tuple(names), sizes, local=local)


def diagonal_scatter(call: Call) -> Rule:
    """A copy with its diagonal replaced: each rank takes of the source what is in its box."""
    shape = call.shape(0)
    found = _Diagonal(call, shape)
    names = along([f"i{d}" for d in range(len(shape))])

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        box = site.box(0)
        start, stop = found.part(box)
        if start == stop or not prod(args[0].shape):
            return args[0].clone()
        first = site.box(1)[-1][0]
        part = args[1].narrow(-1, start - first, stop - start)
        return op(args[0], part, found.offset_in(box), *found.dims)

    source = found.along(_side(call, found))
    sizes = _sizes(shape)
    return Rule((names, source), (names,), sizes, reduce=None, local=local, **together(call))
