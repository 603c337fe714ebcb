"""List operators that reduce each tensor of a list: one local call and one collective for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import inf
from typing import Any

import torch

from ..dispatch.cache import kept, plan_bytes
from ..dispatch.infer import infer
from ..dispatch.lists import is_mixed, register_list_form, run_each, wrap_each, wrappings
from ..layout.placement import Partial, Replicate
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute.execute import redistribute_locals
from ..storage.operands import all_in_layout
from ..storage.plain import full_local
from ..storage.wrapper import Wrapper

Locally = Callable[[list[torch.Tensor], Any, torch.dtype], Any]


class _Reduction:
    """How every rank learns a number of each tensor of a list.

    Each rank computes a vector of numbers, which is reduced over all axes that shard a tensor. A
    tensor counts once: on the first coordinate of the axes that do not shard it.
    """

    __slots__ = ("_counted", "_device", "_local", "_moves", "_pending", "_root", "_same", "results")

    def __init__(
        self, tensors: Sequence[Any], ord: Any, root: bool, results: Sequence[TensorMeta]
    ) -> None:
        specs = [tensor._spec.reduced for tensor in tensors]
        mesh = specs[0].topology
        axes = sorted({axis for spec in specs for axis in spec.slot_axes})
        largest = root and ord == inf
        kind = Partial("max" if largest else "sum")
        places = [kind if axis in axes else Replicate() for axis in range(mesh.ndim)]
        # Powers are added up in a dtype in which they do not overflow.
        wide = reduce(torch.promote_types, [meta.dtype for meta in results], torch.float32)
        is_complex = any(spec.dtype.is_complex for spec in specs)
        powers = _complex_power_sums if is_complex else torch._foreach_powsum
        self._local: Locally = _largest if largest else powers
        self._root = ord if root and not largest else 1
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
        specs = [DTensorSpec.replicated(mesh, meta) for meta in results]
        self.results = wrappings(specs, self._device)
        self._same = all(meta.dtype is wide for meta in results)

    def run(self, tensors: Sequence[Any], ord: Any) -> Sequence[torch.Tensor]:
        """The numbers of the tensors."""
        if self._moves:
            every = all_in_layout([(t, t._spec.reduced, False) for t in tensors])
        else:
            every = [tensor._locals for tensor in tensors]
        pending = self._pending
        parts: list[Any] = []
        for slots in self._counted:
            here = [every[i][slot] for i, slot in slots.items()]
            part = torch.stack(self._local(here, ord, pending.dtype)) if here else None
            if len(here) < len(tensors):
                numbers = torch.zeros(len(tensors), dtype=pending.dtype, device=self._device)
                if part is not None:
                    numbers[[*slots]] = part
                part = numbers
            parts.append(part)
        values = redistribute_locals(pending, pending.reduced, tuple(parts))[0]
        if self._root != 1:
            values = values.sqrt() if self._root == 2 else values.pow(1.0 / self._root)
        made = values.unbind()
        if self._same:
            return made
        pairs = zip(self.results, made, strict=True)
        return [value.to(spec.dtype) for (spec, _), value in pairs]


_plans: dict[tuple[Any, ...], _Reduction] = {}


def _metas(op: Any, tensors: Sequence[Any], ord: Any, dtype: Any) -> Sequence[TensorMeta]:
    """The metas of the numbers; errors are PyTorch's own."""
    specs = [tensor._spec for tensor in tensors]
    for spec in dict.fromkeys(specs):  # the meta kernels of lists check nothing
        meta = torch.empty(spec.meta.shape, dtype=spec.dtype, device="meta")
        torch.linalg.vector_norm(meta, ord, dtype=dtype)
    return infer(op, (tensors, ord, dtype), {}, specs)[0]


def _each(op: Any, tensors: Sequence[Any], ord: Any, dtype: Any, root: bool) -> list[Any]:
    """The sum of powers of each tensor of a list, or its root. Every rank knows the numbers."""
    try:
        key = (op, ord, dtype, *[tensor._spec for tensor in tensors])
    except AttributeError:  # of a plain tensor
        key = ()
    plan = _plans.get(key)
    if plan is None:
        if is_mixed((tensors,), {}):
            made: list[Any] = run_each(op, tensors, ord, dtype)
            meshes = {number._spec.topology for number in made if isinstance(number, Wrapper)}
            # Numbers of several meshes are plain, so that the caller can stack them.
            return made if len(meshes) == 1 else [full_local(number) for number in made]
        plan = _Reduction(tensors, ord, root, _metas(op, tensors, ord, dtype))
        kept.put(_plans, key, plan, plan_bytes(tensors))
    return wrap_each(plan.results, plan.run(tensors, ord))


def _complex_power_sums(
    here: list[torch.Tensor], ord: Any, dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    # PyTorch's kernel drops the imaginary part of a tensor of one complex number.
    return torch._foreach_powsum([part.abs() for part in here], ord, dtype)


def _largest(here: list[torch.Tensor], ord: Any, dtype: torch.dtype) -> list[torch.Tensor]:
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


def _one_by_one(run: Callable[..., Any], op: Any, *lists: Sequence[Any]) -> list[Any]:
    return [run(*given) for given in zip(*lists, strict=True)]


register_list_form("_foreach_max")(partial(_one_by_one, torch.max))
register_list_form("_foreach_mm")(partial(_one_by_one, torch.mm))


@register_list_form("_amp_foreach_non_finite_check_and_unscale_")
def unscale(op: Any, grads: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """Scale gradients back; `found_inf` becomes 1 if an element on any rank is not finite."""
    if not grads:
        return
    largest = torch._foreach_norm(list(grads), float("inf"))
    finite = torch.stack([full_local(each).to(torch.float32) for each in largest]).isfinite().all()
    found_inf.copy_(torch.maximum(full_local(found_inf), 1.0 - finite.to(torch.float32)))
    torch._foreach_mul_(list(grads), full_local(inv_scale).reshape(()))  # it may be [1.0]
