"""List operators that reduce each tensor of a list: one local call and one collective for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import inf
from typing import Any

import torch

from ..dispatch.cache import kept, plan_bytes
from ..dispatch.fallback import laid_out
from ..dispatch.infer import infer
from ..dispatch.lists import Wrapping, by_mesh, register_list_form, wrap_each, wrappings
from ..layout.placement import Partial, Replicate
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..redistribute import redistribute_locals
from ..storage.operands import all_in_layout
from ..storage.plain import full_local

Locally = Callable[[torch.dtype, list[torch.Tensor]], Sequence[torch.Tensor]]


class _Reduction:
    """How every rank learns a number of each tensor of a list.

    Each rank computes a vector of numbers, which is reduced over all axes that shard a tensor. A
    tensor counts once: on the first coordinate of the axes that do not shard it.
    """

    __slots__ = ("_counted", "_device", "_moves", "_pending", "results", "same")

    def __init__(self, tensors: Sequence[Any], kind: str, results: Sequence[TensorMeta]) -> None:
        specs = [tensor._spec.reduced for tensor in tensors]
        mesh = specs[0].topology
        axes = sorted({axis for spec in specs for axis in spec.slot_axes})
        places = [Partial(kind) if axis in axes else Replicate() for axis in range(mesh.ndim)]
        # Powers are added up in a dtype in which they do not overflow.
        wide = reduce(torch.promote_types, [meta.dtype for meta in results], torch.float32)
        self._moves = any(tensor._spec.sums for tensor in tensors)
        self._device = tensors[0].device
        self._pending = DTensorSpec(mesh, places, TensorMeta((len(specs),), (1,), wide))
        self._counted = [
            {
                i: spec.slot(coord)
                for i, spec in enumerate(specs)
                if not any(coord[axis] for axis in axes if axis not in spec.slot_axes)
            }
            for coord in self._pending.slots
        ]
        whole = default_placements(mesh)
        specs = [DTensorSpec._intern(mesh, whole, meta, None) for meta in results]
        self.results = wrappings(specs, self._device)
        self.same = all(meta.dtype is wide for meta in results)

    def run(self, tensors: Sequence[Any], local: Locally) -> torch.Tensor:
        """The numbers that `local` computes of the tensors, reduced."""
        if self._moves:
            whole = all_in_layout([(t, t._spec.reduced, False) for t in tensors])
        else:
            whole = [tensor._locals for tensor in tensors]
        pending = self._pending
        parts: list[Any] = []
        for slots in self._counted:
            here = [whole[i][slot] for i, slot in slots.items()]
            part = torch.stack([*local(pending.dtype, here)]) if here else None
            if len(here) < len(tensors):
                every = torch.zeros(len(tensors), dtype=pending.dtype, device=self._device)
                if part is not None:
                    every[[*slots]] = part
                part = every
            parts.append(part)
        return redistribute_locals(pending, pending.reduced, tuple(parts))[0]


_plans: dict[tuple[Any, ...], _Reduction] = {}


def _powers(
    op: Any, tensors: Sequence[Any], ord: Any, dtype: Any, root: bool
) -> tuple[Sequence[Wrapping], Sequence[torch.Tensor]]:
    """Sums of powers of each tensor of one mesh, or their roots, and how to wrap these numbers."""
    largest = ord == inf and root
    key = (op, ord, dtype, *[tensor._spec for tensor in tensors])
    plan = _plans.get(key)
    if plan is None:
        plan = _Reduction(tensors, "max" if largest else "sum", _metas(op, tensors, ord, dtype))
        kept.put(_plans, key, plan, plan_bytes(tensors))
    values = plan.run(tensors, partial(_largest if largest else _power_sums, ord))
    if root and not largest and ord != 1:
        values = values.sqrt() if ord == 2 else values.pow(1.0 / ord)
    made = values.unbind()
    if not plan.same:
        pairs = zip(plan.results, made, strict=True)
        made = tuple([value.to(spec.dtype) for (spec, _), value in pairs])
    return plan.results, made


def _metas(op: Any, tensors: Sequence[Any], ord: Any, dtype: Any) -> Sequence[TensorMeta]:
    """The metas of the numbers; errors are PyTorch's own."""
    specs = [tensor._spec for tensor in tensors]
    for spec in dict.fromkeys(specs):  # the meta kernels of lists check nothing
        meta = torch.empty(spec.meta.shape, dtype=spec.dtype, device="meta")
        torch.linalg.vector_norm(meta, ord, dtype=dtype)
    return infer(op, (tensors, ord, dtype), {}, specs)[0]


def _each(op: Any, tensors: Sequence[Any], ord: Any, dtype: Any, root: bool) -> list[Any]:
    """A number for each tensor of a list; tensors may be plain or on several meshes.

    Every rank knows the numbers. They are plain if there are several meshes, so that the caller can
    stack them.
    """
    meshes = by_mesh(tensors)
    if len(meshes) == 1:
        return wrap_each(*_powers(op, tensors, ord, dtype, root))
    results: list[Any] = [None] * len(tensors)
    for mesh, places in meshes.items():
        chosen = [tensors[i] for i in places]
        given = op, chosen, ord, dtype
        made: Any = op(*given[1:]) if mesh is None else _powers(*given, root)[1]
        if mesh is not None and len(meshes.keys() - {None}) == 1:
            made = [laid_out(value, mesh) for value in made]
        for i, value in zip(places, made, strict=True):
            results[i] = value
    return results


def _power_sums(ord: Any, dtype: torch.dtype, here: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    # PyTorch's kernel drops the imaginary part of a tensor of one complex number.
    real = [part.abs() if part.is_complex() else part for part in here]
    return torch._foreach_powsum(real, ord, dtype)


def _largest(ord: Any, dtype: torch.dtype, here: list[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute value; 0 for an empty tensor."""
    norm = torch.linalg.vector_norm
    return [norm(t, ord).to(dtype) if t.numel() else t.new_zeros((), dtype=dtype) for t in here]


@register_list_form("_foreach_norm")
def foreach_norm(op: Any, tensors: Sequence[Any], ord: Any = 2, dtype: Any = None) -> list[Any]:
    """The norm of each tensor."""
    if ord in (0, -inf):
        return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]
    return _each(op, tensors, ord, dtype, True)


@register_list_form("_foreach_powsum")
def foreach_powsum(op: Any, tensors: Sequence[Any], ord: Any = 2, dtype: Any = None) -> list[Any]:
    """The sum of powers of each tensor."""
    return _each(op, tensors, ord, dtype, False)


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
