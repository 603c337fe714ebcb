"""Random operators on DTensors: drawn whole in exact mode, by position in counter mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import OpOverload
from ..dispatch.fallback import laid_out, mesh_of, run_whole, written_in
from ..dispatch.plans import tensors_in
from ..dispatch.random_ops import is_fill
from ..layout.spec import default_placements
from ..storage import policy
from ..storage.operands import describe_moves
from ..storage.plain import full_local
from ..storage.wrapper import Wrapper
from .agree import begin
from .counter import COUNTER, dropped
from .exact import EXACT

__all__ = ["random_form"]

_BY_EXAMPLE = ("rand_like", "randn_like", "randint_like")
"""Operators that read the shape of their operand, and not its values."""


def random_form(op: OpOverload) -> Callable[..., Any]:
    """`op` with numbers that do not depend on the layouts of its operands."""
    namespace, name = op._schema.name.split("::")
    by_position = COUNTER.get(name) if namespace == "aten" else None
    by_parts = EXACT.get(name) if namespace == "aten" else None
    overwrites = is_fill(op)
    by_example = namespace == "aten" and name in _BY_EXAMPLE

    def whole(tensor: Any, written: bool) -> torch.Tensor:
        if by_example or (written and overwrites):
            shape, stride, dtype = tensor._spec.meta
            return torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device)
        full = full_local(tensor)
        return full.clone() if written else full

    def run(*args: Any, **kwargs: Any) -> Any:
        if by_example and len(args) > 1 and isinstance(args[1], torch.Tensor):
            example, high, *rest = args  # the bound alone is read: the call is that with a number
            return torch.ops.aten.randint_like(example, int(high), *rest, **kwargs)
        tensors: list[Any] = list(tensors_in(args, kwargs))
        mesh = mesh_of(op, tensors)
        mode = begin(op, mesh, kwargs.get("generator"))
        if mode == "counter" and by_position is not None:
            return by_position(op, _bound(op, args, kwargs))
        if op is torch.ops.aten.native_dropout.default:
            return _dropout(*args)
        if by_parts is not None:
            made = by_parts(op, _bound(op, args, kwargs))
            if made is not NotImplemented:
                return made
        if policy.current().moves != "auto":
            filled = {id(tensor) for tensor in written_in(op, args)} if overwrites else set()
            read = [] if by_example else [t for t in tensors if id(t) not in filled]
            policy.on_moves(op, _gathers(read))
        like = next(t._spec for t in tensors if isinstance(t, Wrapper))
        return run_whole(op, args, kwargs, whole, like)

    return run


def _dropout(x: Any, p: float, train: bool | None) -> Any:
    """The mask is drawn whole, without the values: they stay where they are."""
    shape, stride, dtype = x._spec.meta
    ones = torch.empty_strided(shape, stride, dtype=dtype, device=x.device).fill_(1)
    _, drawn = torch.native_dropout(ones, p, train)
    mask = laid_out(drawn, x._spec.topology, x._spec)
    return (x.clone() if train is False else dropped(x, mask, p)), mask


def _bound(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, with the operator's defaults."""
    given = dict(zip([a.name for a in op._schema.arguments], args, strict=False))
    defaults = {a.name: a.default_value for a in op._schema.arguments}
    return defaults | given | kwargs


def _gathers(tensors: Sequence[Any]) -> list[str]:
    """What running whole moves: every operand that is not whole yet."""
    specs = [tensor._spec for tensor in tensors if isinstance(tensor, Wrapper)]
    whole = [spec.with_placements(default_placements(spec.topology)) for spec in specs]
    moves = [
        (i, dst) for i, (src, dst) in enumerate(zip(specs, whole, strict=True)) if src is not dst
    ]
    return describe_moves(moves, specs)
