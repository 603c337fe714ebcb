"""Random operators on DTensors.

Fills (`uniform_`, `normal_`, ...) and dropout draw by position in counter mode. Some operators are
composed of fills (`composites.py`). All others draw whole tensors on every rank, in both modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch import OpOverload
from ..dispatch.fallback import laid_out, mesh_of, run_on, store
from ..dispatch.plans import tensors_in
from ..dispatch.random_ops import is_fill
from ..layout.spec import DTensorSpec
from ..layout.split_dims import held_of
from ..rules.language import named
from ..storage.ragged import gather_plain
from ..storage.wrapper import Locals, Wrapper
from .agree import begin
from .composites import COMPOSITES, empty_whole
from .counter import fill


def random_form(op: OpOverload) -> Callable[..., Any]:
    """`op` with numbers that do not depend on the layouts of its operands."""
    namespace, name = op._schema.name.split("::")
    composite = COMPOSITES.get(name) if namespace == "aten" else None
    overwrites = is_fill(op)

    def whole(tensor: Any, written: bool) -> torch.Tensor:
        if written and overwrites:
            return empty_whole(tensor)
        full = gather_plain(op, tensor)
        return full.clone() if written else full

    def run(*args: Any, **kwargs: Any) -> Any:
        given = named(op, args, kwargs)
        if composite is not None:
            made = composite(op, given)
            if made is not NotImplemented:
                return made
        tensors: list[Any] = list(tensors_in(args, kwargs))
        mode = begin(op, mesh_of(op, tensors), kwargs.get("generator"))
        if op is torch.ops.aten.native_dropout.default:
            return _dropout(mode, *args)
        if mode == "counter" and overwrites and not isinstance(given.get("p"), torch.Tensor):
            return fill(op, given)
        like = next(t._spec for t in tensors if isinstance(t, Wrapper))
        return run_on(op, args, kwargs, whole, store, like)

    return run


def _dropout(mode: str, x: Any, p: float, train: bool | None) -> Any:
    """Only the mask is drawn; the values stay where they are, and a Partial stays Partial."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if mode == "counter":
        mask = torch.empty_like(x, dtype=torch.bool)
        bernoulli = torch.ops.aten.bernoulli_.float
        fill(bernoulli, {"self": mask, "p": 1 - p, "generator": None})
    else:
        _, drawn = torch.native_dropout(empty_whole(x).fill_(1), p, train)
        mask = laid_out(drawn, x._spec.topology, x._spec)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def permuted(spec: DTensorSpec, generator: torch.Generator | None) -> Locals:
    """The local tensors of a random permutation, which every rank draws whole."""
    (size,) = spec.meta.shape
    device = torch.device(spec.topology.device_type)
    begin("randperm", spec.topology, generator)
    whole = torch.randperm(size, generator=generator, dtype=spec.dtype, device=device)
    return tuple(
        torch.cat([whole[slice(*piece)] for piece in held_of(spec, coord)[0]])
        for coord in spec.slots
    )
