"""Taking one place of a sharded dim: the slice is local, and only it moves."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.operator import register_form

__all__ = ["select", "select_scatter", "unbind"]

aten = torch.ops.aten


@register_form("select", blocks=True)
def select(x: Any, dim: int, index: int) -> Any:
    """A slice of one place, without its dim."""
    place = index % x.shape[dim]
    return aten.squeeze.dim(aten.slice.Tensor(x, dim, place, place + 1), dim)


@register_form("select_copy", blocks=True)
def select_copy(x: Any, dim: int, index: int) -> Any:
    """As `select`, but never an alias."""
    return select(x, dim, index).clone()


@register_form("select_scatter")
def select_scatter(x: Any, src: Any, dim: int, index: int) -> Any:
    """A slice of one place is replaced, so that only its owner needs the source."""
    place = index % x.shape[dim]
    row = aten.unsqueeze.default(src, dim % x.ndim)
    return aten.slice_scatter.default(x, row, dim, place, place + 1)


@register_form("unbind", blocks=True)
def unbind(x: Any, dim: int = 0) -> list[Any]:
    """Every place of a dim."""
    return [aten.select.int(x, dim, index) for index in range(x.shape[dim])]
