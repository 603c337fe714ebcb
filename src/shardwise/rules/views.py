"""Views, slices and their backwards: the factors come from the shapes, the cuts follow by
arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm, prod
from typing import Any

import torch

from ..finer import common, trivial
from ..geometry import Cuts, Interval, chunk_cuts, intervals
from ..spec import Groups
from .call import Call, has_fractions, keeps_sums
from .rule import COPIED, Along, Dims, Rule, Scaled, Site, along

__all__ = [
    "Window",
    "cat",
    "expand",
    "permute",
    "select",
    "select_backward",
    "select_scatter",
    "slice_backward",
    "slice_scatter",
    "slice_tensor",
    "split",
    "squeeze",
    "stack",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
    "view_as_complex",
    "view_as_real",
    "view_dtype",
]

aten = torch.ops.aten


def _names(ndim: int) -> list[str | None]:
    return [f"i{dim}" for dim in range(ndim)]


def _sizes(shape: Sequence[int]) -> dict[str, int]:
    return {f"i{dim}": size for dim, size in enumerate(shape)}


# --- view and reshape -----------------------------------------------------------------------


def view(call: Call) -> Rule:
    """Regroup dims: `"(a b) c -> a (b c)"`, with the factors computed from the two shapes."""
    src, dst = call.laid[0].groups or trivial(call.shape(0)), call.results[0].shape
    ins, outs, sizes, apart = regroup(src, dst)
    plain = apart == (trivial(call.shape(0)), trivial(dst))
    return Rule(
        (ins,),
        (outs,),
        sizes,
        reduce=None,
        linear=((0,),),
        passes=COPIED,
        shape_arg=1,
        apart=None if plain else ((apart[0],), (apart[1],)),
    )


def view_dtype(call: Call) -> Rule:
    """The same bytes as another dtype; the last dim is whole if elements change their size."""
    src, dst = call.specs[0], call.results[0]
    names = _names(src.ndim)
    if src.dtype.itemsize != dst.dtype.itemsize:
        names[-1] = None
    sizes = {name: size for name, size in _sizes(src.meta.shape).items() if name in names}
    return Rule((along(names),), (along(names),), sizes, reduce=None)


def view_as_real(call: Call) -> Rule:
    """Complex numbers as pairs."""
    names = _names(len(call.shape(0)))
    return replace(_reordered(call, [*names, None]), passes=())


def view_as_complex(call: Call) -> Rule:
    """Pairs as complex numbers; the pairs are whole."""
    names = _names(len(call.shape(0)) - 1)
    sizes = _sizes(call.shape(0)[:-1])
    return Rule((along([*names, None]),), (along(names),), sizes, reduce=None, linear=((0,),))


def regroup(
    src: Groups, dst: Sequence[int]
) -> tuple[Dims, Dims, dict[str, int], tuple[Groups, Groups]]:
    """Which dims of two shapes with the same elements walk along common factors, and how the dims
    are taken apart for that. `src` has them taken apart as far as they are sharded block by block.
    """
    shape = [prod(group) for group in src]
    ins: list[list[Along | None]] = [[None] for _ in shape]
    outs: list[list[Along | None]] = [[None] for _ in dst]
    groups: tuple[list[tuple[int, ...]], ...] = (
        [(size,) for size in shape],
        [(size,) for size in dst],
    )
    sizes: dict[str, int] = {}
    if prod(shape) == 0:
        for dim, (size, other) in enumerate(zip(shape, dst, strict=False)):
            if size != other:
                break
            ins[dim] = outs[dim] = [Along(f"i{dim}")]
            sizes[f"i{dim}"] = size
    else:
        for a, b in _blocks(shape, dst):
            _walk(src, dst, a, b, (ins, outs), groups, sizes)
    return _flat(ins), _flat(outs), sizes, (tuple(groups[0]), tuple(groups[1]))


def _flat(dims: list[list[Along | None]]) -> Dims:
    return tuple(at for each in dims for at in each)


def _blocks(src: Sequence[int], dst: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dims of two shapes that have the same elements; dims of size 1 are in none."""
    a = [dim for dim, size in enumerate(src) if size != 1]
    b = [dim for dim, size in enumerate(dst) if size != 1]
    i = j = 0
    while i < len(a):
        i0, j0 = i, j
        left, right = src[a[i]], dst[b[j]]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * src[a[i]], i + 1
            else:
                right, j = right * dst[b[j]], j + 1
        yield a[i0:i], b[j0:j]


