"""Python values from DTensors: they are the global value, on every rank."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.operator import register_composite, register_form
from ..errors import MeshError
from ..storage.plain import full_local
from ..storage.wrapper import Wrapper

__all__ = ["allclose", "equal", "local_scalar", "nonzero", "same_size"]


def _value(what: str, x: Any) -> torch.Tensor:
    """The whole value of a tensor, which only the ranks of its mesh know."""
    if isinstance(x, Wrapper) and not x._locals:
        raise MeshError(
            f"{what}: this rank is not in mesh {x._spec.topology}, so it does not know the value. "
            "Ask on ranks of the mesh only, where mesh.get_coordinate() is not None, or bring the "
            "tensor to a mesh that all are in: x.redistribute(mesh, [Replicate()])."
        )
    return full_local(x)


@register_form("_local_scalar_dense", always=True)
def local_scalar(x: Any) -> Any:
    """The number in a tensor of one element; what is pending is reduced first."""
    return _value("item", x).item()


@register_form("is_nonzero", always=True)
def nonzero(x: Any) -> bool:
    """The truth of a tensor of one element; only inference mode does not ask for the number."""
    return torch.is_nonzero(_value("is_nonzero", x))


@register_form("equal", always=True)
def equal(a: Any, b: Any) -> bool:
    """Whether two tensors have the same shape and values."""
    if a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    alike = torch.ops.aten.all.default(torch.ops.aten.eq.Tensor(a, b))
    return bool(_value("equal", alike).item())


@register_form("allclose", always=True)
def allclose(
    a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Whether all elements are close."""
    close = torch.ops.aten.isclose.default(a, b, rtol, atol, equal_nan)
    return bool(_value("allclose", torch.ops.aten.all.default(close)).item())


def same_size(a: Any, b: Any) -> bool:
    """Whether two tensors have the same shape. A plain one may have other values on other ranks."""
    return tuple(a.shape) == tuple(b.shape)


register_composite(torch.ops.aten.is_same_size.default, same_size)
