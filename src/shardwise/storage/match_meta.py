"""Results with the strides and dtypes that the operator has on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..errors import RuleError
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute.execute import in_order
from .wrapper import Wrapper, wrap


def is_in_memory_order(spec: DTensorSpec, local: torch.Tensor) -> bool:
    """True if a local tensor has the dtype of the global tensor, and its dims in memory as that has
    them, so that it can be viewed as that can."""
    if local.dtype is not spec.dtype:
        return False
    shape, stride, own = local.shape, spec.meta.stride, local.stride()
    dims = [dim for dim, size in enumerate(shape) if size > 1 and stride[dim]]
    if not local.numel():
        return True
    dims.sort(key=lambda dim: (stride[dim], stride[dim] * spec.meta.shape[dim]), reverse=True)
    for outer, inner in pairwise(dims):
        joined = stride[outer] == stride[inner] * spec.meta.shape[inner]
        whole = shape[inner] == spec.meta.shape[inner]
        if own[outer] < own[inner]:
            return False
        if joined and whole and own[outer] != own[inner] * shape[inner]:
            return False
    return True


def in_memory_order(spec: DTensorSpec, local: torch.Tensor) -> torch.Tensor:
    """A local tensor with the dtype and the order of dims in memory of the global tensor."""
    if is_in_memory_order(spec, local):
        return local
    return in_order([local.to(spec.dtype)], spec.meta.stride)[0]


def conforming(form: Callable[..., Any], metas: Sequence[TensorMeta]) -> Callable[..., Any]:
    """`form` with results that have the strides and dtypes in `metas`, so that it need not care."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return _as(form(*args, **kwargs), iter(metas))

    return run


def _as(made: Any, metas: Iterator[TensorMeta]) -> Any:
    if isinstance(made, (list, tuple)):
        return type(made)(_as(value, metas) for value in made)
    if not isinstance(made, Wrapper):
        return made
    meta: Any = next(metas)
    spec: Any = made._spec
    if spec.shape != meta.shape:
        raise RuleError(
            f"a form returned a result of shape {list(spec.shape)}, but PyTorch's has shape "
            f"{list(meta.shape)}."
        )
    if spec.dtype is not meta.dtype:
        made = torch.ops.aten._to_copy.default(made, dtype=meta.dtype)
    if tuple(made.stride()) == tuple(meta.stride):
        return made
    return wrap(made._spec.with_meta(meta), in_order(made._locals, meta.stride))
