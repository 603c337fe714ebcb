"""Sparse tensors among DTensors.

A sparse tensor has no boxes, so it is never on a mesh. It may stand among DTensors as a plain
tensor, the same on every rank; results and gradients that are sparse are such tensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import policy
from ._torch import OpOverload
from .engine import engine_of
from .errors import PlainTensorError
from .geometry import stride_like
from .infer import meta_of
from .mesh import Topology
from .placement import Shard
from .plain import digest
from .plans import tensors_in
from .ragged import laid, whole
from .replicated import fallback_form, mesh_of
from .spec import DTensorSpec
from .trace import planned
from .wrapper import Wrapper, wrap

__all__ = ["has_sparse", "is_sparse", "run_sparse"]

aten = torch.ops.aten
_LAYOUTS = frozenset(
    (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)


def is_sparse(value: torch.Tensor) -> bool:
    """Whether a tensor is in one of the sparse layouts."""
    return value.layout in _LAYOUTS


def has_sparse(operands: Sequence[Any]) -> bool:
    """Whether a sparse tensor is among the operands of a call."""
    return any(not isinstance(each, Wrapper) and is_sparse(each) for each in operands)


def run_sparse(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator on DTensors and sparse tensors."""
    tensors = list(tensors_in(args, kwargs))
    mesh = mesh_of(op, tensors)
    for tensor in tensors:
        if not isinstance(tensor, Wrapper):
            policy.on_plain(op, tuple(tensor.shape))
            if is_sparse(tensor):
                _check_equal(op, tensor, mesh)
    form = _FORMS.get(op._schema.name.removeprefix("aten::"))
    made = NotImplemented if form is None else form(op, *args, **kwargs)
    planned(op, "fallback" if made is NotImplemented else "form")
    if made is not NotImplemented:
        return made
    policy.on_fallback(op, _said)
    return fallback_form(op)(*args, **kwargs)


_said: set[object] = set()


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one is made of."""
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    return [value.ccol_indices(), value.row_indices(), value.values()]


def _check_equal(op: OpOverload, value: torch.Tensor, mesh: Topology) -> None:
    if mesh.virtual or policy.current().plain not in ("check", "check_always"):
        return
    number = sum((place + 1) * digest(part) for place, part in enumerate(_parts(value))) % (1 << 61)
    if not engine_of(mesh).check_equal(mesh, number):
        raise PlainTensorError(
            f"{op}: a sparse tensor of shape {list(value.shape)} is mixed with DTensors, but it is "
            "not equal on all ranks. A sparse tensor counts as replicated."
        )


def _add_in_place(op: OpOverload, x: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Each rank adds the elements that lie in its box."""
    fits = isinstance(x, Wrapper) and other.layout is torch.sparse_coo and x.shape == other.shape
    if not fits or other.sparse_dim() == 0:
        return NotImplemented
    values = other._values().to(x.dtype)
    scaled = values if type(alpha) is int and alpha == 1 else values * alpha
    return aten.index_put_.default(x, list(other._indices()), scaled, True)


def _add(op: OpOverload, x: Any, other: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(x, Wrapper) or x.dtype != other.dtype:
        return NotImplemented
    return _add_in_place(op, aten.clone.default(x), other, alpha=alpha)


def _mask(op: OpOverload, x: Any, mask: Any) -> Any:
    """The elements of `x` that a sparse tensor has: they are picked, and the same on every rank."""
    if not isinstance(x, Wrapper) or mask.layout is not torch.sparse_coo or not mask.sparse_dim():
        return NotImplemented
    values = whole(op, aten.index.Tensor(x, list(mask._indices())))
    return torch.sparse_coo_tensor(
        mask._indices(),
        values,
        mask.shape,
        is_coalesced=mask.is_coalesced(),
        check_invariants=False,
    )


def _product(op: OpOverload, a: Any, b: Any, *rest: Any) -> Any:
    """A product with a sparse matrix: a rank has columns of the result, or rows, if the sparse
    matrix is the second."""
    x, free = (a, 0) if isinstance(a, Wrapper) else (b, 1)
    if not isinstance(x, Wrapper) or is_sparse(x) or x.ndim != 2:
        return NotImplemented
    spec = x._spec
    if not spec.is_replicated():
        places = [p if p.is_replicate() else Shard(free) for p in spec.placements]
        kept = spec.cuts if tuple(places) == spec.placements else None
        x = laid(op, x, DTensorSpec(spec.topology, places, spec.meta, cuts=kept))
    if op is aten._sparse_mm_reduce_impl.default:
        pairs = [_reduced(op, a, part, *rest) for part in x._locals]
        return tuple(_joined(x, column, free) for column in zip(*pairs, strict=True))
    made = [op(part, b) if free == 0 else op(a, part) for part in x._locals]
    by_columns = free == 0 and b.layout is torch.sparse_coo
    return _joined(x, made, free, (1, 0) if by_columns else (0, 1))


def _reduced(op: OpOverload, a: Any, part: torch.Tensor, reduce: str) -> list[torch.Tensor]:
    """The result, and where maxima stand: the kernel tells only if a gradient will be asked for."""
    with torch.enable_grad():
        made = op(a, part.detach().requires_grad_(), reduce)
    return [each.detach() for each in made]


def _joined(x: Any, parts: Sequence[torch.Tensor], free: int, order: Sequence[int] = (0, 1)) -> Any:
    """The result of a product, which is cut along `free` as the dense operand is."""
    if parts[0].ndim != 2 or is_sparse(parts[0]):
        return parts[0]
    spec, meta = x._spec, meta_of(parts[0])
    shape = [*meta.shape]
    shape[free] = spec.meta.shape[free]
    cuts = None if spec.cuts is None else [spec.cuts[free] if d == free else None for d in (0, 1)]
    full = meta._replace(shape=tuple(shape), stride=stride_like(shape, order))
    return wrap(DTensorSpec(spec.topology, spec.placements, full, cuts=cuts), tuple(parts))


def _add_product(
    op: OpOverload, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    if not isinstance(b, Wrapper) or not is_sparse(a):
        return NotImplemented
    product = aten.mm.default(a, b)
    scaled = product if alpha == 1 else product * alpha
    return scaled if beta == 0 else aten.add.Tensor(scaled, bias * beta)


_FORMS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "add_": _add_in_place,
    "sparse_mask": _mask,
    "mm": _product,
    "_sparse_mm_reduce_impl": _product,
    "_sparse_addmm": _add_product,
}
"""Operators that need less than all of their dense operands."""
