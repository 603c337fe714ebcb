"""Fourier transforms of dims in shards: one dim after another, and a long one as a matrix.

The places of a dim, row by row, are a matrix. Its columns are transformed, every element is turned
by an angle that its row and column tell, then the rows are transformed; the result is read column
by column. Rows are exchanged for columns three times, so a rank receives three shares of the dim
and not all of it. The transform of real numbers is its own mirror image: half of it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import isqrt, pi, prod
from typing import Any

import torch

from ..entry import register_differentiable, register_form
from ..geometry import Cuts, contiguous_stride
from ..placement import Shard
from ..redistribute import DimMap
from ..rules import Call
from ..spec import DTensorSpec, TensorMeta
from ..windows import fetch_all
from ..wrapper import wrap
from .scanning import needs_gradient
from .shards import lacking, relaid, settled

__all__ = ["c2c", "c2r", "r2c"]

aten = torch.ops.aten
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_REAL = {wide: real for real, wide in _COMPLEX.items()}
Sides = tuple[int, int]
"""Rows and columns of the matrix."""


# --- several dims --------------------------------------------------------------------------------


def _whole_first(x: Any, dims: Sequence[int]) -> list[int]:
    """The dims in an order in which those that are sharded come last."""
    return sorted(dims, key=lambda dim: (any(p.is_shard(dim % x.ndim) for p in x.placements), dim))


def _one_by_one(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    """By the time a sharded dim comes, another can be sharded instead."""
    for each in _whole_first(x, dim):
        x = aten._fft_c2c.default(x, [each], normalization, forward)
    return x


# --- which matrix, and whether it pays -----------------------------------------------------------


def _moved(sides: Sides, count: int, kind: str, width: int) -> list[int]:
    """The bytes of a rank's share in each of the three exchanges; `width` is of a complex number.

    In the last one columns are moved in whole, though a share may begin or end within them.
    """
    rows, columns = sides
    half, few = rows // 2 + 1, columns // 2 + 1
    torn = int(kind == "r2c" or columns % count > 0)
    wide, high, last = -(-columns // count), -(-rows // count), -(-columns // count) + torn
    if kind == "c2c":
        return [rows * wide * width, high * columns * width, rows * last * width]
    if kind == "c2r":
        return [2 * half * -(-few // count) * width, high * few * width, rows * last * width // 2]
    if kind == "r2c":
        last = -(-few // count) + torn
    return [rows * wide * width // 2, -(-half // count) * columns * width, 2 * half * last * width]


@lru_cache(maxsize=1024)
def _sides(size: int, count: int, kind: str) -> Sides | None:
    """The matrix of `size` places of which the least is moved between `count` shards."""
    small = [side for side in range(count, isqrt(size) + 1) if not size % side]
    every = [sides for side in small for sides in ((side, size // side), (size // side, side))]
    # Of equal ones that with a multiple of the count as rows: then a shard is whole rows.
    return min(
        every,
        key=lambda sides: (sum(_moved(sides, count, kind, 8)), sides[0] % count > 0, sides),
        default=None,
    )


def _kind(call: Call) -> str:
    name = call.op._schema.name.removeprefix("aten::_fft_")
    return name if call.get("onesided", True) else f"{name} in full"


def _serves(call: Call) -> bool:
    """Whether a call transforms several dims, or three exchanges are less than its rule moves."""
    dims = call.get("dim")
    if len(dims) != 1:
        return len(dims) > 1
    spec, kind = call.specs[0], _kind(call)
    dim = dims[0] % spec.ndim
    size, result = spec.shape[dim], call.get("last_dim_size") if kind == "c2r" else spec.shape[dim]
    known = spec.dtype in _COMPLEX or spec.dtype in _REAL
    if not spec.dim_axes[dim] or not known or (kind == "c2r" and size != result // 2 + 1):
        return False
    count = len(spec.dim_cuts[dim])
    sides = _sides(result, count, kind)
    if sides is None:
        return False
    local = spec.largest_shape
    others = [n for d, n in enumerate(local) if d != dim]
    width = _COMPLEX.get(spec.dtype, spec.dtype).itemsize
    steps = [(count - 1) * prod(others) * n // count for n in _moved(sides, count, kind, width)]
    if spec.dim_cuts[dim] != _near(spec, dim, sides[1]):
        steps.append(sides[1] * width)
    links = [spec.topology.links[axis] for axis in spec.dim_axes[dim]]
    return all(sum(map(link.price, steps)) < link.price(lacking(spec, dim)) for link in links)


def _matrix_of(x: Any, dim: int, size: int, kind: str) -> Sides:
    sides = _sides(size, len(x._spec.dim_cuts[dim]), kind)
    assert sides is not None, "a form that does not serve was called"
    return sides


# --- the steps -----------------------------------------------------------------------------------


def _near(spec: DTensorSpec, dim: int, columns: int) -> Cuts:
    """The cuts of a dim nearest to its own that make every shard whole rows, but for the last."""
    size = spec.shape[dim]
    ends = [
        size if end == size else min(size, (end + columns // 2) // columns * columns)
        for end in accumulate(spec.dim_cuts[dim])
    ]
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))


def _with(
    spec: DTensorSpec, dim: int, sizes: Sequence[int], at: int, dtype: torch.dtype, cuts: Any = None
) -> DTensorSpec:
    """The spec of a tensor with dims of `sizes` in place of `dim`; shards of it are those of the
    one that is `at` this place."""
    more = len(sizes) - 1
    shape = (*spec.shape[:dim], *sizes, *spec.shape[dim + 1 :])
    own = [None] * spec.ndim if spec.cuts is None else list(spec.cuts)
    middle = [cuts if place == at else None for place in range(len(sizes))]
    places = [
        Shard(p.dim + (at if p.dim == dim else more))
        if isinstance(p, Shard) and p.dim >= dim
        else p
        for p in spec.placements
    ]
    return DTensorSpec(
        spec.topology,
        places,
        TensorMeta(shape, contiguous_stride(shape), dtype),
        cuts=[*own[:dim], *middle, *own[dim + 1 :]],
    )


def _as_rows(op: Any, x: Any, dim: int, columns: int) -> Any:
    """A dim in shards of whole rows as two dims; the last row may have to be filled with zeros."""
    spec = x._spec
    near = _near(spec, dim, columns)
    x = relaid(op, x, _with(spec, dim, [spec.shape[dim]], 0, spec.dtype, near))
    rows = tuple(-(-cut // columns) for cut in near)
    goal = _with(spec, dim, [sum(rows), columns], 0, spec.dtype, rows)
    parts = []
    for coord, part in zip(goal.slots, x._locals, strict=True):
        shape = goal.local_shape(coord)
        empty = shape[dim] * columns - part.shape[dim]
        if empty:
            none = part.new_zeros(*part.shape[:dim], empty, *part.shape[dim + 1 :])
            part = torch.cat([part, none], dim)
        parts.append(part.contiguous().view(shape))
    return wrap(goal, tuple(parts))


def _exchanged(op: Any, x: Any, spec: DTensorSpec, dim: int, at: int) -> Any:
    """`x`, which has several dims in place of one, in shards of the one at this place."""
    sizes = x.shape[dim : dim + 1 + x.ndim - spec.ndim]
    goal = _with(spec, dim, sizes, at, x.dtype).with_meta(x._spec.meta)
    return relaid(op, x, goal)


def _turned(x: Any, dim: int, size: int, forward: bool) -> Any:
    """Every element of a matrix, turned by its row times its column of `size` parts of a circle."""
    spec, parts = x._spec, []
    for coord, part in zip(spec.slots, x._locals, strict=True):
        row, column = (
            torch.arange(*piece, dtype=torch.float64, device=part.device)
            for piece in spec.box(coord)[dim : dim + 2]
        )
        angle = torch.outer(row, column) * ((-2 if forward else 2) * pi / size)
        turn = torch.polar(torch.ones_like(angle), angle).to(part.dtype)
        parts.append(part * turn.reshape(*turn.shape, *[1] * (part.ndim - dim - 2)))
    return wrap(spec, tuple(parts))


def _by_columns(op: Any, x: Any, dim: int, goal: DTensorSpec, high: int, join: Any) -> Any:
    """The elements of a matrix column by column, as `goal` says.

    A rank receives the columns in which its own elements are; `join` makes one matrix of what they
    come as, `high` rows high. The rows of `x` are its dim before that of columns.
    """
    column = dim + x.ndim - goal.ndim
    axes = x._spec.dim_axes[column - 1]
    windows = tuple((a // high, -(-b // high)) if a < b else (0, 0) for a, b in goal.pieces(dim))
    rows = DimMap((), ((0, x.shape[column - 1]),))
    maps = {column - 1: rows, column: DimMap(axes, windows)}
    (found,) = fetch_all(op, [(x._spec, x._locals, maps)])
    parts = []
    for coord, part in zip(goal.slots, found, strict=True):
        start, stop = goal.box(coord)[dim]
        flat = join(part).transpose(dim, dim + 1).flatten(dim, dim + 1)
        first = start % high if start < stop else 0
        parts.append(flat.narrow(dim, first, stop - start).contiguous())
    return wrap(goal, tuple(parts))


def _ready(op: Any, x: Any) -> Any:
    """Pending sums stay pending: a transform is linear."""
    linear = all(x.placements[axis].reduce_op in ("sum", "avg") for axis in x._spec.sums)
    return x if linear else settled(op, x)


def _c2c_of_one(x: Any, dim: int, normalization: int, forward: bool) -> Any:
    op = aten._fft_c2c.default
    spec, (rows, columns) = x._spec, _matrix_of(x, dim, x.shape[dim], "c2c")
    x = _exchanged(op, _as_rows(op, x, dim, columns), spec, dim, 1)
    x = _turned(op(x, [dim], normalization, forward), dim, rows * columns, forward)
    x = op(_exchanged(op, x, spec, dim, 0), [dim + 1], normalization, forward)
    cuts = None if spec.cuts is None else spec.cuts[dim]
    goal = _with(spec, dim, [rows * columns], 0, spec.dtype, cuts)
    return _by_columns(op, x, dim, goal, rows, lambda part: part)


def _r2c_of_one(x: Any, dim: int, normalization: int, onesided: bool) -> Any:
    """Rows k and -k are mirror images; the second half of them is read off the first."""
    op, size = aten._fft_r2c.default, x.shape[dim]
    spec, kind = x._spec, "r2c" if onesided else "r2c in full"
    rows, columns = _matrix_of(x, dim, size, kind)
    x = _exchanged(op, _as_rows(op, x, dim, columns), spec, dim, 1)
    x = _turned(op(x, [dim], normalization, True), dim, size, True)
    x = _exchanged(op, x, spec, dim, 0)
    x = aten._fft_c2c.default(x, [dim + 1], normalization, True)
    goal = _with(spec, dim, [size // 2 + 1 if onesided else size], 0, x.dtype)
    kept = -(-goal.shape[dim] // rows)
    images = x.flip(dim + 1).narrow(dim + 1, 0, kept).conj().resolve_conj()

    def join(part: torch.Tensor) -> torch.Tensor:
        own, image = part.unbind(dim)
        return torch.cat([own, image.narrow(dim, 1, (rows - 1) // 2).flip(dim)], dim)

    pair = torch.stack([x.narrow(dim + 1, 0, kept), images], dim)
    return _by_columns(op, pair, dim, goal, rows, join)


def _c2r_of_one(x: Any, dim: int, normalization: int, size: int) -> Any:
    """Columns k and -k are mirror images: each is made whole of what both have, and one serves."""
    op = aten._fft_c2r.default
    spec, (rows, columns) = x._spec, _matrix_of(x, dim, size, "c2r")
    x, few = _as_rows(op, x, dim, columns), columns // 2 + 1
    first, rest = x.narrow(dim + 1, 0, 1), x.flip(dim + 1).narrow(dim + 1, 0, few - 1)
    images = torch.cat([first, rest], dim + 1).conj().resolve_conj()
    x = torch.stack([x.narrow(dim + 1, 0, few), images], dim)
    x = _completed(_exchanged(op, x, spec, dim, 2), spec, dim, rows)
    x = _turned(aten._fft_c2c.default(x, [dim], normalization, False), dim, size, False)
    x = op(_exchanged(op, x, spec, dim, 0), [dim + 1], normalization, columns)
    return _by_columns(op, x, dim, _with(spec, dim, [size], 0, x.dtype), rows, lambda part: part)


def _completed(x: Any, spec: DTensorSpec, dim: int, rows: int) -> Any:
    """Whole columns of their first halves and those of their images, a row later in column 0."""
    goal = _with(spec, dim, [rows, x.shape[dim + 2]], 1, x.dtype)
    parts = []
    for coord, part in zip(goal.slots, x._locals, strict=True):
        own, image = part.unbind(dim)
        start, stop = goal.box(coord)[dim + 1]
        at = int(start == 0 < stop)
        late = image.narrow(dim, 1, rows // 2).narrow(dim + 1, 0, at)
        image = image.narrow(dim, 0, rows // 2).narrow(dim + 1, at, stop - start - at)
        second = torch.cat([late, image], dim + 1).flip(dim)
        parts.append(torch.cat([own.narrow(dim, 0, rows - rows // 2), second], dim))
    return wrap(goal, tuple(parts))


# --- the forms -----------------------------------------------------------------------------------


@register_form("_fft_c2c", when=_serves)
def c2c(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    """One dim after another, or one as a matrix."""
    if len(dim) > 1:
        return _one_by_one(x, dim, normalization, forward)
    x = _ready(aten._fft_c2c.default, x)
    return _c2c_of_one(x, dim[0] % x.ndim, normalization, forward)


@register_form("_fft_r2c", when=_serves)
def r2c(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    """The last dim from real to complex, then the others."""
    if len(dim) > 1:
        half = aten._fft_r2c.default(x, [dim[-1]], normalization, onesided)
        return _one_by_one(half, dim[:-1], normalization, True)
    x = _ready(aten._fft_r2c.default, x)
    return _r2c_of_one(x, dim[0] % x.ndim, normalization, onesided)


@register_form("_fft_c2r", when=_serves)
def c2r(x: Any, dim: Sequence[int], normalization: int, last_dim_size: int) -> Any:
    """The other dims, then the last one from complex to real."""
    if len(dim) > 1:
        half = _one_by_one(x, dim[:-1], normalization, False)
        return aten._fft_c2r.default(half, [dim[-1]], normalization, last_dim_size)
    x = _ready(aten._fft_c2r.default, x)
    return _c2r_of_one(x, dim[0] % x.ndim, normalization, last_dim_size)


# --- the gradient --------------------------------------------------------------------------------


class RealToComplex(torch.autograd.Function):
    """Half of a transform of real numbers. PyTorch's gradient fills a tensor twice as large."""

    @staticmethod
    def forward(ctx: Any, x: Any, dim: list[int], normalization: int) -> Any:
        ctx.given = dim, normalization, x.shape[dim[-1]]
        return aten._fft_r2c.default(x, dim, normalization, True)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        dim, normalization, size = ctx.given
        once = grad.clone()  # the transform back takes all but the ends of a half for two
        once.narrow(dim[-1], 1, (size - 1) // 2).mul_(0.5)
        return aten._fft_c2r.default(once, dim, normalization, size), None, None


def differentiable_r2c(x: Any, dim: list[int], normalization: int, onesided: bool) -> Any:
    """As the operator, with a gradient that stays in shards."""
    if onesided and needs_gradient(x) and x._spec.is_sharded():
        return RealToComplex.apply(x, dim, normalization)
    return _below(x, dim, normalization, onesided)


_below = register_differentiable(aten._fft_r2c.default, differentiable_r2c)
