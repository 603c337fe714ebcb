"""Results with the strides and dtypes that the operator has on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import RuleError
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute.execute import in_order
from .wrapper import Wrapper, wrap


def in_memory_order(spec: DTensorSpec, local: torch.Tensor) -> torch.Tensor:
    """A local tensor with the dtype and the order of dims in memory of the global tensor."""
    if spec.meta.repeated:
        return local.to(spec.dtype)
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
