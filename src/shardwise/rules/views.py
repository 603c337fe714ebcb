"""Views: dims regrouped, reordered, added and dropped, with factors that come from the shapes."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Any

import torch

from ..layout.spec import Groups, trivial
from ..layout.split_dims import common, finer_parts
from .language import NOWHERE, Along, Call, Dims, Rule, Scaled, Site, along

aten = torch.ops.aten


def each_dim(ndim: int) -> list[str | None]:
    """A factor for each dim."""
    return [f"i{dim}" for dim in range(ndim)]


def sizes_of(shape: Sequence[int]) -> dict[str, int]:
    """The sizes of the factors of `each_dim`."""
    return {f"i{dim}": size for dim, size in enumerate(shape)}


# --- view and reshape -----------------------------------------------------------------------


def view(call: Call) -> Rule:
    """Regroup dims: `"(a b) c -> a (b c)"`, with the factors computed from the two shapes."""
    src, dst = call.laid[0].blocks, call.results[0].shape
    ins, outs, sizes, apart = regroup(src, dst)
    plain = apart == (trivial(call.shape(0)), trivial(dst))
    return Rule(
        (ins,),
        (outs,),
        sizes,
        reduce=None,
        linear=((0,),),
        copies=True,
        shape_arg=1,
        apart=None if plain else ((apart[0],), (apart[1],)),
    )


def view_dtype(call: Call) -> Rule:
    """The same bytes as another dtype; the last dim is whole if elements change their size."""
    src, dst = call.specs[0], call.results[0]
    names = each_dim(src.ndim)
    if src.dtype.itemsize != dst.dtype.itemsize:
        names[-1] = None
    return replace(copied(call, names, names), linear=(), copies=False)


def view_as_real(call: Call) -> Rule:
    """Complex numbers as pairs."""
    names = each_dim(len(call.shape(0)))
    return replace(copied(call, names, [*names, None]), copies=False)


def view_as_complex(call: Call) -> Rule:
    """Pairs as complex numbers; the pairs are whole."""
    names = each_dim(len(call.shape(0)) - 1)
    return replace(copied(call, [*names, None], names), copies=False)


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
        left = iter(names)
        for dim, parts in zip(dims, finer_parts((tuple(wholes),), found), strict=True):
            alongs[side][dim] = [Along(next(left)) for _ in parts]
            groups[side][dim] = tuple(parts)


def _scaled(block: int) -> Scaled | None:
    return Scaled(block) if block > 1 else None


# --- dims in another order, more or fewer of them ----------------------------------------------


def copied(call: Call, ins: Sequence[str | None], out: Sequence[str | None], **more: Any) -> Rule:
    """An operator that copies elements of one operand; None for dims that are needed whole."""
    sizes = {name: size for name, size in zip(ins, call.shape(0), strict=True) if name}
    return Rule(
        (along(ins),),
        (along(out),) * len(call.results),
        sizes,
        reduce=None,
        linear=((0,),),
        copies=True,
        **more,
    )


def reordered(call: Call, names: Sequence[str | None]) -> Rule:
    """The dims of the first operand under `names`, each of which is one of them or new."""
    return copied(call, each_dim(len(call.shape(0))), names)


def without(names: Sequence[str | None], dims: Container[int]) -> list[str | None]:
    """The names, with None for those of `dims`."""
    return [None if dim in dims else name for dim, name in enumerate(names)]


def permute(call: Call) -> Rule:
    """Dims in another order."""
    ndim = len(call.shape(0))
    return reordered(call, [f"i{dim % ndim}" for dim in call.get("dims")])


def transpose(call: Call) -> Rule:
    """Two dims exchanged; `t` exchanges the only two."""
    ndim = len(call.shape(0))
    names = each_dim(ndim)
    if ndim:
        a, b = call.get("dim0", 0) % ndim, call.get("dim1", ndim - 1) % ndim
        names[a], names[b] = names[b], names[a]
    return reordered(call, names)


def unsqueeze(call: Call) -> Rule:
    """A new dim of size 1."""
    ndim = len(call.shape(0))
    names = each_dim(ndim)
    names.insert(call.get("dim") % (ndim + 1), None)
    return reordered(call, names)


def squeeze(call: Call) -> Rule:
    """Without some dims of size 1; a sharded one must be whole before it can go."""
    shape = call.shape(0)
    dim = call.get("dim")
    named = range(len(shape)) if dim is None else dim if isinstance(dim, (list, tuple)) else (dim,)
    gone = {d % len(shape) for d in named if shape[d] == 1} if shape else set()
    ins = without(each_dim(len(shape)), gone)

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        return form_of(op, aten.squeeze.dims, aten.squeeze_copy.dims)(args[0], list(gone))

    out = [name for name in ins if name]
    return copied(call, ins, out, local=local, placed=frozenset())


def form_of(op: Any, view: Any, copy: Any) -> Any:
    """The form of a view that `op` asks for: the view itself or its copy."""
    return copy if op._schema.name.endswith("_copy") else view


def expand(call: Call) -> Rule:
    """Dims of size 1 made larger; they have no factor, for every rank has all of them."""
    shape, out = call.shape(0), call.results[0].shape
    lead = len(out) - len(shape)
    names: list[str | None] = [None] * lead
    names += [f"i{dim}" if size == out[lead + dim] else None for dim, size in enumerate(shape)]
    return copied(call, names[lead:], names, shape_arg=1)


def unfold(call: Call) -> Rule:
    """`"... m! -> ... m! k"`: windows of one dim, each in a dim of its own."""
    names = each_dim(len(call.shape(0)))
    if names:
        names[call.get("dimension")] = None
    return copied(call, names, [*names, None])


def unfold_backward(call: Call) -> Rule:
    """The gradients of windows, added up where the windows overlap."""
    names = each_dim(len(call.results[0].shape))
    if names:
        names[call.get("dim")] = None
    return replace(copied(call, [*names, None], names, **of_shape(call)), copies=False)


def of_shape(call: Call) -> dict[str, Any]:
    """The traits of a gradient whose second argument is the shape of the result."""
    return {"tail": lambda site: (site.out_shapes[0], *call.args[2:]), "placed": NOWHERE}
