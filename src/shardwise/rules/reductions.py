"""Reductions over dims, and operators that need one dim whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ..comm.dtypes import identity
from .language import (
    NOWHERE,
    Call,
    Dims,
    Family,
    Rule,
    Site,
    along,
    has_fractions,
    keeps_sums,
    unless_empty,
)


def reduced_dims(call: Call, name: str = "dim") -> tuple[int, ...]:
    """The dims a call reduces: all of them if none are named."""
    ndim = len(call.shape(0))
    dim = call.get(name)
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return tuple(d % ndim for d in dims) if ndim else ()


def _kept(ndim: int, dims: Sequence[int], keepdim: bool) -> list[str | None]:
    names: list[str | None] = []
    for dim in range(ndim):
        if dim not in dims:
            names.append(f"i{dim}")
        elif keepdim:
            names.append(None)
    return names


def reduction(kind: str, *, linear: bool = False, local: Any = None, unless: Any = None) -> Family:
    """Reduce some dims: sharding one of them leaves a pending reduction of `kind`."""

    def family(call: Call) -> Rule:
        shape = call.shape(0)
        dims = reduced_dims(call)
        if call.get("dim") == [] and call.results[0].shape == shape:
            dims = ()  # unlike sum, any and all of no dims reduce nothing
        out = along(_kept(len(shape), dims, bool(call.get("keepdim", False))))
        src, dst = call.specs[0].dtype, call.results[0].dtype
        return Rule(
            inputs=(along([f"i{dim}" for dim in range(len(shape))]),),
            outputs=(out,) * len(call.results),
            sizes={f"i{dim}": size for dim, size in enumerate(shape)},
            reduce=kind,
            linear=((0,),) if linear and keeps_sums(src, dst) else (),
            averages=has_fractions(src),
            local=local,
            unless=unless,
            placed=NOWHERE,
        )

    return family


def _holds_some(site: Site) -> bool:
    return prod(site.inputs[0].local_shape(site.coord)) > 0


def _is_whole(site: Site) -> bool:
    """True if the dims that are reduced are whole, so that no result is Partial."""
    return not site.outputs[0].sums


def extreme_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """amax and its like: PyTorch refuses an empty dim, but an empty shard has an identity
    element."""
    if args[0].numel():
        return op(*args, **kwargs)
    kind = "min" if "min" in op._schema.name or "all" in op._schema.name else "max"
    return args[0].new_full(site.out_shapes[0], identity(kind, args[0].dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels add up numbers of `dtype`: a sum may be larger than half precision
    can hold."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def mean_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """The part of the mean that this shard gives: its sum over the number of all elements."""
    dims = args[1] if len(args) > 1 else None
    shape = site.inputs[0].meta.shape
    if not shape:
        return op(*args, **kwargs)
    every = range(len(shape)) if dims is None or dims == [] else dims
    count = prod(shape[dim] for dim in ([every] if isinstance(every, int) else every))
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    dtype = kwargs.get("dtype") or args[0].dtype
    total = torch.sum(args[0], dim=list(every) or None, keepdim=keepdim, dtype=wide(dtype))
    return (total / count).to(dtype)


mean = reduction("sum", linear=True, local=mean_local, unless=_is_whole)


def _extreme(kind: str) -> Family:
    family = reduction(kind, local=extreme_local, unless=_holds_some)

    def checked(call: Call) -> Rule:
        if 0 in call.shape(0) and 0 not in call.results[0].shape:  # PyTorch's error comes first
            call.op(torch.empty(call.shape(0)), *call.args[1:], **call.kwargs)
        return family(call)

    return checked


largest, smallest = _extreme("max"), _extreme("min")


def dimwise(*names: str, linear: bool = False) -> Family:
    """An operator that needs the named dims whole and works on every other dim apart.

    All operands have the shape of the first, or none of its dims; results have it too. With
    `linear` a pending sum of the first operand passes.
    """

    def family(call: Call) -> Rule:
        shape = call.shape(0)
        dims = tuple(d for name in names or ("dim",) for d in reduced_dims(call, name))
        keepdim = bool(call.get("keepdim", False))
        src, dst = call.specs[0].dtype, call.results[0].dtype
        free: list[str | None] = [None if d in dims else f"i{d}" for d in range(len(shape))]
        outputs: list[Dims] = []
        for result in call.results:
            if len(result.shape) == len(shape):
                outputs.append(along(free))
            else:
                outputs.append(along(_kept(len(shape), dims, keepdim)))
        return Rule(
            inputs=tuple(
                along(free) if len(spec.meta.shape) == len(shape) else (None,) * spec.ndim
                for spec in call.specs
            ),
            outputs=tuple(outputs),
            sizes={f"i{d}": size for d, size in enumerate(shape) if d not in dims},
            reduce=None,
            linear=((0,),) if linear and keeps_sums(src, dst) else (),
            averages=has_fractions(src),
        )

    return family


def variance(call: Call) -> Rule:
    """var, std and their like: an empty shard would make PyTorch warn of too few elements."""
    return replace(dimwise("dim")(call), **unless_empty(call))
