"""What a form returns, as the operator itself would have returned it: strides and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .geometry import memory_order
from .redistribute import ordered
from .spec import TensorMeta
from .wrapper import Wrapper, wrap

__all__ = ["conforming"]


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
    if spec.dtype is not meta.dtype:
        made = torch.ops.aten._to_copy.default(made, dtype=meta.dtype)
    if tuple(made.stride()) == tuple(meta.stride):
        return made
    order = memory_order(meta.stride)
    return wrap(made._spec.with_meta(meta), tuple(ordered(part, order) for part in made._locals))
