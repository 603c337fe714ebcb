"""List operators that reduce each tensor of a list: one local call and one collective for all
tensors that are sharded alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch

from ..dispatch.fallback import laid_out
from ..dispatch.infer import infer, meta_of
from ..dispatch.lists import by_mesh, register_list_form
from ..layout.placement import Partial, Placement, Replicate
from ..layout.spec import DTensorSpec
from ..storage.operands import in_layout
from ..storage.plain import full_local
from ..storage.wrapper import Wrapper, wrap

Locally = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def _reduced(tensors: Sequence[Any], local: Locally, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that `local` computes for tensors of one mesh, reduced by `kind` over shards.

    `local` gets the local tensors of a rank. Numbers of replicated tensors are not reduced.
    """
    mesh = tensors[0]._spec.topology
    whole = [(t._spec.reduced, in_layout(t, t._spec.reduced)) for t in tensors]
    cut = [tuple(a for a, p in enumerate(spec.placements) if p.is_shard()) for spec, _ in whole]
    values: list[Any] = [None] * len(tensors)
    for axes, places in _grouped(cut).items():
        pending: list[Placement] = [
            Partial(kind) if axis in axes else Replicate() for axis in range(mesh.ndim)
        ]
        meta = meta_of(torch.empty(len(places), dtype=dtype, device="meta"))
        spec = DTensorSpec(mesh, pending, meta)
        parts = []
        for coord in spec.slots:
            here = [whole[i][1][whole[i][0].slot(coord)] for i in places]
            parts.append(torch.stack([each.to(dtype) for each in local(here)]))
        for i, value in zip(places, full_local(wrap(spec, tuple(parts))).unbind(), strict=True):
            values[i] = value
    return torch.stack(values)


def _grouped(keys: Sequence[Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return found


def _each(op: Any, tensors: Sequence[Any], args: tuple[Any, ...], on_mesh: Any) -> list[Any]:
    """A number for each tensor of a list; tensors may be plain or on several meshes.

    Every rank knows the numbers. They are plain if there are several meshes, so that the caller can
    stack them.
    """
    meshes = by_mesh([t._spec.topology if isinstance(t, Wrapper) else None for t in tensors])
    several = len(meshes.keys() - {None}) > 1
    results: list[Any] = [None] * len(tensors)
    for mesh, places in meshes.items():
        chosen = [tensors[i] for i in places]
        made = op(chosen, *args) if mesh is None else on_mesh(chosen)
        for i, value in zip(places, made, strict=True):
            results[i] = value if mesh is None or several else laid_out(value.clone(), mesh)
    return results


def _powers(op: Any, tensors: Sequence[Any], ord: Any, dtype: Any, root: bool) -> list[Any]:
    """Sums of powers of each tensor of one mesh, and their roots."""
    specs = [tensor._spec for tensor in tensors]
    known, _ = infer(op, (tensors, ord, dtype), {}, specs)  # errors are PyTorch's own
    for spec in dict.fromkeys(specs):  # the meta kernels of lists check nothing
        meta = torch.empty(spec.meta.shape, dtype=spec.dtype, device="meta")
        torch.linalg.vector_norm(meta, ord, dtype=dtype)
    results: list[Any] = [None] * len(tensors)
    for result, places in _grouped([meta.dtype for meta in known]).items():
        # Powers are added up in a dtype in which they do not overflow.
        wide = torch.float32 if result.itemsize < 4 else result
        largest = ord == inf and root
        local = partial(_largest if largest else _power_sums, ord, wide)
        values = _reduced([tensors[i] for i in places], local, "max" if largest else "sum", wide)
        if root and not largest and ord != 1:
            values = values.sqrt() if ord == 2 else values.pow(1.0 / ord)
        for i, value in zip(places, values.to(result).unbind(), strict=True):
            results[i] = value
    return results


def _power_sums(ord: Any, dtype: torch.dtype, here: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    wide = [each.to(dtype.to_complex() if each.is_complex() else dtype) for each in here]
    return torch._foreach_powsum(wide, ord)


def _largest(ord: Any, dtype: torch.dtype, here: list[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute value; 0 for an empty tensor."""
    return [
        torch.linalg.vector_norm(each, ord) if each.numel() else each.new_zeros((), dtype=dtype)
        for each in here
    ]


@register_list_form("_foreach_norm")
def foreach_norm(op: Any, tensors: Sequence[Any], ord: Any = 2, dtype: Any = None) -> list[Any]:
    """The norm of each tensor."""
    if ord in (0, -inf):
        return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]
    return _each(op, tensors, (ord, dtype), lambda own: _powers(op, own, ord, dtype, True))


@register_list_form("_foreach_powsum")
def foreach_powsum(op: Any, tensors: Sequence[Any], ord: Any = 2, dtype: Any = None) -> list[Any]:
    """The sum of powers of each tensor."""
    return _each(op, tensors, (ord, dtype), lambda own: _powers(op, own, ord, dtype, False))


@register_list_form("_foreach_max")
def foreach_max(op: Any, tensors: Sequence[Any]) -> list[Any]:
    """The largest value of each tensor."""
    return [torch.max(tensor) for tensor in tensors]


@register_list_form("_foreach_mm")
def foreach_mm(op: Any, tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The products of pairs."""
    return [torch.mm(a, b) for a, b in zip(tensors, others, strict=True)]


@register_list_form("_amp_foreach_non_finite_check_and_unscale_")
def unscale(op: Any, grads: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """Scale gradients back; `found_inf` becomes 1 if an element on any rank is not finite."""
    if not grads:
        return
    largest = torch._foreach_norm(list(grads), float("inf"))
    finite = torch.stack([full_local(each).to(torch.float32) for each in largest]).isfinite().all()
    found_inf.copy_(torch.maximum(full_local(found_inf), 1.0 - finite.to(torch.float32)))
    torch._foreach_mul_(list(grads), full_local(inv_scale).reshape(()))  # it may be [1.0]
