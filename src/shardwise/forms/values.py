"""Operators that need values on the host: item, equal, allclose, lengths, and checks of values."""

from __future__ import annotations

from typing import Any

import torch

from ..comm.recording import recordable
from ..dispatch.fallback import fallback_form
from ..dispatch.operator import register_composite, register_form
from ..errors import MeshError
from ..storage.plain import full_local
from ..storage.ragged import reduce_partial
from ..storage.wrapper import Wrapper

aten = torch.ops.aten


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
    """The number in a tensor of one element."""
    return _value("item", x).item()


@register_form("is_nonzero", always=True)
def is_nonzero(x: Any) -> bool:
    """The truth of a tensor of one element; inference mode calls this and not `item`."""
    return torch.is_nonzero(_value("is_nonzero", x))


@register_form("equal", always=True)
def equal(a: Any, b: Any) -> bool:
    """True if two tensors have the same shape and values."""
    if a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return bool(_value("equal", aten.all.default(aten.eq.Tensor(a, b))).item())


@register_form("allclose", always=True)
def allclose(
    a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """True if all elements are close."""
    close = aten.isclose.default(a, b, rtol, atol, equal_nan)
    return bool(_value("allclose", aten.all.default(close)).item())


def same_size(a: Any, b: Any) -> bool:
    """True if two tensors have the same shape; values of plain tensors may differ by rank."""
    return tuple(a.shape) == tuple(b.shape)


@register_form("_linalg_check_errors", always=True)
def check_errors(info: Any, api_name: str, *, is_matrix: bool) -> None:
    """One number says if all matrices are right; only if not are the codes gathered."""
    if full_local(info.any()).item():
        aten._linalg_check_errors(full_local(info), api_name, is_matrix=is_matrix)


# Shapes depend on the lengths, so PyTorch does not tell them before the calls run.
for _op in (aten._ctc_loss.Tensor, aten._ctc_loss_backward.Tensor):
    register_form(str(_op).removeprefix("aten."), always=True)(fallback_form(_op))


def tensor_split(x: Any, places: Any, dim: int = 0) -> Any:
    """The indices at which to split are read as numbers."""
    if isinstance(places, Wrapper):
        places = full_local(places)
    return aten.tensor_split.tensor_indices_or_sections.decompose(x, places, dim)


@recordable()
def _refuse_classes(part: torch.Tensor, num_classes: int) -> None:
    if part.numel() and part.min() < 0:
        raise RuntimeError("Class values must be non-negative.")
    if part.numel() and num_classes != -1 and part.max() >= num_classes:
        raise RuntimeError("Class values must be smaller than num_classes.")


def one_hot(x: Any, num_classes: int = -1) -> Any:
    """PyTorch does not check the classes of wrapper tensors, so each rank checks its own."""
    if isinstance(x, Wrapper):
        if x.dtype is not torch.int64:
            raise RuntimeError(f"one_hot: classes must be of torch.int64, but got {x.dtype}")
        x = reduce_partial(aten.one_hot.default, x).contiguous()  # so is PyTorch's result
        for part in x._locals:
            _refuse_classes(part, num_classes)
    return aten.one_hot.default.decompose(x, num_classes)


register_composite(aten.is_same_size.default, same_size)
register_composite(aten.tensor_split.tensor_indices_or_sections, tensor_split)
register_composite(aten.one_hot.default, one_hot)
