"""Losses of the class that a target names: their mean divides by something that all shards know
only together, and targets may be in other shards than classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from ..dispatch.fallback import mesh_of
from ..dispatch.operator import register_form
from ..layout.geometry import contiguous_stride
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..rules import Call
from ..storage.ragged import as_dtensor, reduce_partial
from .elements import pick, write
from .places import Given, by_rule, layouts_of, moving
from .shards import relaid

__all__ = ["linear_cross_entropy"]

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


# --- the class of each target --------------------------------------------------------------------


def _shapes(target: Sequence[int]) -> list[tuple[int, ...]]:
    """The shapes in which the places of each dim stand beside targets."""
    return [(size, *[1] * (len(target) - dim - 1)) for dim, size in enumerate(target)]


def _given(x: DTensorSpec, target: DTensorSpec, values: DTensorSpec | None = None) -> Given:
    """Targets as one index among those of all dims."""
    mesh = x.topology
    metas = [TensorMeta(n, contiguous_stride(n), torch.int64) for n in _shapes(target.shape)]
    first, *others = [DTensorSpec(mesh, default_placements(mesh), meta) for meta in metas]
    return Given(x, (first, target, *others), values, adds=True)


def _asks(call: Call) -> bool:
    """Whether it is less to send targets that are in other shards than classes are to their
    owners."""
    x, target = (call.specs[call.get(name)] for name in ("self", "target"))
    used = [call.get(name) for name in ("self", "target", "weight", "grad_output")]
    laid = [call.laid[each] for each in used if each is not None]
    if any(spec.groups is not None or (spec.sums and spec.ndim) for spec in laid) or x.ndim < 2:
        return False
    cut = {axis for axes in target.dim_axes for axis in axes}
    if call.get("reduction") == _MEAN and call.get("grad_output") is None:
        return False
    if not cut.intersection(x.dim_axes[1]):
        return False
    grad, weight = call.get("grad_output"), call.get("weight")
    values = None if grad is None else target.with_meta(target.meta._replace(dtype=x.dtype))
    ways = [layouts_of(_given(x, target, values))]
    if weight is not None and call.specs[weight].is_sharded():
        ways.append(layouts_of(Given(call.specs[weight], (target,))))
    if any(way is None for way in ways):
        return False
    price = sum(way[0] for way in ways if way is not None)
    if grad is not None and call.specs[grad].ndim:
        price += moving(call.specs[grad], target.with_meta(call.specs[grad].meta))
    return price < by_rule(call)


def _is_apart(x: DTensorSpec, weight: DTensorSpec | None) -> bool:
    """Whether weights are in shards where the classes of `x` are not."""
    shards = () if weight is None or x.ndim < 2 else weight.dim_axes[0]
    return any(axis not in x.dim_axes[1] for axis in shards)


def _weighs(call: Call) -> bool:
    """Whether the weights of all targets are less than those of all classes."""
    given = [call.get(name) for name in ("self", "weight", "target")]
    x, weight, target = (None if each is None else call.laid[each] for each in given)
    if x is None or weight is None or target is None or not _is_apart(x, weight):
        return False
    if any(spec.groups is not None or spec.sums for spec in (x, weight, target)):
        return False
    return bool(2 * prod(target.largest_shape) < weight.shape[0])


def _indices(target: Any) -> list[Any]:
    mesh, places = target._spec.topology, []
    for shape in _shapes(target.shape):
        place = torch.arange(prod(shape), device=target.device).view(shape)
        places.append(as_dtensor(place, mesh))
    return [places[0], target, *places[1:]]


def _named(target: Any, ignored: int) -> tuple[Any, Any]:
    """Which targets count, and a class for each."""
    if target.dtype is not torch.int64:
        target = target.to(torch.int64)  # bytes would be masks, and never negative
    counts = target != ignored
    return counts, torch.where(counts, target, 0)


def _weights(op: Any, x: Any, weight: Any, counts: Any, place: Any) -> Any:
    """What targets weigh: nothing if they do not count."""
    if weight is None:
        return counts.to(x.dtype)
    asked = weight._spec.is_sharded()
    found = pick(op, weight, [place], wraps=False) if asked else weight[place]
    return torch.where(counts, found, 0)


def _on_mesh(op: Any, *tensors: Any) -> list[Any]:
    mesh = mesh_of(op, [each for each in tensors if each is not None])
    return [None if each is None else as_dtensor(each, mesh) for each in tensors]


def _nll(
    op: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int
) -> tuple[Any, Any]:
    """The mean is the sum over all shards divided by the weight of all targets that count; targets
    that are in other shards than classes are ask for theirs."""
    if reduction == _MEAN:
        return _mean(op, x, target, weight, ignored)
    x, target, weight = _on_mesh(op, x, target, weight)
    counts, place = _named(target, ignored)
    if weight is not None and _is_apart(x._spec, weight._spec):
        each, _ = op(x, target, None, _NONE, ignored)
        own, like = weight[place], each._spec
        if not like.sums:
            own = relaid(op, own, own._spec.with_placements(like.placements, like.cuts))
        own = torch.where(counts, own, 0)
        return _reduced(x, torch.where(counts, each * own, 0), own, reduction)
    each = pick(op, x, _indices(place), wraps=False)  # which tells all ranks what is no class
    own = _weights(op, x, weight, counts, place)
    return _reduced(x, torch.where(counts, -each * own, 0), own, reduction)


def _reduced(x: Any, each: Any, own: Any, reduction: int) -> tuple[Any, Any]:
    if reduction == _NONE:
        return each, as_dtensor(x._locals[0].new_zeros(()), x._spec.topology)
    return each.sum(), own.sum()


def _mean(op: Any, x: Any, target: Any, weight: Any, ignored: int) -> tuple[Any, Any]:
    total, count = op(x, target, weight, _SUM, ignored)
    if x.dtype is torch.float16:  # which cannot hold the sum of many losses
        each, _ = op(x, target, weight, _NONE, ignored)
        total = each.sum(dtype=torch.float32)
    return (total / count).to(x.dtype), count


def _nll_backward(
    op: Any,
    grad: Any,
    x: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignored: int,
    total: Any,
) -> Any:
    """The gradient of each target goes to the owner of its class."""
    grad, x, target, weight = _on_mesh(op, grad, x, target, weight)
    counts, place = _named(target, ignored)
    scale = reduce_partial(op, grad) / total if reduction == _MEAN else reduce_partial(op, grad)
    if weight is not None and _is_apart(x._spec, weight._spec):
        own = torch.where(counts, weight[place], 0)
        return op(own * scale, x, target, None, _NONE, ignored, total)
    own = _weights(op, x, weight, counts, place)
    values = torch.where(counts, -own * scale, 0)
    # No two targets have the same place, so it does not matter in which order they come.
    return write(aten.index_put_.default, torch.zeros_like(x), _indices(place), values, adds=True)


def _asks_or_weighs(call: Call) -> bool:
    return _weighs(call) or _asks(call)


def _is_mean_or_asks(call: Call) -> bool:
    return bool(call.get("reduction") == _MEAN) or _asks_or_weighs(call)


for _name in ("nll_loss", "nll_loss2d"):
    _op = getattr(aten, f"{_name}_forward").default
    register_form(f"{_name}_forward", when=_is_mean_or_asks, blocks=True)(partial(_nll, _op))
    _op = getattr(aten, f"{_name}_backward").default
    register_form(f"{_name}_backward", when=_asks_or_weighs)(partial(_nll_backward, _op))


# --- products with classes -----------------------------------------------------------------------


def _is_linear_mean(call: Call) -> bool:
    return bool(call.get("reduction") == "mean")


@register_form("torch_nn::_linear_cross_entropy_batch_chunked", when=_is_linear_mean)
def linear_cross_entropy(
    x: Any,
    matrix: Any,
    target: Any,
    bias: Any,
    weight: Any,
    reduction: str,
    ignore: int,
    *rest: Any,
) -> Any:
    """The sum, and its gradients, over the weight of all targets that count."""
    op = torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default
    made = op(x, matrix, target, bias, weight, "sum", ignore, *rest)
    counts = target != ignore
    if weight is None:
        total = counts.sum()
    else:
        total = torch.where(counts, weight[torch.where(counts, target, 0)], 0).sum()
    return tuple(each / total for each in made)
