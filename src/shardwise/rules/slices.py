"""Slices, `select`, their backward operators, `cat` and `stack`: parts of a dim, and dims made of
parts. The cuts of a result are computed from those of the operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from ..layout.geometry import Cuts, Interval, chunk_cuts, intervals
from ..layout.spec import Groups
from .language import Along, Call, Dims, Rule, Site, along, together
from .views import copied, each_dim, form_of, of_shape, reordered, sizes_of, without

aten = torch.ops.aten

# --- slices ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """The positions start, start+step, ... below stop of a dim: what a slice keeps."""

    start: int
    stop: int
    step: int = 1

    def to_factor(self, cuts: Cuts) -> Cuts | None:
        return None

    def from_factor(self, cuts: Cuts, counts: tuple[int, ...]) -> Cuts:
        return tuple(self._count(piece) for piece in intervals(cuts))

    def _count(self, piece: Interval) -> int:
        first, last = self.within(piece)
        return len(range(first, last, self.step))

    def within(self, piece: Interval) -> Interval:
        """The first position of the window in `piece`, and where the window or the piece ends."""
        behind = max(0, piece[0] - self.start)
        first = self.start + -(-behind // self.step) * self.step
        last = min(piece[1], self.stop)
        return (first, last) if first < last else (piece[0], piece[0])

    def local(self, piece: Interval) -> Interval:
        """Start and end of the local slice of a rank that holds `piece`."""
        first, last = self.within(piece)
        return first - piece[0], last - piece[0]


@dataclass(frozen=True)
class Spread:
    """The inverse of a window: a dim of `size` in which the factor's elements are spread out.

    It is cut where `torch.chunk` would cut it if that leaves every element with its rank.
    """

    window: Window
    size: int

    def to_factor(self, cuts: Cuts) -> Cuts | None:
        return None

    def from_factor(self, cuts: Cuts, counts: tuple[int, ...]) -> Cuts:
        window, total = self.window, sum(cuts)
        wanted = [start for start, _ in intervals(chunk_cuts(self.size, counts))]
        ends = []
        for want, (start, _) in zip(wanted, intervals(cuts), strict=True):
            low = window.start + (start - 1) * window.step + 1 if start else 0
            high = window.start + start * window.step if start < total else self.size
            ends.append(min(max(want, low), high))
        ends = [0, *ends[1:], self.size]
        return tuple(b - a for a, b in pairwise(ends))


def _window(call: Call, size: int) -> Window:
    start, stop = call.get("start"), call.get("end")
    first, last, _ = slice(start, stop).indices(size)
    return Window(first, max(first, last), call.get("step", 1))


def _sliced(call: Call) -> tuple[int, Window, dict[str, Any]]:
    """The dim of a slice and its window, and the traits of a rule whose local call slices."""
    shape = call.shape(0)
    dim = call.get("dim", 0) % len(shape)
    window = _window(call, shape[dim])

    def tail(site: Site) -> tuple[int, ...]:
        return (dim, *window.local(site.box(0)[dim]), window.step)

    return dim, window, {"tail": tail, "placed": frozenset([f"i{dim}"])}


def slice_tensor(call: Call) -> Rule:
    """A slice: on a sharded dim each rank keeps what it has of it, in place."""
    shape = call.shape(0)
    dim, window, traits = _sliced(call)
    blocks = _of_blocks(call, dim, [window])
    if blocks is not None:
        return blocks
    rule = reordered(call, each_dim(len(shape)))
    return replace(rule, outputs=(_linked(shape, dim, window),), **traits)


def _of_blocks(call: Call, dim: int, windows: Sequence[Window]) -> Rule | None:
    """The rule of slices that begin and end where blocks of a dim do; None if there are others.

    Queries, keys and values in one dim are such blocks. Each rank has its piece of every block, so
    it has its piece of every slice.
    """
    groups = call.laid[0].groups
    if groups is None or len(groups[dim]) == 1:
        return None
    count, *rest = groups[dim]
    inner = call.shape(0)[dim] // count
    bounds = [bound for window in windows for bound in (window.start, window.stop)]
    if any(bound % inner for bound in bounds) or any(
        w.step > 1 or w.start == w.stop for w in windows
    ):
        return None
    names, sizes = _names(groups, dim)
    ends = [(window.start // inner, window.stop // inner) for window in windows]

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        step = args[0].shape[dim] // count
        cut = form_of(op, aten.slice.Tensor, aten.slice_copy.Tensor)
        made = [cut(args[0], dim, start * step, stop * step) for start, stop in ends]
        return made if isinstance(call.structure, tuple) else made[0]

    outputs, outs = [], []
    for start, stop in ends:
        one = stop - start == 1
        outputs.append([n for n in names if n is not _BLOCK] if one else names)
        outs.append((*groups[:dim], (*rest,) if one else (stop - start, *rest), *groups[dim + 1 :]))
    made = [along([None if n is _BLOCK else n for n in each]) for each in (names, *outputs)]
    return Rule(
        (made[0],),
        tuple(made[1:]),
        sizes,
        reduce=None,
        linear=((0,),),
        copies=True,
        local=local,
        apart=((groups,), tuple(outs)),
    )


_BLOCK = "block"
"""Stands for the dim that counts blocks, which is whole."""


def _names(groups: Groups, dim: int) -> tuple[list[str], dict[str, int]]:
    """A factor for each part of each dim, but for the first part of one; and their sizes."""
    names, sizes = [], {}
    for index, group in enumerate(groups):
        for place, size in enumerate(group):
            name = _BLOCK if index == dim and place == 0 else f"i{index}.{place}"
            names.append(name)
            if name is not _BLOCK:
                sizes[name] = size
    return names, sizes


def _linked(shape: Sequence[int], dim: int, link: Window | Spread) -> Dims:
    return tuple(Along(f"i{d}", link if d == dim else None) for d in range(len(shape)))


def split(call: Call) -> Rule:
    """Consecutive slices of one dim, as many as there are results."""
    shape = call.shape(0)
    dim = call.get("dim", 0) % len(shape)
    windows, start = [], 0
    for result in call.results:
        windows.append(Window(start, start + result.shape[dim]))
        start += result.shape[dim]
    blocks = _of_blocks(call, dim, windows)
    if blocks is not None:
        return blocks
    rule = reordered(call, each_dim(len(shape)))

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        piece = site.box(0)[dim]
        cut = form_of(op, aten.slice.Tensor, aten.slice_copy.Tensor)
        return [cut(args[0], dim, *window.local(piece)) for window in windows]

    def has_all(site: Site) -> bool:
        return site.box(0)[dim] == (0, shape[dim])

    outputs = tuple(_linked(shape, dim, window) for window in windows)
    reads = frozenset([f"i{dim}"])
    return replace(rule, outputs=outputs, local=local, placed=reads, unless=has_all)


def slice_scatter(call: Call) -> Rule:
    """A copy with a slice replaced; the source is cut as the slice is."""
    shape = call.shape(0)
    dim, window, traits = _sliced(call)
    whole = along(each_dim(len(shape)))
    inputs = (whole, _linked(shape, dim, window))
    return Rule(inputs, (whole,), sizes_of(shape), reduce=None, **together(call), **traits)


def slice_backward(call: Call) -> Rule:
    """Zeros with the gradient in the place of the slice."""
    shape = call.shape(0)
    sizes = call.get("input_sizes")
    dim = call.get("dim") % len(shape)
    window = _window(call, sizes[dim])

    def tail(site: Site) -> tuple[Any, ...]:
        return (site.out_shapes[0], dim, *window.local(site.out_boxes[0][dim]), window.step)

    rule = reordered(call, each_dim(len(shape)))
    outputs = (_linked(shape, dim, Spread(window, sizes[dim])),)
    return replace(rule, outputs=outputs, tail=tail, placed=frozenset([f"i{dim}"]))


def select(call: Call) -> Rule:
    """One place of a dim that must be whole, without the dim; `unbind` gives every place."""
    names = each_dim(len(call.shape(0)))
    dim = call.get("dim", 0) % len(names)
    return copied(call, without(names, [dim]), _dropped(names, dim))


def _dropped(names: Sequence[str | None], dim: int) -> list[str | None]:
    return [*names[:dim], *names[dim + 1 :]]


def select_backward(call: Call) -> Rule:
    """Zeros with the gradient in one place of a dim that the result has whole."""
    names = each_dim(len(call.get("input_sizes")))
    dim = call.get("dim") % len(names)
    return copied(call, _dropped(names, dim), without(names, [dim]), **of_shape(call))


def select_scatter(call: Call) -> Rule:
    """A copy with one place of a dim replaced; the dim must be whole."""
    names = each_dim(len(call.shape(0)))
    dim = call.get("dim") % len(names)
    return _joined(call, [without(names, [dim]), _dropped(names, dim)], without(names, [dim]))


# --- joining ---------------------------------------------------------------------------------


def cat(call: Call) -> Rule:
    """Tensors one after another along a dim.

    The dim must be whole, or all tensors have one layout: each is then a block of the result.
    `forms/join.py` serves other sharded dims.
    """
    ndim = len(call.results[0].shape)
    dim = call.get("dim", 0) % ndim
    spec = call.laid[0]
    even = spec.cuts is None or (spec.groups is None and spec.cuts[dim] is None)
    here = spec.placements, spec.cuts, spec.shape
    alike = even and all((each.placements, each.cuts, each.shape) == here for each in call.laid)
    if alike and len(call.laid) > 1 and spec.dim_axes[dim] and spec.meta.shape[dim] > 1:
        return _joined_blocks(call, dim)
    dims = each_dim(ndim)
    dims[dim] = None
    return _joined(
        call, [dims if spec.ndim == ndim else [None] * spec.ndim for spec in call.specs], dims
    )


def _joined_blocks(call: Call, dim: int) -> Rule:
    groups = call.laid[0].blocks
    count = len(call.laid)
    whole = (*groups[:dim], (count, *groups[dim]), *groups[dim + 1 :])
    names, sizes = _names(whole, dim)
    parts = along([name for name in names if name is not _BLOCK])
    made = along([None if name is _BLOCK else name for name in names])
    apart = (groups,) * count, (whole,)
    return Rule((parts,) * count, (made,), sizes, reduce=None, **together(call), apart=apart)


def stack(call: Call) -> Rule:
    """Tensors of one shape along a new dim."""
    ndim = len(call.results[0].shape)
    dim = call.get("dim", 0) % ndim
    dims = each_dim(ndim)
    dims[dim] = None
    return _joined(call, [_dropped(dims, dim)] * len(call.specs), dims)


def _joined(call: Call, inputs: Sequence[list[str | None]], dims: list[str | None]) -> Rule:
    sizes = {name: size for name, size in zip(dims, call.results[0].shape, strict=True) if name}
    return Rule(tuple(map(along, inputs)), (along(dims),), sizes, reduce=None, **together(call))
