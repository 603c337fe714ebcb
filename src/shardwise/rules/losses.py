"""Losses: of each element, of the class of a row, and those that look at a whole row or sequence,
of which the batch is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from .indexing import within
from .language import NOWHERE, Call, Dims, Operand, Rule, Site, along, replicated, zeros_at
from .pointwise import broadcast_dims, pointwise
from .reductions import wide

_NONE, _MEAN, _SUM = 0, 1, 2

# --- elements ------------------------------------------------------------------------------------


def _reducing(call: Call, kind: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The loss or gradient with another reduction than the call's."""
    at = call.position("reduction")
    if at < len(args):
        return call.op(*args[:at], kind, *args[at + 1 :], **kwargs)
    return call.op(*args, **{**kwargs, "reduction": kind})


def _mean_over(call: Call, count: int) -> Any:
    """A local call that gives a shard's part of the mean over `count` elements, or its gradient."""

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        dtype = site.outputs[0].dtype
        given = [v.to(wide(dtype)) if isinstance(v, torch.Tensor) else v for v in args]
        return (_reducing(call, _SUM, given, kwargs) / count).to(dtype)

    return local


def loss(call: Call) -> Rule:
    """A pointwise loss with its reduction; the mean is over all elements of all shards."""
    reduction = call.get("reduction")
    if reduction not in (_MEAN, _SUM):
        return pointwise(call)
    shape = torch.broadcast_shapes(*(spec.meta.shape for spec in call.specs))
    rule = Rule(
        inputs=tuple(broadcast_dims(spec.meta.shape, shape) for spec in call.specs),
        outputs=((),),
        sizes={f"i{dim}": size for dim, size in enumerate(shape)},
    )
    if reduction == _SUM:
        return rule
    return replace(rule, local=_mean_over(call, prod(shape)), placed=NOWHERE)


def loss_backward(call: Call) -> Rule:
    """The gradient of a pointwise loss."""
    out = call.results[0].shape
    shape = torch.broadcast_shapes(*(spec.meta.shape for spec in call.specs[1:]))
    if tuple(shape) != tuple(out):
        return replicated(call)
    rule = replace(
        pointwise(call),
        inputs=tuple(broadcast_dims(spec.meta.shape, out) for spec in call.specs),
        linear=((0,),),
    )
    if call.get("reduction") != _MEAN:
        return rule
    return replace(rule, local=_mean_over(call, prod(shape)), placed=NOWHERE)


# --- classes -----------------------------------------------------------------------------------


def _nll_dims(
    call: Call, operand: int
) -> tuple[list[str | None], list[str | None], tuple[Dims, ...], dict[str, int]]:
    """Dims of the input, the target and the weight: `c` are the classes, all others are free."""
    shape = call.shape(operand)
    classes = 0 if len(shape) == 1 else 1
    dims: list[str | None] = ["c" if d == classes else f"i{d}" for d in range(len(shape))]
    sizes = dict(zip(map(str, dims), shape, strict=True))
    weight = (along(["c"]),) if isinstance(call.get("weight"), Operand) else ()
    return dims, [dim for dim in dims if dim != "c"], weight, sizes


def _classes_here(call: Call, operand: int) -> dict[str, Any]:
    """The local call of a rank that holds some of the classes: it ignores targets elsewhere."""
    shape = call.shape(operand)
    at = 0 if len(shape) == 1 else 1
    places = [call.position(name) for name in ("target", "ignore_index")]

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        start, stop = site.box(operand)[at]
        given = list(args)
        target, ignored = given[places[0]].to(torch.int64), given[places[1]]
        counts = target != ignored
        target = torch.where(counts, target, 0)
        place, here = within(target, (start, stop), shape[at], dim=at)
        given[places[0]], given[places[1]] = torch.where(counts & here, place, -1), -1
        if start == stop:  # no class is here, and PyTorch's kernels want one
            return zeros_at(call, site, target)
        return op(*given, **kwargs)

    return {
        "local": local,
        "unless": lambda site: site.box(operand)[at] == (0, shape[at]),
        "placed": frozenset("c"),
    }


def nll_forward(call: Call) -> Rule:
    """`"n c, n, c -> n, ()"`; the mean is a form, for it divides by the weight of all targets."""
    dims, target, weight, sizes = _nll_dims(call, 0)
    if call.get("reduction") == _MEAN:
        sizes = {}
        dims, target, weight = [None] * len(dims), [None] * len(target), ((None,),) * len(weight)
    out = along(target) if call.get("reduction") == 0 else ()
    ins = (along(dims), along(target), *weight)
    return Rule(ins, (out, ()), sizes, **_classes_here(call, 0))


def nll_backward(call: Call) -> Rule:
    """The gradient of each class; the total weight is that of all targets."""
    dims, target, weight, sizes = _nll_dims(call, 1)
    grad = along(target) if len(call.shape(0)) else ()
    return Rule(
        (grad, along(dims), along(target), *weight, ()),
        (along(dims),),
        sizes,
        reduce=None,
        linear=((0,),),
        **_classes_here(call, 1),
    )
