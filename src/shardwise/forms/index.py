"""One place of a dim, and the errors for gradients that would be sparse."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.operator import register_form
from ..errors import LayoutError

aten = torch.ops.aten


@register_form("select", blocks=True)
def select(x: Any, dim: int, index: int) -> Any:
    """A slice of one place, without its dim: the slice is local, and only it moves."""
    place = index % x.shape[dim]
    return aten.squeeze.dim(aten.slice.Tensor(x, dim, place, place + 1), dim)


@register_form("unbind", blocks=True)
def unbind(x: Any, dim: int = 0) -> list[Any]:
    """Every place of a dim."""
    return [aten.select.int(x, dim, index) for index in range(x.shape[dim])]


# --- sparse gradients ----------------------------------------------------------------------------


@register_form("_sparse_coo_tensor_with_dims_and_tensors", always=True)
def sparse_gradient(
    sparse_dim: int, dense_dim: int, size: Any, indices: Any, values: Any, **named: Any
) -> Any:
    """An error: the gradient of `embedding(..., sparse=True)` would be sparse."""
    raise no_sparse_gradient(f"embedding of a table of shape {list(size)}")


def no_sparse_gradient(what: str) -> LayoutError:
    """The error for a gradient that would be sparse."""
    return LayoutError(
        f"{what}: with sparse=True its gradient is a sparse tensor, but only dense tensors can be "
        "on a mesh. Use sparse=False."
    )
