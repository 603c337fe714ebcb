"""Matrices and Fourier transforms: what is transformed is whole, all other dims are apart; and
products that no notation says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from .language import Call, Family, Rule, Site, along, anywhere, unless_empty
from .notation import notation
from .pointwise import broadcast_dims
from .reductions import dimwise


def matrices(text: str, *, alike: Sequence[int] = ()) -> Family:
    """An operator on batches of matrices: dims in `...` are apart, the matrices whole.

    `alike` are results that follow from one operand: where it has no batch, or not the columns of
    the other one, every rank makes them whole.
    """
    return notation(text, reduce=None, alike=alike)


_GROUPED = {
    (2, 3): notation("_ k, _ k n, _ -> _ n", linear=((0,), (1,))),
    (3, 2): notation("_ m k, k _, _ -> m _", linear=((0,), (1,))),
    (2, 2): notation("m _, _ n, _ -> _ m n", linear=((0,), (1,))),
    (3, 3): notation("g m k, g k n -> g m n", linear=((0,), (1,))),
}
"""Products of groups of rows, or of columns, by the dims of both matrices. Offsets say where groups
end, so that a dim in groups is whole."""


def grouped_mm(call: Call) -> Rule:
    """A product for each group."""
    rule = _GROUPED[len(call.shape(0)), len(call.shape(1))](call)
    return replace(rule, local=_of_aligned)


@anywhere
def _of_aligned(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """The local call: kernels refuse shards whose rows are not multiples of 16 bytes apart."""
    a, b, *rest = args
    if not (a.numel() and b.numel()):
        return a.new_zeros(site.out_shapes[0])
    return op(_aligned(a), _aligned(b), *rest, **kwargs)


def _aligned(value: torch.Tensor) -> torch.Tensor:
    unit, size = 16 // value.element_size(), value.shape[-1]
    if sorted(step % unit for step in value.stride()[-2:]) == [0, 1 % unit]:
        return value
    wide = value.new_empty((*value.shape[:-1], size + -size % unit))
    return wide[..., :size].copy_(value)


def _is_vectors(call: Call) -> bool:
    a, b = call.shape(0), call.shape(1)
    return len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])


_COLUMNS = matrices("... _ _, ... _ k -> ... _ k, ... _ _, ... _, ...", alike=(1, 2, 3))
_ROWS = matrices("... _ _, ... k _ -> ... k _, ... _ _, ... _, ...", alike=(1, 2, 3))
_VECTORS = matrices("... _ _, ... _ -> ... _, ... _ _, ... _, ...", alike=(1, 2, 3))


def solve(call: Call) -> Rule:
    """One system for each matrix; the columns of the right side are apart, too."""
    if _is_vectors(call):
        return _VECTORS(call)
    rule = _COLUMNS(call) if call.get("left") else _ROWS(call)
    return replace(rule, local=_as_matrices)


_LEAST_MATRICES = matrices("... _ _, ... _ _ -> ... _ _, ... _, ..., ... _", alike=(2, 3))
_LEAST_VECTORS = matrices("... _ _, ... _ -> ... _, ... _, ..., ... _", alike=(2, 3))


def least_squares(call: Call) -> Rule:
    """As `solve`; the columns stay together, for a matrix has no rank where there are none."""
    if _is_vectors(call):
        return _LEAST_VECTORS(call)
    return replace(_LEAST_MATRICES(call), local=_as_matrices)


@anywhere
def _as_matrices(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """A matrix on the right side must not look like a batch of vectors, however large a shard
    is."""
    a, b = args[:2]
    return op(a, b.unsqueeze(0) if b.ndim == a.ndim - 1 else b, *args[2:], **kwargs)


def solve_by_factors(left: str, right: str) -> Family:
    """A system whose matrix is factored: the columns, or rows, of the other side are apart."""
    by_side = {True: matrices(left), False: matrices(right)}

    def family(call: Call) -> Rule:
        return by_side[bool(call.get("left", True))](call)

    return family


def cross(call: Call) -> Rule:
    """The product of vectors along one dim; the others broadcast."""
    out = call.results[0].shape
    dim = call.get("dim") % len(out)
    inputs = [list(broadcast_dims(spec.meta.shape, out)) for spec in call.specs]
    result = list(broadcast_dims(out, out))
    for dims in (*inputs, result):
        dims[dim] = None
    sizes = {f"i{d}": size for d, size in enumerate(out) if d != dim}
    linear = ((0,), (1,)) if call.results[0].dtype is not torch.bool else ()
    return Rule(tuple(map(tuple, inputs)), (tuple(result),), sizes, reduce=None, linear=linear)


def fourier(call: Call) -> Rule:
    """A transform is linear, and works apart on all dims but its own."""
    if not prod(call.shape(0)):
        return dimwise("dim")(call)
    return replace(dimwise("dim")(call), linear=((0,),), **unless_empty(call))


# --- products ------------------------------------------------------------------------------------


@anywhere
def addmv_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """With an empty matrix PyTorch forgets to broadcast the first operand."""
    return op(args[0].expand(site.out_shapes[0]), *args[1:], **kwargs)


def trilinear(call: Call) -> Rule:
    """The product of three tensors that are unsqueezed at some dims, summed over others."""
    ndim = len(call.shape(0)) + len(call.get("expand1"))
    sizes: dict[int, int] = {}
    places = []
    for operand, name in enumerate(("expand1", "expand2", "expand3")):
        own = [dim for dim in range(ndim) if dim not in call.get(name)]
        places.append(own)
        for dim, size in zip(own, call.shape(operand), strict=True):
            sizes[dim] = max(sizes.get(dim, 0), size) if size else 0
    inputs = tuple(
        along([f"i{d}" if size == sizes[d] else None for d, size in zip(own, shape, strict=True)])
        for own, shape in zip(places, map(call.shape, range(3)), strict=True)
    )
    kept = [dim for dim in range(ndim) if dim not in call.get("sumdim")]
    return Rule(
        inputs,
        (along([f"i{dim}" if dim in sizes else None for dim in kept]),),
        {f"i{dim}": size for dim, size in sizes.items()},
        linear=((0,), (1,), (2,)),
    )