def _walk(
    src: Groups,
    dst: Sequence[int],
    a: list[int],
    b: list[int],
    alongs: tuple[list[list[Along | None]], ...],
    groups: tuple[list[tuple[int, ...]], ...],
    sizes: dict[str, int],
) -> None:
    """The factors of one run of dims: all of them if the ends of the dims of one shape fall on ends
    of the other's, else the outermost alone."""
    whole = [prod(src[dim]) for dim in a]
    fine = tuple(size for dim in a for size in src[dim])
    target = tuple(dst[dim] for dim in b)
    found = common((fine,), (target,)) or common((tuple(whole),), (target,))
    name = f"i{a[0]}"
    if found is None:
        total = prod(target)
        inner_in, inner_out = total // whole[0], total // target[0]
        block = lcm(inner_in, inner_out)
        sizes[name] = total // block
        alongs[0][a[0]] = [Along(name, _scaled(block // inner_in))]
        alongs[1][b[0]] = [Along(name, _scaled(block // inner_out))]
        return
    names = [name, *(f"{name}.{place}" for place in range(1, len(found[0])))]
    sizes.update(zip(names, found[0], strict=True))
    for side, dims, wholes in ((0, a, whole), (1, b, target)):
        left = list(zip(names, found[0], strict=True))
        for dim, size in zip(dims, wholes, strict=True):
            taken = [left.pop(0)]
            while prod(n for _, n in taken) != size:
                taken.append(left.pop(0))
            alongs[side][dim] = [Along(factor) for factor, _ in taken]
            groups[side][dim] = tuple(n for _, n in taken)


def _scaled(block: int) -> Scaled | None:
    return Scaled(block) if block > 1 else None


# --- dims in another order, more or fewer of them ----------------------------------------------


def _reordered(call: Call, names: Sequence[str | None]) -> Rule:
    shape = call.shape(0)
    return Rule(
        (along(_names(len(shape))),),
        (along(names),),
        _sizes(shape),
        reduce=None,
        linear=((0,),),
        passes=COPIED,
    )


def permute(call: Call) -> Rule:
    """Dims in another order."""
    ndim = len(call.shape(0))
    return _reordered(call, [f"i{dim % ndim}" for dim in call.get("dims")])


def transpose(call: Call) -> Rule:
    """Two dims exchanged; `t` exchanges the only two."""
    ndim = len(call.shape(0))
    names = _names(ndim)
    if ndim:
        a, b = call.get("dim0", 0) % ndim, call.get("dim1", ndim - 1) % ndim
        names[a], names[b] = names[b], names[a]
    return _reordered(call, names)


def unsqueeze(call: Call) -> Rule:
    """A new dim of size 1."""
    ndim = len(call.shape(0))
    names = _names(ndim)
    names.insert(call.get("dim") % (ndim + 1), None)
    return _reordered(call, names)


def squeeze(call: Call) -> Rule:
    """Without some dims of size 1; a sharded one must be whole before it can go."""
    shape = call.shape(0)
    dim = call.get("dim")
    named = range(len(shape)) if dim is None else dim if isinstance(dim, (list, tuple)) else (dim,)
    gone = {d % len(shape) for d in named if shape[d] == 1} if shape else set()
    rule = _reordered(call, [f"i{d}" for d in range(len(shape)) if d not in gone])
    ins = tuple(None if d in gone else at for d, at in enumerate(rule.inputs[0]))

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        return _forms(op, aten.squeeze.dims, aten.squeeze_copy.dims)(args[0], list(gone))

    return replace(
        rule,
        inputs=(ins,),
        sizes={f"i{d}": n for d, n in enumerate(shape) if d not in gone},
        local=local,
        placed=frozenset(),
    )


def _forms(op: Any, view: Any, copy: Any) -> Any:
    """The form of a view that `op` asks for: the view itself or its copy."""
    return copy if op._schema.name.endswith("_copy") else view


def expand(call: Call) -> Rule:
    """Dims of size 1 made larger; they have no factor, for every rank has all of them."""
    shape, out = call.shape(0), call.results[0].shape
    lead = len(out) - len(shape)
    names: list[str | None] = [None] * lead
    names += [f"i{dim}" if size == out[lead + dim] else None for dim, size in enumerate(shape)]
    rule = _reordered(call, names)
    ins = along(names[lead:])
    sizes = {name: size for name, size in _sizes(shape).items() if name in names}
    return replace(rule, inputs=(ins,), sizes=sizes, shape_arg=1)


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


def slice_tensor(call: Call) -> Rule:
    """A slice: on a sharded dim each rank keeps what it has of it, in place."""
    shape = call.shape(0)
    dim = call.get("dim", 0) % len(shape)
    window = _window(call, shape[dim])
    rule = _reordered(call, _names(len(shape)))

    def tail(site: Site) -> tuple[int, ...]:
        return (dim, *window.local(site.box(0)[dim]), window.step)

    placed = frozenset([f"i{dim}"])
    return replace(rule, outputs=(_linked(shape, dim, window),), tail=tail, placed=placed)


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
    rule = _reordered(call, _names(len(shape)))

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        piece = site.box(0)[dim]
        cut = _forms(op, aten.slice.Tensor, aten.slice_copy.Tensor)
        return [cut(args[0], dim, *window.local(piece)) for window in windows]

    def has_all(site: Site) -> bool:
        return site.box(0)[dim] == (0, shape[dim])

    outputs = tuple(_linked(shape, dim, window) for window in windows)
    reads = frozenset([f"i{dim}"])
    return replace(rule, outputs=outputs, local=local, placed=reads, unless=has_all)


def slice_scatter(call: Call) -> Rule:
    """A copy with a slice replaced; the source is cut as the slice is."""
    shape = call.shape(0)
    dim = call.get("dim", 0) % len(shape)
    window = _window(call, shape[dim])

    def tail(site: Site) -> tuple[int, ...]:
        return (dim, *window.local(site.box(0)[dim]), window.step)

    whole = along(_names(len(shape)))
    return Rule(
        (whole, _linked(shape, dim, window)),
        (whole,),
        _sizes(shape),
        reduce=None,
        linear=((0, 1),),
        tail=tail,
        placed=frozenset([f"i{dim}"]),
    )


def slice_backward(call: Call) -> Rule:
    """Zeros with the gradient in the place of the slice."""
    shape = call.shape(0)
    sizes = call.get("input_sizes")
    dim = call.get("dim") % len(shape)
    window = _window(call, sizes[dim])

    def tail(site: Site) -> tuple[Any, ...]:
        return (site.out_shapes[0], dim, *window.local(site.out_boxes[0][dim]), window.step)

    return Rule(
        (along(_names(len(shape))),),
        (_linked(shape, dim, Spread(window, sizes[dim])),),
        _sizes(shape),
        reduce=None,
        linear=((0,),),
        tail=tail,
        placed=frozenset([f"i{dim}"]),
    )


def select(call: Call) -> Rule:
    """One place of a dim that must be whole, without the dim."""
    shape = call.shape(0)
    dim = call.get("dim") % len(shape)
    return _dropped(call, dim)


def unbind(call: Call) -> Rule:
    """Every place of a dim that must be whole."""
    return _dropped(call, call.get("dim", 0) % len(call.shape(0)))


def _dropped(call: Call, dim: int) -> Rule:
    shape = call.shape(0)
    names = _names(len(shape))
    names[dim] = None
    return Rule(
        (along(names),),
        (along(_without(names, dim)),) * len(call.results),
        {f"i{d}": size for d, size in enumerate(shape) if d != dim},
        reduce=None,
        linear=((0,),),
        passes=COPIED,
    )


def _without(names: Sequence[str | None], dim: int) -> list[str | None]:
    return [name for d, name in enumerate(names) if d != dim]


def select_backward(call: Call) -> Rule:
    """Zeros with the gradient in one place of a dim that the result has whole."""
    ndim = len(call.get("input_sizes"))
    dim = call.get("dim") % ndim
    names = _names(ndim)
    names[dim] = None
    shape = call.results[0].shape

    def tail(site: Site) -> tuple[Any, ...]:
        return (site.out_shapes[0], dim, call.get("index"))

    return Rule(
        (along(_without(names, dim)),),
        (along(names),),
        {f"i{d}": size for d, size in enumerate(shape) if d != dim},
        reduce=None,
        linear=((0,),),
        tail=tail,
        placed=frozenset(),
    )


def select_scatter(call: Call) -> Rule:
    """A copy with one place of a dim replaced; only the rank that holds the place changes it."""
    shape = call.shape(0)
    dim, index = call.get("dim") % len(shape), call.get("index") % max(shape[call.get("dim")], 1)

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        start, stop = site.box(0)[dim]
        if not start <= index < stop:
            return args[0].clone()
        return op(args[0], args[1], dim, index - start)

    names = _names(len(shape))
    return Rule(
        (along(names), along(_without(names, dim))),
        (along(names),),
        _sizes(shape),
        reduce=None,
        linear=((0, 1),),
        local=local,
        placed=frozenset([f"i{dim}"]),
    )


# --- joining ---------------------------------------------------------------------------------


def _together(call: Call) -> dict[str, Any]:
    """Pending sums and averages pass if all operands hold them and no dtype is in the way."""
    dst = call.results[0].dtype
    dtypes = [spec.dtype for spec in call.specs]
    same = all(dtype is dst for dtype in dtypes)
    return {
        "linear": (tuple(range(len(dtypes))),)
        if same or all(keeps_sums(dtype, dst) for dtype in dtypes)
        else (),
        "averages": same or all(map(has_fractions, dtypes)),
    }


def cat(call: Call) -> Rule:
    """Tensors one after another along a dim that must be whole."""
    ndim = len(call.results[0].shape)
    dims = _names(ndim)
    dims[call.get("dim", 0) % ndim] = None
    return _joined(
        call, [dims if spec.ndim == ndim else [None] * spec.ndim for spec in call.specs], dims
    )


def stack(call: Call) -> Rule:
    """Tensors of one shape along a new dim."""
    ndim = len(call.results[0].shape)
    dim = call.get("dim", 0) % ndim
    dims = _names(ndim)
    dims[dim] = None
    return _joined(call, [_without(dims, dim)] * len(call.specs), dims)


def _joined(call: Call, inputs: Sequence[list[str | None]], dims: list[str | None]) -> Rule:
    sizes = {name: size for name, size in zip(dims, call.results[0].shape, strict=True) if name}
    return Rule(tuple(map(along, inputs)), (along(dims),), sizes, reduce=None, **_together(call))
