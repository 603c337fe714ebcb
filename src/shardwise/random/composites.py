"""Random operators composed of others, with the numbers of PyTorch's own kernels.

A function returns NotImplemented if the call is not of the kind it serves: then whole tensors are
drawn, and PyTorch raises its own errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any

import torch

from .._torch import OpOverload
from ..dispatch.random_ops import DISTRIBUTIONS
from ..storage.ragged import reduce_partial

Given = Mapping[str, Any]
"""The arguments of a call, by name."""


def _filled(fill: str, op: OpOverload, given: Given) -> Any:
    """A new tensor like `self`, filled in place: `rand_like`, `randn_like` and their like."""
    options = ("dtype", "layout", "device", "pin_memory", "memory_format")
    named = {name: given[name] for name in options if given.get(name) is not None}
    made = torch.empty_like(given["self"], **named)
    rest = {name: v for name, v in given.items() if name not in (*options, "self")}
    return getattr(made, fill)(**rest)


def _randint_like(op: OpOverload, given: Given) -> Any:
    bounds = {"from": given.get("low", 0), "to": int(given["high"])}
    rest = {name: value for name, value in given.items() if name not in ("low", "high")}
    return _filled("random_", op, rest | bounds)


def _bernoulli(op: OpOverload, given: Given) -> Any:
    """By one probability for all elements; other calls read their probabilities."""
    if op._overloadname != "p":
        return NotImplemented
    made = torch.empty_like(given["self"], memory_format=torch.contiguous_format)
    return made.bernoulli_(given["p"], generator=given["generator"])


def empty_whole(x: Any) -> torch.Tensor:
    """A whole tensor of the shape, strides and dtype of a DTensor, not initialised."""
    shape, stride, dtype = x._spec.meta
    return torch.empty_strided(shape, stride, dtype=dtype, device=x.device)


def _multinomial(op: OpOverload, given: Given) -> Any:
    """Without replacement, or for one sample: the largest of `p / e`, where `e` is exponential."""
    p, count = given["self"], given["num_samples"]
    if (given["replacement"] and count > 1) or not p.numel() or not p.dtype.is_floating_point:
        return NotImplemented
    p = reduce_partial(op, p)
    drawable = count if count > 1 else 1
    valid = ((p >= 0) & (p < inf)).all() & ((p > 0).sum(-1) >= drawable).all()
    if not 0 < p.ndim < 3 or not 0 < count <= p.shape[-1] or not bool(valid):
        return NotImplemented
    e = torch.empty_like(p).exponential_(1, generator=given["generator"])
    best = p / e
    return best.argmax(-1, keepdim=True) if count == 1 else best.topk(count)[1]


COMPOSITES: dict[str, Callable[[OpOverload, Given], Any]] = {
    **{name: partial(_filled, f"{name}_") for name in DISTRIBUTIONS},
    "rand_like": partial(_filled, "uniform_"),
    "randn_like": partial(_filled, "normal_"),
    "randint_like": _randint_like,
    "bernoulli": _bernoulli,
    "multinomial": _multinomial,
}
"""By the name of the operator."""
